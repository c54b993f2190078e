"""The tensors of DeepSeek-V3 shaped checkpoints: V3, V3.1, R1, Kimi-K2, and transformers' form."""

from collections.abc import Iterable

from convert.rules import Rule, Table, copy, shared, skip, split, stack
from jaxspec.config import ModelConfig

DECODER = (
    copy("input_layernorm.weight", "input_layernorm/weight"),
    copy("self_attn.q_proj.weight", "self_attn/q_proj/weight"),
    copy("self_attn.q_a_proj.weight", "self_attn/q_a_proj/weight"),
    copy("self_attn.q_a_layernorm.weight", "self_attn/q_a_layernorm/weight"),
    copy("self_attn.q_b_proj.weight", "self_attn/q_b_proj/weight"),
    copy("self_attn.kv_a_proj_with_mqa.weight", "self_attn/kv_a_proj_with_mqa/weight"),
    copy("self_attn.kv_a_layernorm.weight", "self_attn/kv_a_layernorm/weight"),
    copy("self_attn.kv_b_proj.weight", "self_attn/kv_b_proj/weight"),
    copy("self_attn.o_proj.weight", "self_attn/o_proj/weight"),
    skip("self_attn.rotary_emb.inv_freq", "computed from the config"),
    copy("post_attention_layernorm.weight", "post_attention_layernorm/weight"),
    copy("mlp.gate_proj.weight", "mlp/gate_proj/weight"),
    copy("mlp.up_proj.weight", "mlp/up_proj/weight"),
    copy("mlp.down_proj.weight", "mlp/down_proj/weight"),
    copy("mlp.gate.weight", "mlp/gate/weight"),
    copy("mlp.gate.e_score_correction_bias", "mlp/gate/e_score_correction_bias"),
    stack("mlp.experts.{expert}.gate_proj.weight", "mlp/experts/gate_proj/weight", "expert"),
    stack("mlp.experts.{expert}.up_proj.weight", "mlp/experts/up_proj/weight", "expert"),
    stack("mlp.experts.{expert}.down_proj.weight", "mlp/experts/down_proj/weight", "expert"),
    # transformers 5 keeps the experts of a layer in two tensors, and can save them so.
    split("mlp.experts.gate_up_proj", "mlp/experts/gate_proj/weight", "mlp/experts/up_proj/weight"),
    copy("mlp.experts.down_proj", "mlp/experts/down_proj/weight"),
    copy("mlp.shared_experts.gate_proj.weight", "mlp/shared_experts/gate_proj/weight"),
    copy("mlp.shared_experts.up_proj.weight", "mlp/shared_experts/up_proj/weight"),
    copy("mlp.shared_experts.down_proj.weight", "mlp/shared_experts/down_proj/weight"),
)
TARGET = (
    copy("model.embed_tokens.weight", "target/embed_tokens/weight"),
    *(rule.under("model.layers.{layer}.", "target/layers/{layer}/") for rule in DECODER),
    copy("model.norm.weight", "target/norm/weight"),
    copy("lm_head.weight", "target/lm_head/weight"),
)
NEXTN = (
    copy("enorm.weight", "enorm/weight"),
    copy("hnorm.weight", "hnorm/weight"),
    copy("eh_proj.weight", "eh_proj/weight"),
    *(rule.under("", "decoder/") for rule in DECODER),
    copy("shared_head.norm.weight", "shared_head/norm/weight"),
    shared("embed_tokens.weight", "embed_tokens/weight", "target/embed_tokens/weight"),
    shared("shared_head.head.weight", "shared_head/head/weight", "target/lm_head/weight"),
)


def rules() -> tuple[Rule, ...]:
    """Every rule. The draft is the decoder layer behind the target's last."""
    return TARGET + tuple(rule.under("model.layers.{draft}.", "draft/") for rule in NEXTN)


def table(config: ModelConfig) -> Table:
    """The rules with the numbers of layers and experts that this config has."""
    num_layers = config.num_hidden_layers
    ranges = {
        "layer": range(num_layers),
        "draft": range(num_layers, num_layers + config.num_nextn_predict_layers),
        "expert": range(config.n_routed_experts),
    }
    return Table(rules(), ranges)


def stages(config: ModelConfig, tensors: Iterable[str]) -> set[int]:
    """Numbers of the draft layers of which there is any tensor: 0, or none."""
    prefix = f"model.layers.{config.num_hidden_layers}."
    return {0 for name in tensors if name.startswith(prefix)}
