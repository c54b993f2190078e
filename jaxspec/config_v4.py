"""`config.json` of DeepSeek-V4: V4-Flash and V4-Pro, with an MTP draft, in DeepSeek's and transformers' keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxspec import config as shared
from jaxspec.config import Quantization, Yarn
from jaxspec.errors import ConfigError

ARCHITECTURE = "DeepseekV4ForCausalLM"
REQUIRED_VALUES: Mapping[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
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


@dataclasses.dataclass(frozen=True)
class DeepseekV4Config:
    """A DeepSeek-V4 model. Fields are `config.json`'s own.

    Attributes:
        compress_ratios: of each target layer: 0 sees the window only, 4 compresses with overlap and
            lets the indexer choose, 128 compresses and sees all.
        draft_compress_ratios: of each draft layer, the entries behind the target's.
        num_hash_layers: first layers, which route by token id.
        rope_theta: of layers with ratio 0; they have no YaRN.
        compress_rope_theta, rope: of the other layers.
        swiglu_limit: the gate is cut above it, the other factor on both sides.
    """

    family: Literal["deepseek_v4"]
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    q_lora_rank: int
    qk_rope_head_dim: int
    head_dim: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    max_position_embeddings: int
    num_hash_layers: int
    hc_eps: float
    rms_norm_eps: float
    routed_scaling_factor: float
    swiglu_limit: float
    compress_ratios: tuple[int, ...]
    draft_compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope: Yarn | None
    quantization: Quantization | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    unknown_keys: tuple[str, ...]

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "DeepseekV4Config":
        """Reads the contents of `config.json` and, where there is one, `generation_config.json`.

        Raises:
            ConfigError: a key is missing, malformed, or has a value that cannot be honoured.
        """
        for key, value in REQUIRED_VALUES.items():
            if hf.get(key, value) != value:
                raise ConfigError(f"config.json: {key}={hf[key]!r} is not supported; {value!r} is")
        num_layers = shared._integer(hf, "num_hidden_layers")
        ratios = _compress_ratios(hf, num_layers)
        eos_token_ids, pad_token_id = shared._special_tokens(hf, generation or {})
        rope_theta, rope = shared._rope(hf)
        return cls(
            family="deepseek_v4",
            num_hash_layers=int(hf.get("num_hash_layers") or 0),
            hc_eps=shared._number(hf, "hc_eps", 1e-6),
            rms_norm_eps=shared._number(hf, "rms_norm_eps", 1e-6),
            routed_scaling_factor=shared._number(hf, "routed_scaling_factor", 1.0),
            swiglu_limit=shared._number(hf, "swiglu_limit"),
            compress_ratios=ratios[:num_layers],
            draft_compress_ratios=ratios[num_layers:],
            rope_theta=rope_theta,
            compress_rope_theta=shared._number(hf, "compress_rope_theta"),
            rope=rope,
            quantization=shared._quantization(hf),
            dtype=shared._dtype(hf),
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id,
            unknown_keys=(),
            **{name: shared._integer(hf, name) for name in INTEGER_FIELDS},
        )

    @property
    def weight_block_size(self) -> tuple[int, int]:
        """Block of an FP8 matrix; DeepSeek's 128 x 128 where the config is silent."""
        return self.quantization.weight_block_size if self.quantization else (128, 128)

    @property
    def activation_scale_format(self) -> Literal["float32", "ue8m0"]:
        """V4's kernels round every scale up to a power of two."""
        return "ue8m0"


def _compress_ratios(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    ratios = hf.get("compress_ratios")
    if not isinstance(ratios, list | tuple) or len(ratios) < num_layers:
        raise ConfigError(
            f"config.json: compress_ratios={ratios!r}; one of {RATIOS} for each of {num_layers} layers is needed"
        )
    for ratio in ratios:
        if ratio not in RATIOS:
            raise ConfigError(f"config.json: compress_ratios holds {ratio!r}; one of {RATIOS} is needed")
    return tuple(ratios)
