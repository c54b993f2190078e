"""Rows of a batch do not know of one another; neither do chunks of a prompt."""

import numpy as np
import pytest

import jaxspec
from tests import models
from tests.decoding import texts

PROMPTS = texts.prompts()
NEW = 24


def load(draft="half", branch_gain=5.0):
    return models.load("perm", draft=draft, branch_gain=branch_gain, num_hidden_layers=2)


def generate(model, prompts, **options):
    cache = jaxspec.CacheOptions(page_size=16, **options)
    return texts.generate(model, prompts, NEW, num_draft_tokens=3, cache=cache)


def generate_array(model, array, lengths):
    cache = jaxspec.CacheOptions(page_size=16)
    options = {"prompt_lengths": np.array(lengths), "num_draft_tokens": 3, "cache": cache}
    return texts.generate(model, array, NEW, **options)


def outcome(result) -> list[tuple[list[int], int, int]]:
    """Text, accepted tokens and target steps of each row."""
    stats = result.stats
    return list(
        zip(texts.rows(result), stats.accepted.tolist(), stats.target_steps.tolist(), strict=True)
    )


def test_a_row_is_the_same_in_any_batch():
    """D31: batches of 1 and 8, and the 8 in another order: same text, same accepted counts."""
    model = load()
    together = outcome(generate(model, PROMPTS))
    assert len({steps for _, _, steps in together}) > 1, "the rows should accept unlike lengths"
    order = np.random.default_rng(1).permutation(len(PROMPTS))
    shuffled = outcome(generate(model, [PROMPTS[row] for row in order]))
    assert [shuffled[place] for place in np.argsort(order)] == together
    assert outcome(generate(model, PROMPTS[:4])) == together[:4]
    for row in (0, 1, 2, 3):  # prompts of 5, 1, 17 and 16 tokens, padded to share a program
        array = np.array([PROMPTS[row] + [0] * (32 - len(PROMPTS[row]))])
        alone = generate_array(model, array, [len(PROMPTS[row])])
        assert outcome(alone) == together[row : row + 1]


def test_rows_of_unlike_drafts_in_one_batch():
    """The prompt steers the draft: one row accepts all, one nothing, the others some."""
    source = models.perm(draft="steered", num_hidden_layers=2)
    prompts = [[5, 7, int(cycle[3])] for cycle in source.cycles]
    result = generate(load("steered", 0.0), prompts)
    assert texts.rows(result) == [source.continuation(prompt[-1], NEW) for prompt in prompts]
    accepted, proposed = result.stats.accepted.tolist(), result.stats.proposed.tolist()
    assert accepted[0] == proposed[0] and accepted[1] == 0
    assert all(0 < accepted[row] < proposed[row] for row in (2, 3))


@pytest.mark.parametrize("chunk", [5, 16])
def test_prefill_chunks_change_nothing(chunk):
    """Chunks that divide the prompts or not, and prompts that end at a chunk's edge."""
    model = load()
    assert outcome(generate(model, PROMPTS, prefill_chunk=chunk)) == outcome(
        generate(model, PROMPTS)
    )


def test_padding_of_an_array_of_prompts_is_never_read():
    """D20: whatever stands behind a prompt, the text is the same; even ids that do not exist."""
    model = load()
    lengths = [len(prompt) for prompt in PROMPTS]
    for padding in (0, -7, 10**6):
        array = np.full((len(PROMPTS), max(lengths)), padding)
        for row, prompt in zip(array, PROMPTS, strict=True):
            row[: len(prompt)] = prompt
        assert outcome(generate_array(model, array, lengths)) == outcome(generate(model, PROMPTS))


def test_stream_is_generate_in_pieces():
    model = load()
    cache = jaxspec.CacheOptions(page_size=16)
    options = {"num_draft_tokens": 3, "eos_token_ids": (3, 50), "cache": cache}
    whole = texts.generate(model, PROMPTS, NEW, **options)
    text = [[] for _ in PROMPTS]
    for chunk in jaxspec.stream(model, PROMPTS, max_new_tokens=NEW, **options):
        assert chunk.tokens.shape == (len(PROMPTS), 4)
        counts = np.asarray(chunk.counts)
        for row, (tokens, count) in enumerate(zip(chunk.tokens.tolist(), counts, strict=True)):
            text[row] += tokens[:count]
        assert chunk.finished.tolist() == [
            len(got) == length for got, length in zip(text, whole.lengths.tolist(), strict=True)
        ]
    assert text == texts.rows(whole)


def test_stream_needs_one_step_a_chunk():
    """The first chunk is the prefill's token, each further one a target step."""
    model = load("perfect", 0.0)
    source = models.perm(draft="perfect", num_hidden_layers=2)
    prompts = [[1] * (len(prompt) - 1) + [int(source.cycles[0][0])] for prompt in PROMPTS]
    chunks = list(
        jaxspec.stream(
            model,
            prompts,
            max_new_tokens=NEW,
            num_draft_tokens=3,
            eos_token_ids=source.cycles[1][:2].tolist(),
            cache=jaxspec.CacheOptions(page_size=16),
        )
    )
    assert [int(chunk.counts[0]) for chunk in chunks] == [1, 4, 4, 4, 4, 4, 3]
