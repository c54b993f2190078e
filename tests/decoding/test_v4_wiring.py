"""A mis-wired MTP still gives the right text; only acceptance tells, so each wire has a test."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from tests import fixtures_v4, models
from tests.decoding import texts
from tests.numpy_v4 import Reference

SIZE: dict[str, Any] = {"compress_ratios": (0, 4, 0)}


def test_rows_of_the_draft_predict_the_token_after_next():
    """D21: row i answers token i + 1; an unshifted draft would answer token i."""
    source = models.perm("v4_perm", **SIZE)
    prompt = texts.prompts([33])[0]
    logits = jaxspec.draft_logits(models.load("v4_perm", **SIZE), jnp.array([prompt]))
    assert logits[0, 1:].argmax(-1).tolist() == source.answers[prompt[2:]].tolist()


@pytest.mark.parametrize("masked", [None, False])
def test_embedding_at_position_0(masked):
    """D22: a one-token prompt has position 0 as its only draft row; zeroed, round one accepts 0."""
    model = models.load("v4_perm", zero_first_embedding=masked, **SIZE)
    source = models.perm("v4_perm", **SIZE)
    prompt = [int(source.cycles[0][0])]
    result = texts.generate(model, [prompt], 13, num_draft_tokens=1)
    assert texts.rows(result) == [source.continuation(prompt[0], 13)]
    accepted, proposed = int(result.stats.accepted[0]), int(result.stats.proposed[0])
    assert accepted == proposed - (masked is None)


def test_draft_takes_all_streams_and_its_own_head():
    """D25: streams that differ, a head and norm unlike the target's, and four streams fed back."""
    model, source = models.load("v4", **SIZE), models.source("v4", **SIZE)
    prompts = texts.prompts([7, 12, 30])
    proposal = jaxspec.propose(model, prompts, num_draft_tokens=3)
    for row, prompt in enumerate(prompts):
        want = Reference(source).chain(prompt, 3)
        np.testing.assert_allclose(proposal.logits[row], want, atol=2e-4)
    streams = Reference(source).target(prompts[2]).streams
    mean = streams.mean(1, keepdims=True).repeat(4, 1)
    assert np.abs(streams - mean).max() > 0.5
    collapsed = Reference(source).draft(prompts[2], mean).logits
    assert np.abs(collapsed - Reference(source).draft(prompts[2], streams).logits).max() > 0.1


def test_layers_of_the_draft_take_turns():
    """Two MTP layers: the second gives the second token, the first the third; own ratios each."""
    options: dict[str, Any] = {"compress_ratios": (0, 0, 4), "num_nextn_predict_layers": 2}
    model, reference = models.load("v4", **options), Reference(models.source("v4", **options))
    assert [layer.block.ratio for layer in model.draft.layers] == [0, 4]
    assert model.draft.default_num_draft_tokens == 2
    prompts = texts.prompts([7, 12, 30])
    proposal = jaxspec.propose(model, prompts, num_draft_tokens=3)
    for row, prompt in enumerate(prompts):
        np.testing.assert_allclose(proposal.logits[row], reference.chain(prompt, 3), atol=2e-4)


@pytest.mark.parametrize(
    "options, mesh_shape, message",
    [
        ({"num_attention_heads": 8}, (1, 3), r"axis 'model' of size 3"),
        ({"n_routed_experts": 12, "o_groups": 8}, (1, 8), r"size 8 does not divide .*\(12 experts"),
        ({"vocab_size": 97, "o_groups": 4}, (1, 4), r"size 4 does not divide .*\(97 vocab\)"),
        ({"o_groups": 2}, (1, 4), r"size 4 does not divide o_groups"),
    ],
    ids=["heads", "experts", "vocabulary", "groups"],
)
def test_a_mesh_that_does_not_divide_is_refused(options, mesh_shape, message):
    """D38: before anything is loaded, with the axis and the sizes."""
    with pytest.raises(jaxspec.MeshError, match=message):
        models.load("v4", mesh_shape=mesh_shape, compress_ratios=(0, 4, 0), **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh_shape", [(4, 2), (2, 4), (1, 4)])
def test_a_mesh_that_cuts_through_blocks(mesh_shape):
    """D38: expert and shared widths of half a block a device give one device's logits."""
    options = {"quantized": True, "o_groups": 4, **SIZE}
    tokens = jnp.asarray(texts.prompts([40, 40, 40]))
    for call in (jaxspec.target_logits, jaxspec.draft_logits):
        got, want = (
            call(models.load("v4", mesh_shape=m, **options), tokens) for m in (mesh_shape, None)
        )
        np.testing.assert_allclose(got, want, atol=2e-4)


def test_weights_lie_on_their_devices():
    """D38: heads, experts and vocabulary are cut over `model`; nothing large is replicated."""
    model = models.load("v4", mesh_shape=(2, 4), quantized=True, o_groups=4, **SIZE)
    block = model.target.layers[1]
    cut: dict[str, tuple[jax.Array, int]] = {
        "wq_b": (block.attn.wq_b.weight.get_value().values, 0),
        "wo_a": (block.attn.wo_a.weight.get_value().values, 0),
        "wo_b": (block.attn.wo_b.weight.get_value().values, 1),
        "experts": (block.ffn.experts.w2.weight.get_value().values, 0),
        "experts' scales": (block.ffn.experts.w2.weight.get_value().scales, 0),
        "head": (model.target.head.weight.get_value(), 0),
    }
    assert block.ffn.experts.w2.weight.get_value().is_fp4
    for name, (array, axis) in cut.items():
        local = array.sharding.shard_shape(array.shape)
        assert local[axis] * 4 == array.shape[axis], f"{name}: {local} of {array.shape}"


def test_the_fixture_has_the_published_names():
    """What the fixtures make is what the golden checkpoints hold: names and stored types."""
    source, quantized = fixtures_v4.v4(), fixtures_v4.v4(quantized=True)
    for model, case in ((source, "v4_bf16"), (quantized, "v4_quant")):
        golden = models.source(case)
        assert kinds(model) == kinds(golden)


def kinds(model) -> set[tuple[str, str]]:
    return {
        (".".join(part for part in name.split(".") if not part.isdigit()), str(array.dtype))
        for name, array in model.tensors.items()
    }
