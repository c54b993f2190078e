"""A mis-wired draft still gives the right text; only acceptance tells, so each wire has a test."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import checkpoint
from tests import fixtures, models
from tests.decoding import texts
from tests.numpy_reference import Reference

SIZE: dict[str, Any] = {"num_hidden_layers": 2}
PROMPT = texts.prompts([7])[0]


def acceptance(model, prompt=None, *, depth=2, new=12) -> tuple[int, int]:
    """Drafted tokens that were accepted, and that could have been."""
    result = texts.generate(model, [prompt or PROMPT], new, num_draft_tokens=depth)
    return int(result.stats.accepted[0]), int(result.stats.proposed[0])


def load(model: fixtures.HFModel, name: str) -> jaxspec.SpeculativeModel:
    return jaxspec.load(models.convert(model, name), dtype="float32")


def test_draft_takes_the_next_token_from_the_first_round_on():
    """D21: 4 tokens are the prefill's and one round's, whose input joins the fresh token."""
    model = models.load("perm", draft="perfect", **SIZE)
    result = texts.generate(model, [PROMPT], 4, num_draft_tokens=2)
    assert int(result.stats.target_steps[0]) == 1
    assert np.asarray(result.stats.accepted_at).tolist() == [[1, 1]]


def test_rows_of_the_draft_predict_the_token_after_next():
    """D21: row i answers token i + 1; an unshifted draft would answer token i."""
    source = models.perm(draft="perfect", **SIZE)
    logits = jaxspec.draft_logits(models.load("perm", draft="perfect", **SIZE), jnp.array([PROMPT]))
    assert logits.shape == (1, len(PROMPT) - 1, texts.VOCAB)
    assert logits[0].argmax(-1).tolist() == source.answers[PROMPT[1:]].tolist()


def test_joint_projection_takes_the_embedding_first():
    """D23: with the halves swapped, the draft answers the wrong token every time."""
    source = models.perm(draft="perfect", **SIZE).copy()
    name = source.draft_prefix + "eh_proj.weight"
    source.set(name, np.roll(source.tensors[name], texts.VOCAB + 32, axis=1))
    assert (source.tensors[name][:, :128] == 0).all()
    accepted, proposed = acceptance(load(source, "swapped"))
    assert accepted == 0 and proposed > 10
    accepted, proposed = acceptance(models.load("perm", draft="perfect", **SIZE))
    assert accepted == proposed > 5


@pytest.mark.parametrize("masked", [False, True])
def test_embedding_at_position_0(masked):
    """A one-token prompt has position 0 as its only draft row: a zeroed embedding shows at once."""
    model = jaxspec.load(
        models.checkpoint("perm", draft="perfect", **SIZE),
        dtype="float32",
        zero_first_embedding=masked or None,  # V3's rule is not to zero it
    )
    source = models.perm(draft="perfect", **SIZE)
    prompt = [int(source.cycles[0][0])]
    assert source.continuation(prompt[0], 2)[1] != 0  # what a draft without input answers
    accepted, proposed = acceptance(model, prompt)
    assert accepted == proposed - 2 * masked


def test_chain_feeds_the_normed_state():
    """D24: the draft passes the hidden half only, and its norm has weights of both signs."""
    source = fixtures.v3(**SIZE)
    d = source.config["hidden_size"]
    passing = np.concatenate([np.zeros((d, d)), np.eye(d)], axis=1)
    source.set(source.draft_prefix + "eh_proj.weight", passing)
    source.set(source.draft_prefix + "shared_head.norm.weight", np.tile([2, -0.5], d // 2))
    prompts = texts.prompts([7, 12, 30])
    proposal = jaxspec.propose(load(source, "alternating"), prompts, num_draft_tokens=3)
    reference = Reference(source)
    for row, prompt in enumerate(prompts):
        want = reference.chain(prompt, 3)
        np.testing.assert_allclose(proposal.logits[row], want, atol=2e-4)
        assert proposal.tokens[row].tolist() == want.argmax(-1).tolist()


@pytest.mark.parametrize("own_copies", [False, True])
def test_shared_embedding_and_head_reach_the_draft(own_copies):
    """D11: at top level only, or copied into the draft layer; one array is stored either way."""
    options = {"draft": "perfect", "own_copies": own_copies, **SIZE}
    accepted, proposed = acceptance(models.load("perm", **options))
    assert accepted == proposed > 5
    _, leaves = checkpoint.read(models.checkpoint("perm", **options))
    stored = [name for name in leaves if "embed_tokens" in name or "head/weight" in name]
    assert sorted(stored) == ["target/embed_tokens/weight", "target/lm_head/weight"]


def test_a_draft_with_an_embedding_and_head_of_its_own_uses_them_alone():
    """D11: the draft's copies are the same in another basis; the target's stay as they are."""
    source = models.perm(draft="perfect", **SIZE).copy()
    d = source.config["hidden_size"]
    turn = np.random.default_rng(3).permutation(d)
    prefix = source.draft_prefix
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        source.tensors[prefix + name] = np.ascontiguousarray(source.tensors[prefix + name][:, turn])
    model = load(source, "own basis")
    assert model.provenance is not None
    _, leaves = checkpoint.read(model.provenance.path)
    assert {"draft/embed_tokens/weight", "draft/shared_head/head/weight"} <= set(leaves)
    accepted, proposed = acceptance(model)
    assert accepted == proposed > 5
    text = texts.rows(texts.generate(model, [PROMPT], 8, num_draft_tokens=2))
    assert text == [source.continuation(PROMPT[-1], 8)]


def test_a_head_of_the_drafts_own_is_used_when_it_is_stored_in_fp8():
    """The head answers another token than the target's: used, nothing is accepted."""
    source = models.perm(draft="perfect", **SIZE).copy()
    name = source.draft_prefix + "shared_head.head.weight"
    wrong = np.roll(np.float32(source.tensors[name]), 1, axis=0)
    values, scales = fixtures.quantize_fp8(wrong, (128, 128))
    source.tensors[name], source.tensors[f"{name}_scale_inv"] = values, scales
    accepted, proposed = acceptance(load(source, "own fp8 head"))
    assert (accepted, proposed > 5) == (0, True)


