"""Speculative greedy text is plain greedy text, whatever the draft is worth."""

import functools
from typing import Any

import numpy as np
import pytest

import jaxspec
from tests import models
from tests.decoding import texts
from tests.numpy_reference import Reference

# One MoE layer behind a dense one keeps the programs small; all drafts share them.
SIZE: dict[str, Any] = {"num_hidden_layers": 2}
DRAFTS = {
    "perfect": {"draft": "perfect"},
    "half": {"draft": "half"},
    "wrong": {"draft": "wrong"},
    "random": {"draft": "random"},
    "steered": {"draft": "steered"},
    # Text that depends on every cached position, drafted rightly now and then.
    "contextual": {"draft": "perfect", "branch_gain": 5.0},
    "half contextual": {"draft": "half", "branch_gain": 5.0},
}
NEW = 24


def load(draft: str, **options):
    return models.load("perm", **DRAFTS[draft], **SIZE, **options)


@functools.cache
def plain_text(draft: str) -> list[list[int]]:
    """What the target says alone, in one batch of all prompts."""
    plain = texts.generate(load(draft), texts.prompts(), NEW, num_draft_tokens=0)
    np.testing.assert_array_equal(plain.stats.target_steps, NEW - 1)
    assert (np.asarray(plain.stats.proposed) == 0).all()
    return texts.rows(plain)


def check(draft: str, depth: int, batch: int, page_size: int) -> jaxspec.SpeculationStats:
    """Generates with the draft; the text must be the target's and the counters must agree."""
    cache = jaxspec.CacheOptions(page_size=page_size)
    prompts = texts.prompts()[:batch]
    result = texts.generate(load(draft), prompts, NEW, num_draft_tokens=depth, cache=cache)
    assert texts.rows(result) == plain_text(draft)[:batch]
    stats = result.stats
    accepted, steps = np.asarray(stats.accepted), np.asarray(stats.target_steps)
    # A pass commits what it accepts and a token of its own; the last one may be cut at the budget.
    assert np.isin(accepted + steps - (NEW - 1), (0, 1)).all()  # the prefill gives one token
    np.testing.assert_array_equal(np.asarray(stats.accepted_at).sum(-1), accepted)
    np.testing.assert_allclose(stats.acceptance_length, (NEW - 1) / steps, rtol=1e-6)
    return stats


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("draft", DRAFTS)
def test_text_is_the_targets(draft, depth):
    stats = check(draft, depth, 8, 16)
    accepted, proposed = np.asarray(stats.accepted), np.asarray(stats.proposed)
    if draft == "perfect":
        np.testing.assert_array_equal(accepted, proposed)
        np.testing.assert_array_equal(stats.target_steps, -(-(NEW - 1) // (depth + 1)))
    elif draft == "wrong":
        assert (accepted == 0).all()
    elif draft == "random":
        assert accepted.sum() < 0.2 * proposed.sum()
    elif draft == "half":
        assert (accepted > 0).all() and (accepted < proposed).all()
    elif draft in ("contextual", "half contextual"):
        assert 0 < accepted.sum() < proposed.sum()


@pytest.mark.parametrize(
    "draft, depth, batch, page_size",
    [("contextual", 2, 1, 4), ("contextual", 5, 3, 4), ("half", 5, 3, 4), ("contextual", 3, 3, 64)],
)
def test_batches_and_pages(draft, depth, batch, page_size):
    check(draft, depth, batch, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_the_whole_grid(depth, batch, page_size):
    for draft in DRAFTS:
        check(draft, depth, batch, page_size)


@pytest.mark.parametrize("draft", ["perfect", "contextual"])
def test_text_is_the_references(draft):
    """The tests above compare two of our runs; this one compares with float64 NumPy."""
    reference = Reference(models.source("perm", **DRAFTS[draft], **SIZE))
    for prompt, row in zip(texts.prompts()[:4], plain_text(draft), strict=False):
        assert row == reference.greedy(prompt, NEW)


def test_the_permutation_is_spoken():
    source = models.perm(draft="perfect", **SIZE)
    want = [source.continuation(prompt[-1], NEW) for prompt in texts.prompts()]
    assert plain_text("perfect") == want


def test_random_weights_at_every_layer():
    """Nothing is idealised here: attention, experts and draft are random."""
    prompts, reference = texts.prompts([5, 17, 1]), Reference(models.source("v3"))
    result = texts.generate(models.load("v3"), prompts, NEW, num_draft_tokens=2)
    assert texts.rows(result) == [reference.greedy(prompt, NEW) for prompt in prompts]


def test_a_quantized_checkpoint_as_it_is_loaded_by_default():
    """FP8 weights, quantized activations, bfloat16: the permutation has no near ties."""
    options = {"draft": "perfect", "quantized": True, **SIZE}
    source, prompts = models.perm(**options), texts.prompts([5, 1, 17])
    model = jaxspec.load(models.checkpoint("perm", **options))
    result = texts.generate(model, prompts, NEW)
    assert texts.rows(result) == [source.continuation(prompt[-1], NEW) for prompt in prompts]
    assert result.stats.accepted.tolist() == result.stats.proposed.tolist() == [12, 12, 12]
