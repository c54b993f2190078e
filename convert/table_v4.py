"""The tensors of DeepSeek-V4 checkpoints, in the official names and in two other forms.

The official names have no prefix, and drafts are `mtp.K`. Other tools write the same names under
`model.`, where draft K is the layer K behind the target's last. transformers 5 has names of its
own, keeps the experts of a layer in two tensors, and when it saves it turns most names back into
the official ones but not all, so any mixture is read.
"""

import re
from collections.abc import Iterable, Iterator

from convert.rules import Rule, Table, copy, shared, split, stack
from jaxspec.config import ModelConfig

# A weight's ending, and what its scales have instead; the published form first.
SCALE_ENDINGS = ((".weight", ".scale"), ("", "_scale_inv"), (".weight", ".weight_scale"))

HYPER_CONNECTIONS = tuple(
    copy(f"hc_{kind}_{part}", f"hc_{kind}/{part}")
    for kind in ("attn", "ffn")
    for part in ("fn", "base", "scale")
)
COMPRESSOR = (
    copy("ape", "ape"),
    copy("wkv.weight", "wkv/weight"),
    copy("wgate.weight", "wgate/weight"),
    copy("norm.weight", "norm/weight"),
)
BLOCK = (
    *HYPER_CONNECTIONS,
    copy("attn_norm.weight", "attn_norm/weight"),
    *(
        copy(f"attn.{name}.weight", f"attn/{name}/weight")
        for name in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b")
    ),
    copy("attn.attn_sink", "attn/attn_sink"),
    *(rule.under("attn.compressor.", "attn/compressor/") for rule in COMPRESSOR),
    copy("attn.indexer.wq_b.weight", "attn/indexer/wq_b/weight"),
    copy("attn.indexer.weights_proj.weight", "attn/indexer/weights_proj/weight"),
    *(rule.under("attn.indexer.compressor.", "attn/indexer/compressor/") for rule in COMPRESSOR),
    copy("ffn_norm.weight", "ffn_norm/weight"),
    copy("ffn.gate.weight", "ffn/gate/weight"),
    copy("ffn.gate.bias", "ffn/gate/bias"),
    copy("ffn.gate.e_score_correction_bias", "ffn/gate/bias"),
    copy("ffn.gate.tid2eid", "ffn/gate/tid2eid"),
    *(
        stack(f"ffn.experts.{{expert}}.{name}.weight", f"ffn/experts/{name}/weight", "expert")
        for name in ("w1", "w2", "w3")
    ),
    *(
        copy(f"ffn.shared_experts.{name}.weight", f"ffn/shared_experts/{name}/weight")
        for name in ("w1", "w2", "w3")
    ),
)
HYPER_HEAD = tuple(copy(f"hc_head_{part}", f"hc_head/{part}") for part in ("fn", "base", "scale"))
OUTER = (
    copy("embed.weight", "embed/weight"),
    *HYPER_HEAD,
    copy("norm.weight", "norm/weight"),
    copy("head.weight", "head/weight"),
)
# One draft layer. What DSpark's stages have beside it is known by name alone.
STAGE = (
    *(copy(f"{name}.weight", f"{name}/weight") for name in ("enorm", "hnorm", "e_proj", "h_proj")),
    *(rule.under("", "block/") for rule in BLOCK),
    *HYPER_HEAD,
    copy("norm.weight", "norm/weight"),
    copy("shared_head.norm.weight", "norm/weight"),
)
DSPARK = tuple(
    copy(f"{name}.weight", f"dspark/{name}")
    for name in (
        "main_proj",
        "main_norm",
        "markov_head.markov_w1",
        "markov_head.markov_w2",
        "confidence_head.proj",
    )
)
COPIES = (
    *(
        shared(f"{name}.weight", "draft/embed/weight", "target/embed/weight")
        for name in ("embed", "emb.tok_emb", "embed_tokens")
    ),
    *(
        shared(f"{name}.weight", "draft/head/weight", "target/head/weight")
        for name in ("head", "shared_head.head")
    ),
)

