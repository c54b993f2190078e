"""End tokens, budgets and the context's end, inside a block of drafted tokens and at its edges."""

from typing import Any

import numpy as np
import pytest

import jaxspec
from jaxspec import FinishReason
from tests import models
from tests.decoding import texts

DEPTH = 5
SOURCE = models.perm(draft="perfect", num_hidden_layers=2)
PROMPTS = [[int(cycle[0]), int(cycle[5])] for cycle in SOURCE.cycles[:3]]
TEXTS = [SOURCE.continuation(prompt[-1], 16) for prompt in PROMPTS]


# Tokens of a cycle that no text here enters: as many as the tests name, to share a program.
NO_ENDS = tuple(SOURCE.cycles[3][:3].tolist())


def generate(prompts, new, *, draft="perfect", ends: Any = NO_ENDS):
    model = models.load("perm", draft=draft, num_hidden_layers=2)
    return texts.generate(model, prompts, new, num_draft_tokens=DEPTH, eos_token_ids=ends)


# Places 1 to 5 are the block's, 6 is the bonus token; 0 is the prefill's and 7 the next block's.
@pytest.mark.parametrize("place", [0, 1, 2, 3, 5, 6, 7])
def test_an_end_token_ends_the_row(place):
    """D29: the row ends with it, while the others go on to their own ends."""
    places = [place, 9, 4]
    ends = tuple(text[end] for text, end in zip(TEXTS, places, strict=True))
    result = generate(PROMPTS, 16, ends=ends)
    want = [text[: end + 1] for text, end in zip(TEXTS, places, strict=True)]
    assert texts.rows(result) == want
    assert result.finish_reason.tolist() == [FinishReason.END_TOKEN] * 3
    # Every committed token but the prefill's was proposed right, unless it is a round's bonus.
    bonus = [sum(1 for at in range(1, end + 1) if at % (DEPTH + 1) == 0) for end in places]
    assert result.stats.accepted.tolist() == [
        end - extra for end, extra in zip(places, bonus, strict=True)
    ]


def test_rows_without_an_end_token_run_to_the_budget():
    """D29: a finished row is frozen and disturbs nobody."""
    result = generate(PROMPTS, 16, ends=(TEXTS[1][0],) * 3)
    assert texts.rows(result) == [TEXTS[0], TEXTS[1][:1], TEXTS[2]]
    budget, end = FinishReason.BUDGET, FinishReason.END_TOKEN
    assert result.finish_reason.tolist() == [budget, end, budget]
    assert result.stats.target_steps.tolist() == [3, 0, 3]


def test_end_tokens_are_the_configs_by_default():
    """Token 1 ends: the text that leads to it stops there, padded with it."""
    (cycle,) = [cycle for cycle in SOURCE.cycles if 1 in cycle]
    start = int(np.roll(cycle, 4 - list(cycle).index(1))[0])
    result = generate([[start]], 16, ends=None)
    want = SOURCE.continuation(start, 4)
    assert texts.rows(result) == [want] and want[-1] == 1 and result.pad_token_id == 1


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 6, 7])
def test_a_budget_is_met_exactly(budget):
    """D30: so many tokens, those of the target alone, and counters that agree."""
    result = generate(PROMPTS, budget)
    assert result.tokens.shape == (3, budget)
    assert texts.rows(result) == [text[:budget] for text in TEXTS]
    assert result.finish_reason.tolist() == [FinishReason.BUDGET] * 3
    verified = max(budget - 1, 0)
    stats = result.stats
    assert stats.target_steps.tolist() == [-(-verified // (DEPTH + 1))] * 3
    assert stats.proposed.tolist() == stats.accepted.tolist() == [min(verified, DEPTH)] * 3
    want = verified / max(int(stats.target_steps[0]), 1)
    np.testing.assert_allclose(stats.acceptance_length, [want] * 3)


def test_a_drafted_token_past_the_budget_is_not_counted_as_proposed():
    """D30: a wrong draft of 5 with room for 2 proposed 2."""
    stats = generate(PROMPTS, 3, draft="wrong").stats
    assert stats.target_steps.tolist() == [2] * 3
    assert stats.proposed.tolist() == [2 + 1] * 3
    assert stats.accepted.tolist() == [0] * 3


def test_the_context_ends_a_row():
    """Rows stop where the model's positions end, whatever the budget."""
    options = {"draft": "perfect", "num_hidden_layers": 2, "max_position_embeddings": 30}
    model, source = models.load("perm", **options), models.perm(**options)
    prompts = texts.prompts([26, 29, 3])
    result = texts.generate(model, prompts, 10, num_draft_tokens=DEPTH)
    want = [source.continuation(prompt[-1], 10) for prompt in prompts]
    assert texts.rows(result) == [want[0][:4], want[1][:1], want[2]]
    context, budget = FinishReason.CONTEXT, FinishReason.BUDGET
    assert result.finish_reason.tolist() == [context, context, budget]
    with pytest.raises(jaxspec.RequestError, match="30"):
        texts.generate(model, texts.prompts([30]), 1)
