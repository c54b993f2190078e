"""`config.json` of DeepSeek-V3: V3, V3-0324, V3.1, R1, and Kimi-K2, which is built alike."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.config.base import (
    ModelConfig,
    Quantization,
    check_values,
    read_dtype,
    read_integer,
    read_number,
    read_quantization,
    read_rope,
    read_special_tokens,
    unknown_keys,
)
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
        "first_k_dense_replace",
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


KNOWN_KEYS = READ_KEYS | IGNORED_KEYS | REQUIRED_VALUES.keys() | set(INTEGER_FIELDS)


@dataclasses.dataclass(frozen=True)
class DeepseekV3Config(ModelConfig):
    """A DeepSeek-V3 shaped model. Fields are `config.json`'s own.

    Attributes:
        q_lora_rank: None projects queries directly (`q_proj`).
        num_nextn_predict_layers: 0 or 1.
    """

    q_lora_rank: int | None
    intermediate_size: int
    n_group: int
    topk_group: int
    first_k_dense_replace: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> "DeepseekV3Config":
        """Reads the contents of `config.json` and, where there is one, `generation_config.json`.

        Raises:
            ConfigError: a key is missing, malformed, or has a value that cannot be honoured.
        """
        check_values(hf, REQUIRED_VALUES)
        num_heads = read_integer(hf, "num_attention_heads")
        if hf.get("num_key_value_heads") not in (None, num_heads):
            raise ConfigError(
                f"config.json: num_key_value_heads={hf['num_key_value_heads']} is not supported; "
                f"latent attention has one per query head ({num_heads})"
            )
        eos_token_ids, pad_token_id = read_special_tokens(hf, generation or {})
        rope_theta, rope = read_rope(hf)
        config = cls(
            family="deepseek_v3",
            num_nextn_predict_layers=_num_nextn_layers(hf),
            q_lora_rank=None if hf.get("q_lora_rank") is None else read_integer(hf, "q_lora_rank"),
            rms_norm_eps=read_number(hf, "rms_norm_eps", 1e-6),
            routed_scaling_factor=read_number(hf, "routed_scaling_factor", 1.0),
            rope_theta=rope_theta,
            rope=rope,
            quantization=read_quantization(hf),
            dtype=read_dtype(hf),
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id,
            first_k_dense_replace=read_integer(hf, "first_k_dense_replace", 0),
            unknown_keys=unknown_keys(hf, KNOWN_KEYS),
            **{name: read_integer(hf, name) for name in INTEGER_FIELDS},
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
        self.check_special_tokens()

    @property
    def latent_dim(self) -> int:
        """Width of a cached row: the normed latent and the rotated shared key, `c + r`."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def cache_ratios(self) -> tuple[int, ...]:
        """A latent row a position."""
        return (1,)

    @property
    def draft_quantization(self) -> Quantization | None:
        """The draft's own: an NVFP4 checkpoint stores its NextN layer in BF16 (the seed's rule)."""
        if self.quantization and self.quantization.method == "nvfp4":
            return None
        return self.quantization

    def is_moe(self, layer: int) -> bool:
        """Whether a layer routes to experts. The draft's, behind the last layer, does."""
        return layer >= self.first_k_dense_replace


def _num_nextn_layers(hf: Mapping[str, Any]) -> int:
    # transformers 5 writes num_mtp_layers.
    counts = [hf[key] for key in ("num_nextn_predict_layers", "num_mtp_layers") if hf.get(key)]
    count = counts[0] if counts else 0
    if count not in (0, 1) or any(other != count for other in counts):
        raise ConfigError(
            f"config.json: num_nextn_predict_layers={count!r}; only 0 or 1 NextN layer is supported"
        )
    return int(count)