def test_a_checkpoint_without_its_draft_layer_decodes_plainly():
    """D13: the config announces a draft that the files do not hold."""
    source = models.perm(draft="perfect", **SIZE).copy()
    source.tensors = {
        name: array
        for name, array in source.tensors.items()
        if not name.startswith(source.draft_prefix)
    }
    destination = models.convert(source, "no draft", "--draft", "none")
    model = jaxspec.load(destination, dtype="float32")
    assert model.draft is None
    text = texts.rows(texts.generate(model, [PROMPT], 8))
    assert text == [source.continuation(PROMPT[-1], 8)]
    with pytest.raises(jaxspec.CheckpointError, match="nextn"):
        jaxspec.load(destination, draft="nextn")
    for call in (jaxspec.draft_logits, jaxspec.propose):
        with pytest.raises(jaxspec.RequestError, match="without a draft"):
            call(model, jnp.array([PROMPT]))


def test_the_draft_can_be_left_out():
    """D01: the target has its layers and no more, with the draft or without."""
    full = models.load("perm", draft="perfect", **SIZE)
    alone = models.load("perm", draft="perfect", use_draft=None, **SIZE)
    assert alone.draft is None and full.draft is not None
    assert len(alone.target.layers) == len(full.target.layers) == 2
    plain = texts.generate(alone, [PROMPT], 8)
    assert texts.rows(plain) == texts.rows(texts.generate(full, [PROMPT], 8, num_draft_tokens=2))
    with pytest.raises(jaxspec.RequestError, match="without a draft"):
        texts.generate(alone, [PROMPT], 8, num_draft_tokens=1)
