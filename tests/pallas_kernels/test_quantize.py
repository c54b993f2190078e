"""`quantize_activations` and the block quantizer: every byte against scalar NumPy arithmetic."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantize import quantize_activations
from pallas_kernels.quantized import QuantizedTensor, dequantize, quantize_blocks, scales_shape

E4M3 = np.array(np.arange(256), np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
FINITE_E4M3 = np.unique(E4M3[np.isfinite(E4M3)])


def nearest_e4m3(x: np.floating) -> float:
    """Round to nearest, ties to the even code, from the list of all values; saturates at 448."""
    distance = np.abs(FINITE_E4M3 - np.float64(x))
    nearest = np.flatnonzero(distance == distance.min())
    if len(nearest) == 2:
        codes = FINITE_E4M3[nearest].astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        nearest = nearest[codes % 2 == 0]
    return float(FINITE_E4M3[nearest[0]])


def expected_rows(x: np.ndarray, group_size: int, scale_format: str):
    """The definition, element by element, in float32."""
    values, scales = np.zeros(x.shape), []
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], group_size):
            group = x[row, start : start + group_size]
            scale = np.float32(max(np.abs(group).max(), np.float32(1e-4)) / np.float32(448))
            if scale_format == "ue8m0":
                mantissa, exponent = np.frexp(scale)
                scale = np.float32(np.ldexp(1.0, exponent - (mantissa == 0.5)))
            scales.append(scale)
            values[row, start : start + group_size] = [
                nearest_e4m3(np.float32(v) / scale) for v in group
            ]
    return values, np.array(scales, np.float32).reshape(x.shape[0], -1)


magnitudes = st.sampled_from([1e-30, 1e-6, 1e-4, 0.05, 1.0, 448.0, 1e4, 1e30])


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@hypothesis.given(st.integers(0, 2**32 - 1), st.lists(magnitudes, min_size=3, max_size=3))
@hypothesis.settings(max_examples=20, deadline=None)
def test_every_byte_is_the_definitions(scale_format, seed, scales):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3, 40)).astype(np.float32) * np.array(scales, np.float32)[:, None]
    x[0, ::7] = 0
    got_values, got_scales = quantize_activations(
        jnp.asarray(x), group_size=16, scale_format=scale_format
    )
    values, group_scales = expected_rows(x, 16, scale_format)
    np.testing.assert_array_equal(np.asarray(got_scales), group_scales)
    np.testing.assert_array_equal(np.asarray(got_values, np.float64), values)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_the_edges_give_no_nan(scale_format):
    """D37: a cast above 464 is NaN in JAX, so the quantizer must clip; a zero block stays zero."""
    x = np.zeros((6, 128), np.float32)
    x[1], x[2, 5], x[3] = 1e4, 3e38, 1e-38
    x[4] = np.linspace(-500, 500, 128)
    x[5] = 448 * 2.0**-20
    values, scales = jax.jit(
        lambda x: quantize_activations(x, group_size=128, scale_format=scale_format)
    )(jnp.asarray(x))
    values, scales = np.asarray(values, np.float32), np.asarray(scales)
    assert np.isfinite(values).all() and np.isfinite(scales).all()
    assert (values[0] == 0).all()
    if scale_format == "ue8m0":
        mantissas, _ = np.frexp(scales)
        np.testing.assert_array_equal(mantissas, 0.5)
        assert (scales[:, 0] >= np.maximum(np.abs(x).max(1), 1e-4) / np.float32(448)).all()


@pytest.mark.parametrize("block_shape", [(128, 128), (64, 32)])
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(160, 200), (3, 130, 64)])
def test_blocks_are_dequantized_by_their_own_scale(shape, scale_dtype, block_shape):
    """Ragged last blocks too: rows and columns are mapped to scales one by one."""
    w = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    q = quantize_blocks(w, block_shape, scale_dtype)
    assert q.scales.shape == scales_shape(shape, block_shape)
    want = np.empty(shape, np.float32)
    for index in np.ndindex(*shape):
        *lead, row, column = index
        scale = q.scales[(*lead, row // block_shape[0], column // block_shape[1])]
        want[index] = np.float32(q.values[index]) * np.float32(scale)
    np.testing.assert_array_equal(dequantize(q, np.float32), want)
    on_device = jax.tree.map(jnp.asarray, q)
    np.testing.assert_array_equal(np.asarray(dequantize(on_device)), want)
    # Half a step of e4m3 below the largest of a block, which is at most twice its power of two.
    largest = np.abs(w).max()
    assert np.abs(want - w).max() <= largest / 448 * 2 * 16


def test_one_expert_is_selected_with_its_scales():
    q = quantize_blocks(np.random.default_rng(1).normal(size=(3, 4, 8)).astype(np.float32), (4, 4))
    np.testing.assert_array_equal(dequantize(q[1], np.float32), dequantize(q, np.float32)[1])


def test_a_format_has_a_name():
    values, scales = jnp.zeros((4, 4), jnp.float8_e4m3fn), jnp.ones((1, 1))
    assert QuantizedTensor(values, scales).format == "fp8_e4m3_block128"
    assert QuantizedTensor(values, scales, (64, 32)).format == "fp8_e4m3_block64x32"


def test_a_kernel_that_does_not_exist_is_refused():
    with pytest.raises(NotImplementedError, match="no kernel"):
        quantize_activations(jnp.ones((1, 128)), implementation="mosaic_gpu")
