"""Pages: the last one, a full pool, what is refused, and what unused slots hold."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.cache.latent import empty_cache
from jaxspec.cache.pages import CacheOptions, PageAllocator, pages_needed
from jaxspec.drafts import nextn
from jaxspec.models import deepseek_v3
from tests import models
from tests.decoding import texts
from tests.numpy_reference import Reference

NEW = 16
MODEL: dict[str, Any] = {"draft": "half", "branch_gain": 5.0, "num_hidden_layers": 2}


def load():
    return models.load("perm", **MODEL)


@pytest.mark.parametrize(
    "page_size, depth",
    [
        (4, 9),
        (16, 5),
        pytest.param(4, 5, marks=pytest.mark.slow),
        pytest.param(16, 9, marks=pytest.mark.slow),
    ],
)
def test_prompts_at_the_edge_of_a_page_with_no_page_to_spare(page_size, depth):
    """D34: a block of drafts spans pages; the pool holds just what the rows need."""
    prompts = texts.prompts([page_size - 1, page_size, page_size + 1])
    needed = sum(pages_needed(len(p) + NEW + depth + 1, page_size) for p in prompts)
    cache = CacheOptions(page_size=page_size, num_pages=needed)
    result = texts.generate(load(), prompts, NEW, num_draft_tokens=depth, cache=cache)
    reference = Reference(models.source("perm", **MODEL))
    assert texts.rows(result) == [reference.greedy(prompt, NEW) for prompt in prompts]
    with pytest.raises(jaxspec.CapacityError, match=f"{needed} pages and {needed - 1} are free"):
        texts.generate(
            load(),
            prompts,
            NEW,
            num_draft_tokens=depth,
            cache=dataclasses.replace(cache, num_pages=needed - 1),
        )


def test_allocator_refuses_before_it_takes_anything():
    allocator = PageAllocator(6)
    first = allocator.allocate([2, 1], 4)
    assert first.shape == (2, 4) and (first[0, 2:] == -1).all() and (first[1, 1:] == -1).all()
    with pytest.raises(jaxspec.CapacityError, match="need 4 pages and 3 are free"):
        allocator.allocate([3, 1], 4)
    second = allocator.allocate([3], 4)
    assert sorted([*first[first >= 0], *second[second >= 0]]) == list(range(6))
    allocator.release(first)
    third = allocator.allocate([1, 2], 4)
    assert sorted(third[third >= 0]) == sorted(first[first >= 0])


def test_allocator_of_a_mesh_gives_each_shard_its_own_pages():
    allocator = PageAllocator(8, 2)
    table = allocator.allocate([2, 1, 3, 1], 3)
    for rows in (table[:2], table[2:]):
        taken = rows[rows >= 0]
        assert len(set(taken)) == len(taken) and taken.max() < 4
    with pytest.raises(jaxspec.CapacityError, match="need 2 pages and 1 are free"):
        allocator.allocate([1, 1, 0, 0], 3)


def test_allocator_refuses_a_pool_that_the_shards_do_not_share():
    for num_pages, shards in ((0, 1), (7, 2)):
        with pytest.raises(jaxspec.CapacityError, match=f"num_pages={num_pages}"):
            PageAllocator(num_pages, shards)


def test_a_pool_full_of_nan_changes_nothing(monkeypatch):
    """D35: every slot is NaN before it is written; rows end at different times."""

    def poisoned(*args):
        return models.filled(empty_cache(*args), jnp.nan)

    prompts = texts.prompts()
    options = {"num_draft_tokens": 3, "eos_token_ids": (3, 50)}
    want = texts.generate(load(), prompts, 24, cache=CacheOptions(page_size=16), **options)
    assert len(set(want.lengths.tolist())) > 1
    for module in (deepseek_v3, nextn):
        monkeypatch.setattr(module, "empty_cache", poisoned)
    # No other test uses this page size, so the program is traced anew and holds the NaNs.
    got = texts.generate(load(), prompts, 24, cache=CacheOptions(page_size=12), **options)
    assert texts.rows(got) == texts.rows(want)
    assert got.stats.accepted.tolist() == want.stats.accepted.tolist()


def test_logits_beside_nan_are_those_beside_zeros():
    """D35: target and draft, in one call and step by step."""
    model, tokens = load(), texts.prompts([20])[0]
    got = []
    for fill in (0.0, np.nan):
        session = models.Session.start(model, 48, fill=fill)
        logits, hidden = session.target(tokens[:-2], 0)
        step, _ = session.target(tokens[-2:-1], len(tokens) - 2)
        draft, _ = session.draft(tokens[1:-1], hidden, 0)
        got.append((logits, step, draft))
    for clean, beside_nan in zip(*got, strict=True):
        assert np.isfinite(beside_nan).all()
        np.testing.assert_array_equal(clean, beside_nan)


def test_options_of_no_size_are_refused():
    with pytest.raises(jaxspec.RequestError, match="page_size=0"):
        CacheOptions(page_size=0)
    with pytest.raises(jaxspec.RequestError, match="prefill_chunk=0"):
        CacheOptions(prefill_chunk=0)
