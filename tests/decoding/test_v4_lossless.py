"""V4: speculative greedy text is plain greedy text, whatever MTP is worth."""

import functools
from typing import Any

import numpy as np
import pytest

import jaxspec
from tests import models
from tests.decoding import texts
from tests.numpy_v4 import Reference

# One layer of each ratio, hash-routed first; all drafts share the programs.
SIZE: dict[str, Any] = {"compress_ratios": (0, 4, 128, 0)}
DRAFTS = {
    "perfect": {"draft": "perfect"},
    "half": {"draft": "half"},
    "random": {"draft": "random"},
    "steered": {"draft": "steered"},
    # Text that depends on every cached position, drafted rightly now and then.
    "contextual": {"draft": "perfect", "branch_gain": 5.0},
}
# Nothing compressed yet, the first entries of either ratio, and the window of 16 wrapped often.
LENGTHS = (1, 3, 4, 7, 15, 17, 127, 130)
NEW = 24


def load(draft: str, **options):
    return models.load("v4_perm", **DRAFTS[draft], **SIZE, **options)


@functools.cache
def plain_text(draft: str, lengths: tuple[int, ...], new: int) -> list[list[int]]:
    """What the target says alone, in one batch of all prompts."""
    prompts = texts.prompts(lengths)
    plain = texts.generate(load(draft), prompts, new, num_draft_tokens=0)
    return texts.rows(plain)


def check(
    draft: str, depth: int, lengths: tuple[int, ...] = LENGTHS, new: int = NEW, **options: Any
) -> jaxspec.SpeculationStats:
    """Generates with the draft; the text must be the target's."""
    prompts, cache = texts.prompts(lengths), jaxspec.CacheOptions(**options)
    result = texts.generate(load(draft), prompts, new, num_draft_tokens=depth, cache=cache)
    assert texts.rows(result) == plain_text(draft, lengths, new)
    return result.stats


@pytest.mark.parametrize(
    "draft, depth",
    [
        ("perfect", 3),
        ("half", 3),
        ("random", 3),
        ("contextual", 3),
        pytest.param("contextual", 8, marks=pytest.mark.slow),
        *(
            pytest.param(draft, depth, marks=pytest.mark.exhaustive)
            for draft in DRAFTS
            for depth in range(1, 9)
            if depth != 3 and (draft, depth) != ("contextual", 8)
        ),
    ],
)
def test_text_is_the_targets(draft, depth):
    """D33 among them: rejected rows in a ring that has wrapped; depth 8 is two groups of 4."""
    stats = check(draft, depth)
    accepted, proposed = np.asarray(stats.accepted), np.asarray(stats.proposed)
    if draft == "perfect":
        # The prompt of one token has its first draft row at position 0, which is zeroed.
        np.testing.assert_array_equal(accepted[1:], proposed[1:])
        np.testing.assert_array_equal(stats.target_steps[1:], -(-(NEW - 1) // (depth + 1)))
    elif draft == "random":
        assert accepted.sum() < 0.2 * proposed.sum()
    elif draft in ("half", "contextual"):
        assert 0 < accepted.sum() < proposed.sum()


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [tuple(range(1, 10)), (126, 127, 128, 129, 130), (300, 16)])
@pytest.mark.parametrize("draft", ["half", "random", "contextual"])
def test_prompts_of_every_phase(draft, lengths):
    for depth in (1, 4, 5, 8):
        check(draft, depth, lengths, new=40)


@pytest.mark.exhaustive
@pytest.mark.parametrize("depth, page_size", [(5, 4), (9, 4), (5, 1)])
def test_pages_that_end_inside_a_block_of_drafts(depth, page_size):
    """D34: small pages, of 1 and 4 entries; an entry is 4 positions or 128."""
    check("contextual", depth, (15, 16, 17, 64), page_size=page_size)


def test_the_permutation_is_spoken():
    source = models.perm("v4_perm", **DRAFTS["perfect"], **SIZE)
    want = [source.continuation(prompt[-1], NEW) for prompt in texts.prompts(LENGTHS)]
    assert plain_text("perfect", LENGTHS, NEW) == want


def test_text_is_the_references():
    """The tests above compare two of our runs; this one compares with float64 NumPy."""
    reference = Reference(models.source("v4_perm", **DRAFTS["contextual"], **SIZE))
    for row in (2, 6):
        prompt, got = texts.prompts(LENGTHS)[row], plain_text("contextual", LENGTHS, NEW)[row]
        logits = reference.target(prompt + got[:-1]).logits[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == got


@pytest.mark.exhaustive
def test_rows_of_unlike_drafts_in_one_batch():
    """D32: the prompt steers the draft: one row accepts all, one nothing, the others some."""
    source = models.perm("v4_perm", **DRAFTS["steered"], **SIZE)
    prompts = [[5, 7, int(cycle[3])] for cycle in source.cycles]
    result = texts.generate(load("steered"), prompts, 150, num_draft_tokens=3)
    assert texts.rows(result) == [source.continuation(prompt[-1], 150) for prompt in prompts]
    accepted, proposed = result.stats.accepted.tolist(), result.stats.proposed.tolist()
    assert accepted[0] == proposed[0] and accepted[1] == 0
    assert all(0 < accepted[row] < proposed[row] for row in (2, 3))


@pytest.mark.exhaustive
def test_a_row_is_the_same_in_any_batch():
    """D31, D32: alone, in a batch, and in the batch turned around: same text, same counts."""
    prompts = texts.prompts(LENGTHS)

    def outcome(prompts):
        result = texts.generate(load("contextual"), prompts, 40, num_draft_tokens=3)
        return list(zip(texts.rows(result), result.stats.accepted.tolist(), strict=True))

    together = outcome(prompts)
    assert len({accepted for _, accepted in together}) > 1
    assert outcome(prompts[::-1])[::-1] == together
    for row, prompt in enumerate(prompts):
        assert outcome([prompt]) == together[row : row + 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh_shape", [(4, 2), (2, 4)])
def test_text_on_a_mesh(mesh_shape):
    """Rows are padded to the data axis; o_groups, which heads share, divides by 2 only."""
    if mesh_shape[1] > 2:
        with pytest.raises(jaxspec.MeshError, match="o_groups"):
            load("contextual", mesh_shape=mesh_shape)
        return
    prompts = texts.prompts(LENGTHS[:5])
    model = load("contextual", mesh_shape=mesh_shape)
    result = texts.generate(model, prompts, NEW, num_draft_tokens=3)
    assert texts.rows(result) == plain_text("contextual", LENGTHS[:5], NEW)
