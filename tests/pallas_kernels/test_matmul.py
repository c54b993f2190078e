"""`block_matmul` and `expert_mlp` against float64."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.block_matmul import block_matmul
from pallas_kernels.grouped_matmul import expert_mlp
from pallas_kernels.grouped_matmul.reference import tile_rows, tile_size
from pallas_kernels.quantize import quantize_activations
from pallas_kernels.quantized import dequantize, quantize_blocks
from tests.pallas_kernels.tolerance import assert_close

RNG = np.random.default_rng(0)


def normal(*shape, dtype="float32"):
    return jnp.asarray(RNG.normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("m, n, k", [(1, 5, 7), (8, 130, 200)])
def test_a_plain_product_is_the_sum_it_says(m, n, k, dtype):
    x, w = normal(m, k, dtype=dtype), normal(n, k, dtype="bfloat16")
    assert_close(block_matmul(x, w), np.asarray(x, np.float64) @ np.asarray(w, np.float64).T)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("n, k, block_shape", [(160, 200, (128, 128)), (96, 96, (64, 32))])
def test_a_quantized_product_scales_each_block(n, k, block_shape, scale_format):
    """DeepSeek's form: partial sums of each block of k, scaled by activation and weight."""
    x = normal(6, k)
    w = quantize_blocks(RNG.normal(size=(n, k)).astype(np.float32), block_shape)
    rows, columns = block_shape
    values, scales = quantize_activations(x, group_size=columns, scale_format=scale_format)
    want = np.zeros((6, n))
    for block in range(-(-k // columns)):
        part = slice(block * columns, (block + 1) * columns)
        partial = np.asarray(values, np.float64)[:, part] @ np.float64(w.values[:, part]).T
        weight_scale = np.repeat(np.float64(w.scales[:, block]), rows)[:n]
        want += partial * np.asarray(scales, np.float64)[:, block, None] * weight_scale
    on_device = jax.tree.map(jnp.asarray, w)
    got = block_matmul(x, on_device, scale_format=scale_format)
    assert_close(got, want)
    exact = np.asarray(x, np.float64) @ np.float64(dequantize(w, np.float32)).T
    assert_close(block_matmul(x, on_device, quantize=False), exact)
    # The two differ by far more than the tolerance: neither can stand in for the other.
    assert np.linalg.norm(want - exact) / np.linalg.norm(exact) > 1e-3


def test_unequal_contraction_is_refused():
    w = jax.tree.map(jnp.asarray, quantize_blocks(np.ones((4, 6), np.float32)))
    with pytest.raises(ValueError, match="x has k=5, w has k=6"):
        block_matmul(normal(2, 5), w)
    with pytest.raises(jaxtyping.TypeCheckError):
        block_matmul(normal(2, 5)[0], normal(4, 5))


def expected_experts(x, ids, weights, gate, up, down):
    x, weights, gate, up, down = (np.asarray(a, np.float64) for a in (x, weights, gate, up, down))
    y = np.zeros(x.shape)
    for row, column in np.ndindex(ids.shape):
        expert = ids[row, column]
        if expert >= 0:
            hidden = gate[expert] @ x[row]
            hidden = hidden / (1 + np.exp(-hidden)) * (up[expert] @ x[row])
            y[row] += weights[row, column] * (down[expert] @ hidden)
    return y


E, F, D = 5, 12, 16
MATRICES = normal(E, F, D), normal(E, F, D), normal(E, D, F)


@hypothesis.given(st.sampled_from([(1, 1), (4, 3), (40, 2)]), st.data())
@hypothesis.settings(max_examples=15, deadline=None)
def test_experts_sum_their_rows(shape, data):
    """Any assignment: experts without rows, one expert with all, rows left out, repeats."""
    size = int(np.prod(shape))
    ids = st.lists(st.integers(-1, E - 1), min_size=size, max_size=size)
    ids = np.array(data.draw(ids | st.just([2] * size) | st.just([-1] * size)), np.int32)
    ids = ids.reshape(shape)
    x, weights = normal(shape[0], D), jnp.asarray(RNG.random(shape), jnp.float32)
    got = jax.jit(expert_mlp)(x, jnp.asarray(ids), weights, *MATRICES)
    assert_close(got, expected_experts(x, ids, weights, *MATRICES))


def test_quantized_experts_equal_each_expert_alone():
    quantized = [quantize_blocks(np.asarray(w), (8, 8)) for w in MATRICES]
    ids = np.array([[0, 3], [3, 4], [-1, 1]], np.int32)
    x, weights = normal(3, D), jnp.asarray(RNG.random((3, 2)), jnp.float32)
    on_device = jax.tree.map(jnp.asarray, quantized)
    got = expert_mlp(x, jnp.asarray(ids), weights, *on_device, quantize=False)
    exact = [dequantize(w, np.float32) for w in quantized]
    assert_close(got, expected_experts(x, ids, weights, *exact))
    want = np.zeros((3, D), np.float32)
    for row, column in np.ndindex(ids.shape):
        if ids[row, column] >= 0:
            gate, up, down = (w[int(ids[row, column])] for w in on_device)
            one = x[row : row + 1]
            hidden = jax.nn.silu(block_matmul(one, gate)) * block_matmul(one, up)
            want[row] += np.asarray(weights[row, column] * block_matmul(hidden, down))[0]
    assert_close(expert_mlp(x, jnp.asarray(ids), weights, *on_device), want)


def test_an_expert_without_rows_is_never_read():
    poisoned = [w.at[jnp.array([1, 4])].set(jnp.nan) for w in MATRICES]
    ids = np.array([[0, 2], [3, -1]], np.int32)
    x, weights = normal(2, D), jnp.ones((2, 2))
    got = expert_mlp(x, jnp.asarray(ids), weights, *poisoned)
    assert_close(got, expected_experts(x, ids, weights, *MATRICES))


@hypothesis.given(st.lists(st.integers(-1, 6), min_size=1, max_size=60))
@hypothesis.settings(max_examples=40, deadline=None)
def test_tiles_hold_each_row_once_and_no_more_than_are_needed(ids):
    ids = np.array((ids * 60)[:60], np.int32)
    tile = tile_size(len(ids), 7)
    tiles = jax.jit(tile_rows, static_argnums=(1, 2))(jnp.asarray(ids), 7, tile)
    rows, experts = np.asarray(tiles.row), np.asarray(tiles.expert)
    held = rows[rows >= 0]
    np.testing.assert_array_equal(np.sort(held), np.flatnonzero(ids >= 0))
    for row, expert in zip(rows, experts, strict=True):
        assert (ids[row[row >= 0]] == expert).all()
    counts = np.bincount(ids[ids >= 0], minlength=7)
    assert int(tiles.num_used) == sum(-(-counts // tile))
    assert (rows[int(tiles.num_used) :] == -1).all()
    place = np.asarray(tiles.place)
    np.testing.assert_array_equal(rows.reshape(-1)[place[ids >= 0]], np.flatnonzero(ids >= 0))
