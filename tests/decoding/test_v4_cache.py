"""V4's caches: cuts of a prompt, rejections at every phase, padding, and what unused slots hold."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.cache.compressed import empty_cache
from jaxspec.drafts import mtp
from jaxspec.models import deepseek_v4
from tests import models
from tests.decoding import texts
from tests.numpy_v4 import Reference

SIZE: dict[str, Any] = {"compress_ratios": (0, 4, 128, 0)}
TEXT = texts.prompts([300])[0]
CAPACITY = 304


BLOCK = 6


def load() -> jaxspec.SpeculativeModel:
    return models.load("v4", zero_first_embedding=False, **SIZE)


def start(*, fill: float = np.nan) -> models.Session:
    """Caches that allow for blocks of `BLOCK` tokens; one size, to share programs."""
    return models.Session.start(load(), CAPACITY, fill=fill, max_block=BLOCK)


def reference() -> Reference:
    return Reference(models.source("v4", **SIZE))


def test_logits_far_beyond_the_window():
    """D18: at positions 14 to 16 around the window, 39 and 299, both models."""
    want = reference().target(TEXT)
    session = start()
    logits, streams = session.target(TEXT, 0)
    np.testing.assert_allclose(logits, want.logits, atol=2e-4)
    draft = reference().draft(TEXT[1:], want.streams[:-1])
    got, _ = session.draft(TEXT[1:], streams[:-1], 0)
    np.testing.assert_allclose(got, draft.logits, atol=2e-4)


def split_logits(prefix: int, length: int) -> np.ndarray:
    """Logits of TEXT[:length]: `prefix` tokens in one call, the others one by one."""
    session = start()
    parts = [session.target(TEXT[:prefix], 0)[0]] if prefix else []
    parts += [session.target(TEXT[p : p + 1], p)[0] for p in range(prefix, length)]
    return np.concatenate(parts)


@pytest.mark.parametrize(
    "length, prefixes",
    [
        (9, [0, 6]),
        pytest.param(9, range(10), marks=pytest.mark.exhaustive),
        pytest.param(130, [*range(1, 10), 63, *range(124, 130)], marks=pytest.mark.exhaustive),
    ],
)
def test_every_split_of_a_prompt(length, prefixes):
    """D19: nothing compressed yet, the 4th token, the 128th; prompts of 1 to 9 and 126 to 130."""
    want = reference().target(TEXT[:length]).logits
    for prefix in prefixes:
        np.testing.assert_allclose(split_logits(prefix, length), want, atol=2e-4)


@pytest.mark.parametrize(
    "around",
    [
        range(6, 10),
        *(
            pytest.param(around, marks=pytest.mark.exhaustive)
            for around in (range(1, 6), range(14, 22), range(120, 132), range(250, 260))
        ),
    ],
    ids=lambda around: f"{around[0]} to {around[-1]}",
)
def test_rejections_leave_no_trace(around):
    """D33: at every phase of 4, around 128, before and after the window wraps.

    From each position on, a block of wrong tokens is verified and all but its first rejected; the
    text then goes on in blocks that accept 1 to 6.
    """
    want = reference().target(TEXT).logits
    rng = np.random.default_rng(0)
    session = start()
    position = around[0]
    check(session.target(TEXT[:position], 0)[0], want[:position])
    while position <= around[-1]:
        wrong = [TEXT[position], *rng.integers(0, texts.VOCAB, BLOCK - 1)]
        logits, _ = session.target(wrong, position)
        check(logits[:1], want[position : position + 1])
        position += 1
    for accepted in (6, 3, 1, 5, 2, 4, 6, 6):
        block = np.array(TEXT[position : position + BLOCK])
        block[accepted:] = rng.integers(0, texts.VOCAB, BLOCK - accepted)
        logits, _ = session.target(block, position)
        check(logits[:accepted], want[position : position + accepted])
        position += accepted


def check(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_a_draft_of_every_length_leaves_no_trace():
    """The draft's own ring: its chains are rejected, and committed rows take their place."""
    target = reference().target(TEXT[:41])
    want = reference().draft(TEXT[1:42], target.streams).logits
    session, rng = start(), np.random.default_rng(1)
    streams = target.streams.astype(np.float32)
    for position in range(0, 41):
        got, own = session.draft(
            TEXT[position + 1 : position + 2], streams[position][None], position
        )
        check(got, want[position : position + 1])
        for step in range(1, 1 + position % BLOCK):
            _, own = session.draft(rng.integers(0, texts.VOCAB, 1), own, position + step)


def test_unused_slots_may_hold_anything():
    """D35: ring, pages and rows to pool are NaN; target and draft are as beside zeros."""
    got = []
    for fill in (0.0, np.nan):
        session = start(fill=fill)
        logits, streams = session.target(TEXT[:6], 0)
        step, _ = session.target(TEXT[6:7], 6)
        draft, _ = session.draft(TEXT[1:2], streams[:1], 0)
        got.append((logits, step, draft))
    for clean, beside_nan in zip(*got, strict=True):
        assert np.isfinite(beside_nan).all()
        np.testing.assert_array_equal(clean, beside_nan)


@pytest.mark.exhaustive
def test_a_pool_full_of_nan_changes_no_text(monkeypatch):
    """D35: rows of unlike lengths that end at different times."""

    def poisoned(*args):
        return models.filled(empty_cache(*args), jnp.nan)

    prompts = texts.prompts((1, 3, 4, 7, 15, 17, 127, 130))
    model = models.load("v4_perm", draft="half", branch_gain=5.0, **SIZE)
    options = {"num_draft_tokens": 3, "eos_token_ids": (3, 50)}
    want = texts.generate(model, prompts, 24, cache=jaxspec.CacheOptions(page_size=16), **options)
    for module in (deepseek_v4, mtp):
        monkeypatch.setattr(module, "empty_cache", poisoned)
    # No other test uses this page size, so the program is traced anew and holds the NaNs.
    got = texts.generate(model, prompts, 24, cache=jaxspec.CacheOptions(page_size=12), **options)
    assert texts.rows(got) == texts.rows(want)
    assert got.stats.accepted.tolist() == want.stats.accepted.tolist()


def test_pad_rows_do_not_reach_the_others():
    """D20: rows that are not valid hold NaN streams and foreign ids; hash-routed layers too."""
    model = load()
    block, session = model.target.layers[0], start()
    assert block.ffn.gate.tid2eid is not None
    rng = np.random.default_rng(2)
    streams = rng.standard_normal((1, 9, 4, 128)).astype(np.float32)
    tokens, positions = jnp.asarray(TEXT[:9])[None], jnp.arange(9)[None]
    outputs = []
    for poison in (0.0, 1e30):
        valid = jnp.arange(9)[None] < 6
        x = jnp.where(valid[..., None, None], streams, poison)
        ids = jnp.where(valid, tokens, 0 if poison == 0 else 10**6)
        cache = session.target_cache.layers[0]
        outputs.append(block(x, ids, positions, valid, cache, None)[0][:, :6])
    np.testing.assert_array_equal(*outputs)
    assert np.isfinite(outputs[0]).all()


@pytest.mark.parametrize("token", [-1, 96])
def test_ids_outside_the_vocabulary(token):
    """D20: they would read past the hash-routing table."""
    with pytest.raises(jaxspec.RequestError, match=f"id {token}; ids are 0 to 95"):
        texts.generate(load(), [[1, 2, token]], 4)
