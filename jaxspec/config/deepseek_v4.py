"""`config.json` of DeepSeek-V4: V4-Flash and V4-Pro, with or without a draft."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxspec.config.base import (
    ModelConfig,
    check_values,
    read_dtype,
    read_integer,
    read_number,
    read_quantization,
    read_rope,
    read_special_tokens,
    unknown_keys,
)
from jaxspec.config.transformers_v4 import in_released_keys
from jaxspec.errors import ConfigError

REQUIRED_VALUES: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
INTEGER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "q_lora_rank",
    "qk_rope_head_dim",
    "head_dim",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
)
RATIOS = (0, 4, 128)
EXPERT_DTYPES = ("fp4", "fp8", "bf16")

READ_KEYS = frozenset(
    [
        "architectures",
        "compress_ratios",
        "compress_rope_theta",
        "dtype",
        "eos_token_id",
        "expert_dtype",
        "hc_eps",
        "model_type",
        "num_hash_layers",
        "num_nextn_predict_layers",
        "pad_token_id",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "routed_scaling_factor",
        "swiglu_limit",
        "torch_dtype",
    ]
)
# Keys that do not change what the model computes.
IGNORED_KEYS = frozenset(
    [
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "initializer_range",
        "intermediate_size",
        "num_local_experts",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "transformers_version",
        "use_cache",
    ]
)
KNOWN_KEYS = READ_KEYS | IGNORED_KEYS | REQUIRED_VALUES.keys() | set(INTEGER_FIELDS)


@dataclasses.dataclass(frozen=True)
class DeepseekV4Config(ModelConfig):
    """A DeepSeek-V4 model. Fields are `config.json`'s own.

    Attributes:
        compress_ratios: of each target layer: 0 sees the window only, 4 compresses with overlap and
            lets the indexer choose, 128 compresses and sees all.
        draft_compress_ratios: of each draft layer, the entries behind the target's; 0 for draft
            layers that `num_nextn_predict_layers` alone announces.
        num_hash_layers: first layers, which route by token id.
        rope_theta: of layers with ratio 0, which have no YaRN.
        compress_rope_theta, rope: of the other layers.
        expert_dtype: what the config says that experts are stored as, or None; a file that says
            otherwise is refused.
        swiglu_limit: the gate is cut above it, the other factor on both sides.
    """

    q_lora_rank: int
    head_dim: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    num_hash_layers: int
    hc_eps: float
    swiglu_limit: float
    compress_ratios: tuple[int, ...]
    draft_compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    expert_dtype: str | None

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "DeepseekV4Config":
        """Reads the contents of `config.json` and, where there is one, `generation_config.json`.

        Raises:
            ConfigError: a key is missing, malformed, or has a value that cannot be honoured.
        """
        hf = in_released_keys(hf)
        check_values(hf, REQUIRED_VALUES)
        num_layers = read_integer(hf, "num_hidden_layers")
        ratios, draft_ratios = _compress_ratios(hf, num_layers)
        eos_token_ids, pad_token_id = read_special_tokens(hf, generation or {})
        rope_theta, rope = read_rope(hf)
        config = cls(
            family="deepseek_v4",
            num_nextn_predict_layers=len(draft_ratios),
            num_hash_layers=read_integer({"num_hash_layers": 0, **hf}, "num_hash_layers", 0),
            hc_eps=read_number(hf, "hc_eps", 1e-6),
            rms_norm_eps=read_number(hf, "rms_norm_eps", 1e-6),
            routed_scaling_factor=read_number(hf, "routed_scaling_factor", 1.0),
            swiglu_limit=read_number(hf, "swiglu_limit"),
            compress_ratios=ratios,
            draft_compress_ratios=draft_ratios,
            rope_theta=rope_theta,
            compress_rope_theta=read_number(hf, "compress_rope_theta"),
            rope=rope,
            quantization=read_quantization(hf),
            expert_dtype=_expert_dtype(hf),
            dtype=read_dtype(hf),
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id,
            unknown_keys=unknown_keys(hf, KNOWN_KEYS),
            **{name: read_integer(hf, name) for name in INTEGER_FIELDS},
        )
        config.check_special_tokens()
        if config.num_attention_heads % config.o_groups:
            raise ConfigError(
                f"config.json: o_groups={config.o_groups} does not divide "
                f"num_attention_heads={config.num_attention_heads}"
            )
        return config

    @property
    def cache_ratios(self) -> tuple[int, ...]:
        """A compressed entry for each group of positions; windows are not paged."""
        return tuple(sorted({*self.compress_ratios, *self.draft_compress_ratios} - {0}))

    @property
    def head_counts(self) -> Mapping[str, int]:
        """Heads, and the groups of them that share an output projection."""
        return {"num_attention_heads": self.num_attention_heads, "o_groups": self.o_groups}

    @property
    def activation_scale_format(self) -> Literal["float32", "ue8m0"]:
        """V4's kernels round every scale up to a power of two."""
        return "ue8m0"


def _compress_ratios(
    hf: Mapping[str, Any], num_layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ratios of the target's layers and of the draft's."""
    ratios = hf.get("compress_ratios")
    if not isinstance(ratios, list | tuple) or len(ratios) < num_layers:
        raise ConfigError(
            f"config.json: compress_ratios={ratios!r}; one of {RATIOS} for each of the "
            f"{num_layers} layers is needed"
        )
    for ratio in ratios:
        if ratio not in RATIOS:
            raise ConfigError(
                f"config.json: compress_ratios holds {ratio!r}; one of {RATIOS} is needed"
            )
    # Released files have a ratio for each draft layer, whatever number of them they announce.
    announced = read_integer({"num_nextn_predict_layers": 0, **hf}, "num_nextn_predict_layers", 0)
    draft = tuple(ratios[num_layers:]) or (0,) * announced
    is_off = hf.get("num_nextn_predict_layers") == 0
    return tuple(ratios[:num_layers]), () if is_off else draft


def _expert_dtype(hf: Mapping[str, Any]) -> str | None:
    said = hf.get("expert_dtype")
    if said not in (None, *EXPERT_DTYPES):
        raise ConfigError(
            f"config.json: expert_dtype={said!r} is not supported; "
            f"one of {', '.join(EXPERT_DTYPES)} is"
        )
    return said
