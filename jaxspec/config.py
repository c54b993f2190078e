"""`config.json` of a published model, read into one frozen, validated object.

`ModelConfig.from_hf` is the only place that knows upstream's key names. It refuses what cannot be
honoured, by key name, and lists the keys it does not know.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxspec.errors import ConfigError

# Keys that do not change what the model computes.
IGNORED_KEYS = frozenset(
    [
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "ep_size",
        "head_dim",
        "initializer_range",
        "num_local_experts",
        "output_router_logits",
        "pretraining_tp",
        "qk_head_dim",
        "seq_aux",
        "transformers_version",
        "use_cache",
    ]
)
# Keys that are read one by one below.
READ_KEYS = frozenset(
    [
        "architectures",
        "dtype",
        "eos_token_id",
        "model_type",
        "num_key_value_heads",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "pad_token_id",
        "q_lora_rank",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "routed_scaling_factor",
        "torch_dtype",
    ]
)
INTEGER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
)
# Keys of which one value is honoured. A missing key means that value.
REQUIRED_VALUES: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
MODEL_TYPES = ("deepseek_v3", "kimi_k2")
ARCHITECTURES = ("DeepseekV3ForCausalLM",)
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN's stretched rotary frequencies (arXiv:2309.00071); the names are `rope_scaling`'s."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def amplitude(self, mscale: float) -> float:
        """YaRN's attention amplitude, `0.1 * mscale * ln(factor) + 1`."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How the config says that matrices are stored.

    Attributes:
        method: `fp8` (e4m3 in blocks), or `nvfp4`, which is read so that it can be refused by name.
        weight_block_size: rows and columns that share a scale.
        scale_fmt: format of the activation scales; `ue8m0` rounds them up to powers of two.
    """

    method: Literal["fp8", "nvfp4"] = "fp8"
    weight_block_size: tuple[int, int] = (128, 128)
    scale_fmt: Literal["float32", "ue8m0"] = "float32"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V3 shaped model: V3, V3-0324, V3.1, R1, Kimi-K2. Fields are `config.json`'s own.

    Attributes:
        q_lora_rank: None projects queries directly (`q_proj`).
        rope: None is plain rotary embedding.
        num_nextn_predict_layers: 0 or 1.
        quantization: None where the config is silent; what a tensor is stored as decides anyway.
        dtype: the checkpoint's compute dtype.
        eos_token_ids: `generation_config.json`'s, else the config's; may be empty.
        pad_token_id: the config's, else the first end token, else 0.
        unknown_keys: keys of the file that nothing here reads, for a report.
    """

    family: Literal["deepseek_v3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_nextn_predict_layers: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope: Yarn | None
    quantization: Quantization | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    unknown_keys: tuple[str, ...]

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "ModelConfig":
        """Reads the contents of `config.json` and, where there is one, `generation_config.json`.

        Raises:
            ConfigError: a key is missing, malformed, or has a value that cannot be honoured.
        """
        check_family(hf)
        for key, value in REQUIRED_VALUES.items():
            if hf.get(key, value) != value:
                raise ConfigError(f"config.json: {key}={hf[key]!r} is not supported; {value!r} is")
        num_heads = _integer(hf, "num_attention_heads")
        if hf.get("num_key_value_heads") not in (None, num_heads):
            raise ConfigError(
                f"config.json: num_key_value_heads={hf['num_key_value_heads']} is not supported; "
                f"latent attention has one per query head ({num_heads})"
            )
        eos_token_ids, pad_token_id = _special_tokens(hf, generation or {})
        rope_theta, rope = _rope(hf)
        config = cls(
            family="deepseek_v3",
            num_nextn_predict_layers=_num_nextn_layers(hf),
            q_lora_rank=None if hf.get("q_lora_rank") is None else _integer(hf, "q_lora_rank"),
            rms_norm_eps=_number(hf, "rms_norm_eps", 1e-6),
            routed_scaling_factor=_number(hf, "routed_scaling_factor", 1.0),
            rope_theta=rope_theta,
            rope=rope,
            quantization=_quantization(hf),
            dtype=_dtype(hf),
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id,
            unknown_keys=_unknown_keys(hf),
            **{name: _integer(hf, name) for name in INTEGER_FIELDS},
        )
        config._check()
        return config

    def _check(self) -> None:
        """Refuses sizes that contradict one another."""
        if self.n_routed_experts % self.n_group:
            raise ConfigError(
                f"config.json: n_routed_experts={self.n_routed_experts} is not a multiple of "
                f"n_group={self.n_group}"
            )
        if self.topk_group > self.n_group:
            raise ConfigError(
                f"config.json: topk_group={self.topk_group} exceeds n_group={self.n_group}"
            )
        routable = self.topk_group * (self.n_routed_experts // self.n_group)
        if self.num_experts_per_tok > routable:
            raise ConfigError(
                f"config.json: num_experts_per_tok={self.num_experts_per_tok} exceeds the "
                f"{routable} experts of topk_group={self.topk_group} groups"
            )
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"config.json: qk_rope_head_dim={self.qk_rope_head_dim} is odd")
        for token in (*self.eos_token_ids, self.pad_token_id):
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"config.json: special token {token} is outside vocab_size={self.vocab_size}"
                )

    @property
    def latent_dim(self) -> int:
        """Width of a cached row: the normed latent and the rotated shared key, `c + r`."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def weight_block_size(self) -> tuple[int, int]:
        """Block of a quantized matrix; DeepSeek's 128 x 128 where the config is silent."""
        return self.quantization.weight_block_size if self.quantization else (128, 128)

    @property
    def activation_scale_format(self) -> Literal["float32", "ue8m0"]:
        return self.quantization.scale_fmt if self.quantization else "float32"

    @property
    def draft_quantization(self) -> Quantization | None:
        """The draft's own: an NVFP4 checkpoint stores its NextN layer in BF16 (the seed's rule)."""
        if self.quantization and self.quantization.method == "nvfp4":
            return None
        return self.quantization

    def is_moe(self, layer: int) -> bool:
        """Whether a layer routes to experts. The draft's, behind the last layer, does."""
        return layer >= self.first_k_dense_replace


