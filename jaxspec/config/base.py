"""What the configs of all families share: their common fields, and readers of single keys."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxspec.errors import ConfigError

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
    """The fields that every family has; they are `config.json`'s own.

    Attributes:
        num_nextn_predict_layers: draft layers behind the target's.
        rope: None is plain rotary embedding.
        quantization: None where the config is silent; what a tensor is stored as decides anyway.
        dtype: the checkpoint's compute dtype.
        eos_token_ids: `generation_config.json`'s, else the config's; may be empty.
        pad_token_id: the config's, else the first end token, else 0.
        unknown_keys: keys of the file that nothing here reads, for a report.
    """

    family: str
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_nextn_predict_layers: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    qk_rope_head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope: Yarn | None
    quantization: Quantization | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    unknown_keys: tuple[str, ...]

    @property
    def weight_block_size(self) -> tuple[int, int]:
        """Block of an FP8 matrix; DeepSeek's 128 x 128 where the config is silent."""
        return self.quantization.weight_block_size if self.quantization else (128, 128)

    @property
    def activation_scale_format(self) -> Literal["float32", "ue8m0"]:
        """How the scales of quantized activations are rounded."""
        return self.quantization.scale_fmt if self.quantization else "float32"

    @property
    def cache_ratios(self) -> tuple[int, ...]:
        """Positions that a paged cache row stands for, one for each page table that is needed."""
        raise NotImplementedError

    @property
    def head_counts(self) -> Mapping[str, int]:
        """What a mesh must divide to cut at whole heads, by key."""
        return {"num_attention_heads": self.num_attention_heads}

    def check_special_tokens(self) -> None:
        """Refuses special tokens outside the vocabulary.

        Raises:
            ConfigError: names the token.
        """
        for token in (*self.eos_token_ids, self.pad_token_id):
            if not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"config.json: special token {token} is outside vocab_size={self.vocab_size}"
                )


def check_values(hf: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    """Refuses keys that are there with another value than the one honoured.

    Raises:
        ConfigError: names the key.
    """
    for key, value in required.items():
        if hf.get(key, value) != value:
            raise ConfigError(f"config.json: {key}={hf[key]!r} is not supported; {value!r} is")


def read_integer(hf: Mapping[str, Any], key: str, smallest: int = 1) -> int:
    """An integer of at least `smallest`."""
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ConfigError(
            f"config.json: {key}={value!r}; an integer of at least {smallest} is needed"
        )
    return value


def read_number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number that is not negative."""
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"config.json: {key}={value!r}; a finite number is needed")
    return float(value)


def read_object(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested object; empty where the key is absent or null."""
    value = hf.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {key}={value!r:.60}; an object is needed")
    return value


def read_rope(hf: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """The rotary base and its YaRN, from `rope_scaling` or transformers 5's `rope_parameters`."""
    newer = read_object(hf, "rope_parameters")
    scaling = read_object(hf, "rope_scaling") or newer
    theta = read_number(
        {"rope_theta": newer.get("rope_theta", hf.get("rope_theta", 10000.0))}, "rope_theta"
    )
    if theta <= 1:
        raise ConfigError(f"config.json: rope_theta={theta}; more than 1 is needed")
    kinds = {scaling[key] for key in ("rope_type", "type") if scaling.get(key) is not None}
    if not kinds and scaling.keys() <= {"rope_theta"} or kinds == {"default"}:
        return theta, None
    if kinds != {"yarn"}:
        named = " and ".join(map(repr, sorted(map(str, kinds)))) or "missing"
        raise ConfigError(f"config.json: rope_scaling.type={named} is not supported; 'yarn' is")
    return theta, _yarn(scaling)


def _yarn(scaling: Mapping[str, Any]) -> Yarn:
    names = [field.name for field in dataclasses.fields(Yarn)]
    for key, value in scaling.items():
        if key not in (*names, "type", "rope_type", "rope_theta") and value is not None:
            raise ConfigError(f"config.json: rope_scaling.{key}={value!r} is not supported")
    values = {name: read_number(scaling, name) for name in names if scaling.get(name) is not None}
    if "factor" not in values or "original_max_position_embeddings" not in values:
        raise ConfigError(
            "config.json: rope_scaling lacks factor or original_max_position_embeddings"
        )
    for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        if values.get(name, 1) <= 0:
            raise ConfigError(f"config.json: rope_scaling.{name}=0; more than 0 is needed")
    original = read_integer(scaling, "original_max_position_embeddings")
    return Yarn(**{**values, "original_max_position_embeddings": original})


def read_quantization(hf: Mapping[str, Any]) -> Quantization | None:
    """`quantization_config`, or None where the config is silent."""
    values = read_object(hf, "quantization_config")
    if not values:
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
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or not all(isinstance(size, int) and size > 0 for size in block):
        raise ConfigError(
            f"config.json: quantization_config.weight_block_size={block!r}; two sizes are needed"
        )
    return Quantization(
        weight_block_size=(block[0], block[1]),
        scale_fmt="ue8m0" if values.get("scale_fmt") == "ue8m0" else "float32",
    )


def read_dtype(hf: Mapping[str, Any]) -> str:
    """The compute dtype."""
    # transformers 5 writes dtype.
    name = hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    if name not in DTYPES:
        raise ConfigError(
            f"config.json: torch_dtype={name!r} is not supported; one of {', '.join(DTYPES)} is"
        )
    return name


def read_special_tokens(
    hf: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[tuple[int, ...], int]:
    """End tokens, `generation_config.json`'s first; and the pad token."""
    eos, pad = (
        next((file[key] for file in (generation, hf) if file.get(key) is not None), None)
        for key in ("eos_token_id", "pad_token_id")
    )
    ids = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    for name, value in (*(("eos_token_id", token) for token in ids), ("pad_token_id", pad)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ConfigError(f"config.json: {name}={value!r}; token ids are needed")
    return ids, (*ids, 0)[0] if pad is None else pad


def unknown_keys(hf: Mapping[str, Any], known: frozenset[str]) -> tuple[str, ...]:
    """Keys that nothing reads."""
    return tuple(sorted(key for key in hf if key not in known and not key.startswith("_")))