TRANSFORMERS_COMPRESSOR = (
    copy("position_bias", "ape"),
    copy("kv_proj.weight", "wkv/weight"),
    copy("gate_proj.weight", "wgate/weight"),
    copy("kv_norm.weight", "norm/weight"),
)
TRANSFORMERS_BLOCK = (
    *(
        copy(f"{kind}_hc.{part}", f"hc_{kind}/{part}")
        for kind in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    ),
    copy("input_layernorm.weight", "attn_norm/weight"),
    *(
        copy(f"self_attn.{theirs}.weight", f"attn/{name}/weight")
        for theirs, name in (
            ("q_a_proj", "wq_a"),
            ("q_a_norm", "q_norm"),
            ("q_b_proj", "wq_b"),
            ("kv_proj", "wkv"),
            ("kv_norm", "kv_norm"),
            ("o_a_proj", "wo_a"),
            ("o_b_proj", "wo_b"),
        )
    ),
    copy("attn.norm.weight", "attn/kv_norm/weight"),  # what it makes of kv_norm when it saves
    copy("self_attn.sinks", "attn/attn_sink"),
    *(rule.under("self_attn.compressor.", "attn/compressor/") for rule in TRANSFORMERS_COMPRESSOR),
    copy("self_attn.compressor.indexer.q_b_proj.weight", "attn/indexer/wq_b/weight"),
    copy(
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
        "attn/indexer/weights_proj/weight",
    ),
    *(
        rule.under("self_attn.compressor.indexer.", "attn/indexer/compressor/")
        for rule in TRANSFORMERS_COMPRESSOR
    ),
    copy("post_attention_layernorm.weight", "ffn_norm/weight"),
    copy("mlp.gate.weight", "ffn/gate/weight"),
    copy("mlp.gate.e_score_correction_bias", "ffn/gate/bias"),
    copy("mlp.gate.tid2eid", "ffn/gate/tid2eid"),
    split("mlp.experts.gate_up_proj", "ffn/experts/w1/weight", "ffn/experts/w3/weight"),
    copy("mlp.experts.down_proj", "ffn/experts/w2/weight"),
    *(
        copy(f"mlp.shared_experts.{theirs}.weight", f"ffn/shared_experts/{name}/weight")
        for theirs, name in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
    ),
)
TRANSFORMERS_OUTER = (
    copy("embed_tokens.weight", "embed/weight"),
    *(copy(f"hc_head.hc_{part}", f"hc_head/{part}") for part in ("fn", "base", "scale")),
)


def table(config: ModelConfig, tensors: Iterable[str]) -> Table:
    """The rules with the numbers of layers, experts and draft layers.

    Args:
        tensors: their names; a file may hold more draft layers than its config announces.
    """
    num_layers = config.num_hidden_layers
    num_stages = max([config.num_nextn_predict_layers, *(k + 1 for k in stages(config, tensors))])
    ranges = {"layer": range(num_layers), "expert": range(config.n_routed_experts)}
    return Table(rules(num_layers, num_stages), ranges, SCALE_ENDINGS)


def rules(num_layers: int, num_stages: int) -> tuple[Rule, ...]:
    """Every rule; where several fill one parameter, the official name is the first."""
    return (*_target_rules(), *_draft_rules(num_layers, num_stages))


def stages(config: ModelConfig, tensors: Iterable[str]) -> set[int]:
    """Numbers of the draft layers of which there is any tensor."""
    patterns = (r"mtp\.(\d+)\.", r"model\.layers\.(\d+)\.")
    first = (0, config.num_hidden_layers)
    return {
        int(found[1]) - offset
        for name in tensors
        for pattern, offset in zip(patterns, first, strict=True)
        if (found := re.match(pattern, name)) and int(found[1]) >= offset
    }


def has_dspark(tensors: Iterable[str]) -> bool:
    """Whether the draft is DSpark: it has tensors that no MTP layer has."""
    endings = tuple("." + rule.pattern for rule in DSPARK)
    is_draft = re.compile(r"mtp\.\d+\.|model\.layers\.\d+\.")
    return any(name.endswith(endings) and is_draft.match(name) for name in tensors)


def _target_rules() -> Iterator[Rule]:
    for outer, block in ((OUTER, BLOCK), (TRANSFORMERS_OUTER, TRANSFORMERS_BLOCK)):
        for prefix in ("", "model."):
            yield from (rule.under(prefix, "target/") for rule in outer)
            for rule in block:
                yield rule.under(f"{prefix}layers.{{layer}}.", "target/layers/{layer}/")
    yield copy("lm_head.weight", "target/head/weight")


def _draft_rules(num_layers: int, num_stages: int) -> Iterator[Rule]:
    for stage in range(num_stages):
        for prefix in (f"mtp.{stage}.", f"model.layers.{num_layers + stage}."):
            for rule in (*STAGE, *DSPARK):
                yield rule.under(prefix, f"draft/layers/{stage}/")
            if stage == 0:
                yield from (rule.under(prefix, "") for rule in COPIES)