def check_family(hf: Mapping[str, Any]) -> None:
    """Refuses a config of a model that this package does not run.

    Raises:
        ConfigError: `model_type` or `architectures` names another model.
    """
    model_type, architectures = hf.get("model_type"), hf.get("architectures") or ARCHITECTURES
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"config.json: model_type={model_type!r} is not supported; "
            f"one of {', '.join(MODEL_TYPES)} is"
        )
    if not set(architectures) & set(ARCHITECTURES):
        raise ConfigError(
            f"config.json: architectures={list(architectures)} is not supported; "
            f"{ARCHITECTURES[0]} is"
        )


def _integer(hf: Mapping[str, Any], key: str) -> int:
    value = hf.get(key)
    smallest = 0 if key == "first_k_dense_replace" else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ConfigError(
            f"config.json: {key}={value!r}; an integer of at least {smallest} is needed"
        )
    return value


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"config.json: {key}={value!r}; a finite number is needed")
    return float(value)


def _num_nextn_layers(hf: Mapping[str, Any]) -> int:
    # transformers 5 writes num_mtp_layers.
    count = hf.get("num_nextn_predict_layers", hf.get("num_mtp_layers")) or 0
    if count not in (0, 1):
        raise ConfigError(
            f"config.json: num_nextn_predict_layers={count!r}; only 0 or 1 NextN layer is supported"
        )
    return int(count)


def _rope(hf: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """The rotary base and its YaRN, from `rope_scaling` or transformers 5's `rope_parameters`."""
    newer = hf.get("rope_parameters") or {}
    scaling = hf.get("rope_scaling") or newer
    theta = _number(
        {"rope_theta": newer.get("rope_theta", hf.get("rope_theta", 10000.0))}, "rope_theta"
    )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ConfigError(f"config.json: rope_scaling.type={kind!r} is not supported; 'yarn' is")
    names = [field.name for field in dataclasses.fields(Yarn)]
    for key, value in scaling.items():
        if key not in (*names, "type", "rope_type", "rope_theta") and value is not None:
            raise ConfigError(f"config.json: rope_scaling.{key}={value!r} is not supported")
    values = {name: _number(scaling, name) for name in names if scaling.get(name) is not None}
    if "factor" not in values or "original_max_position_embeddings" not in values:
        raise ConfigError(
            "config.json: rope_scaling lacks factor or original_max_position_embeddings"
        )
    original = int(values.pop("original_max_position_embeddings"))
    return theta, Yarn(original_max_position_embeddings=original, **values)


def _quantization(hf: Mapping[str, Any]) -> Quantization | None:
    values = hf.get("quantization_config")
    if values is None:
        return None
    if (
        "NVFP4" in str(values.get("quant_algo", "")).upper()
        or values.get("quant_method") == "nvfp4"
    ):
        return Quantization(method="nvfp4")
    honoured = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic", None),
    }
    honoured["scale_fmt"] = ("ue8m0", "float32", None)
    for key, allowed in honoured.items():
        if values.get(key) not in allowed:
            raise ConfigError(
                f"config.json: quantization_config.{key}={values.get(key)!r} is not supported; "
                f"{allowed[0]!r} is"
            )
    block = values.get("weight_block_size") or (128, 128)
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ConfigError(
            f"config.json: quantization_config.weight_block_size={block!r}; two sizes are needed"
        )
    return Quantization(
        weight_block_size=(block[0], block[1]),
        scale_fmt="ue8m0" if values.get("scale_fmt") == "ue8m0" else "float32",
    )


def _dtype(hf: Mapping[str, Any]) -> str:
    # transformers 5 writes dtype.
    name = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    if name not in DTYPES:
        raise ConfigError(
            f"config.json: torch_dtype={name!r} is not supported; one of {', '.join(DTYPES)} is"
        )
    return name


def _special_tokens(
    hf: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[tuple[int, ...], int]:
    eos = generation.get("eos_token_id", hf.get("eos_token_id"))
    ids = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    if not all(isinstance(token, int) for token in ids):
        raise ConfigError(f"config.json: eos_token_id={eos!r}; token ids are needed")
    pad = generation.get("pad_token_id", hf.get("pad_token_id"))
    return ids, pad if isinstance(pad, int) else (*ids, 0)[0]


def _unknown_keys(hf: Mapping[str, Any]) -> tuple[str, ...]:
    known = READ_KEYS | IGNORED_KEYS | REQUIRED_VALUES.keys() | set(INTEGER_FIELDS)
    return tuple(sorted(key for key in hf if key not in known and not key.startswith("_")))
