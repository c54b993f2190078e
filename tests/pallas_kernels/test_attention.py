"""Paged attention and its cache writes against float64, with NaN in all that must not be read."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cache_write import write_rows
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.paged_mla import gather_rows, paged_mla
from tests.pallas_kernels.tolerance import assert_close

C, R, H, PAGE, PAGES_PER_ROW = 8, 4, 3, 4, 3
RNG = np.random.default_rng(0)


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def make_cache(lengths):
    """Rows in shuffled pages; NaN in every slot that no row has written."""
    num_pages = len(lengths) * PAGES_PER_ROW + 2
    table = RNG.permutation(num_pages)[: len(lengths) * PAGES_PER_ROW]
    table = table.reshape(len(lengths), PAGES_PER_ROW).astype(np.int32)
    pages = np.full((num_pages, PAGE, C + R), np.nan, np.float32)
    rows = RNG.normal(size=(len(lengths), PAGES_PER_ROW * PAGE, C + R)).astype(np.float32)
    for b, length in enumerate(lengths):
        for position in range(length):
            pages[table[b, position // PAGE], position % PAGE] = rows[b, position]
        table[b, -(-length // PAGE) :] = -1
    return pages, table, rows


@hypothesis.given(st.lists(st.integers(0, PAGES_PER_ROW * PAGE), min_size=2, max_size=2))
@hypothesis.settings(max_examples=25, deadline=None)
def test_paged_attention_reads_what_a_query_may_see_and_nothing_else(lengths):
    t = 3
    pages, table, rows = make_cache(lengths)
    # The last t positions of each row; a row shorter than t has queries that see nothing.
    positions = np.array([[length - t + i for i in range(t)] for length in lengths], np.int32)
    positions = np.maximum(positions, -1)
    q = RNG.normal(size=(2, t, H, C + R)).astype(np.float32)
    want = np.zeros((2, t, H, C))
    for b, i, h in np.ndindex(2, t, H):
        if positions[b, i] >= 0:
            seen = rows[b, : positions[b, i] + 1].astype(np.float64)
            want[b, i, h] = softmax(seen @ q[b, i, h] * 0.3) @ seen[:, :C]
    got = jax.jit(paged_mla, static_argnames=("kv_lora_rank", "softmax_scale"))(
        jnp.asarray(q), jnp.asarray(pages), jnp.asarray(table), jnp.asarray(positions),
        kv_lora_rank=C, softmax_scale=0.3,
    )  # fmt: skip
    assert_close(got, want)


def test_expanded_attention_is_causal_per_head():
    b, s, t, n, v = 2, 7, 4, 5, 6
    q, k = RNG.normal(size=(b, t, H, n + R)), RNG.normal(size=(b, s, H, n))
    k_rope, value = RNG.normal(size=(b, s, R)), RNG.normal(size=(b, s, H, v))
    positions = np.array([[0, 1, 2, 3], [3, 4, 6, -1]], np.int32)
    want = np.zeros((b, t, H, v))
    for row, i, h in np.ndindex(b, t, H):
        if positions[row, i] >= 0:
            seen = slice(positions[row, i] + 1)
            scores = k[row, seen, h] @ q[row, i, h, :n] + k_rope[row, seen] @ q[row, i, h, n:]
            want[row, i, h] = softmax(scores * 0.3) @ value[row, seen, h]
    q, k, k_rope, value = (jnp.asarray(a, jnp.float32) for a in (q, k, k_rope, value))
    got = mla_prefill(q, k, k_rope, value, jnp.asarray(positions), softmax_scale=0.3)
    assert_close(got, want)


def test_gathered_rows_are_zero_past_the_length():
    pages, table, rows = make_cache([5, 0])
    got = np.asarray(
        gather_rows(jnp.asarray(pages), jnp.asarray(table), jnp.asarray([5, 0], jnp.int32))
    )
    np.testing.assert_array_equal(got[0, :5], rows[0, :5])
    assert (got[0, 5:] == 0).all() and (got[1] == 0).all()


@hypothesis.given(
    st.lists(st.integers(-1, PAGES_PER_ROW * PAGE + 2), min_size=2, max_size=2), st.integers(0, 7)
)
@hypothesis.settings(max_examples=25, deadline=None)
def test_a_write_touches_its_own_slots_only(starts, mask):
    """Positions before, across and past the row's pages, with and without validity."""
    pages, table, _ = make_cache([9, 4])  # The rows own 3 pages and 1 page.
    t = 3
    positions = np.array([[start + i for i in range(t)] for start in starts], np.int32)
    valid = np.array([[bool(mask >> i & 1) for i in range(t)]] * 2)
    rows = RNG.normal(size=(2, t, C + R)).astype(np.float32)
    want = pages.copy()
    for b, i in np.ndindex(2, t):
        position = positions[b, i]
        inside = 0 <= position < PAGES_PER_ROW * PAGE
        if valid[b, i] and inside and table[b, position // PAGE] >= 0:
            want[table[b, position // PAGE], position % PAGE] = rows[b, i]
    got = jax.jit(write_rows)(*(jnp.asarray(a) for a in (pages, rows, table, positions, valid)))
    np.testing.assert_array_equal(np.asarray(got), want)


def test_a_wrong_shape_is_named():
    with pytest.raises(Exception, match="page_table"):
        gather_rows(jnp.zeros((2, 4, 8)), jnp.zeros(3, jnp.int32), jnp.zeros(1, jnp.int32))
