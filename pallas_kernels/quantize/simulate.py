"""Rounding to FP8 and FP4 and back, where DeepSeek-V4 simulates a quantized cache."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels._products import einsum
from pallas_kernels._typing import typechecked
from pallas_kernels.quantize.reference import SMALLEST_MAX, divide, power_of_two_at_least
from pallas_kernels.quantized import E4M3_MAX

E2M1_MAX = 6.0
SMALLEST_FP4_MAX = 6.0 * 2.0**-126


@typechecked
def simulate_fp8(x: Float[Array, "*b x"], *, group_size: int = 64) -> Float[Array, "*b x"]:
    """x rounded to float8_e4m3fn and back, `group_size` columns sharing a power-of-two scale.

    scale = 2 ** ceil(log2(max(max|x|, 1e-4) / 448)). The last dimension is a multiple of the group.
    """
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group_size)
    largest = jnp.maximum(jnp.abs(groups).max(axis=-1, keepdims=True), SMALLEST_MAX)
    scales = power_of_two_at_least(divide(largest, jnp.float32(E4M3_MAX)))
    values = jnp.clip(divide(groups, scales), -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return (values.astype(jnp.float32) * scales).reshape(x.shape).astype(x.dtype)


@typechecked
def simulate_fp4(x: Float[Array, "*b x"], *, group_size: int = 32) -> Float[Array, "*b x"]:
    """x rounded to float4_e2m1 and back, `group_size` columns sharing a power-of-two scale.

    scale = 2 ** ceil(log2(max(max|x|, 6 * 2**-126) / 6)); ties go to the even code.
    """
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, group_size)
    largest = jnp.maximum(jnp.abs(groups).max(axis=-1, keepdims=True), SMALLEST_FP4_MAX)
    scales = power_of_two_at_least(divide(largest, jnp.float32(E2M1_MAX)))
    values = round_to_e2m1(divide(groups, scales))
    return (values * scales).reshape(x.shape).astype(x.dtype)


def round_to_e2m1(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code.

    The step is 0.5 below 2, 1 below 4 and 2 above, and within each the even multiple has the even
    code, so rounding half to even does both.
    """
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    # Not x / step: XLA turns (a / scale) / step into a / (scale * step), and with the smallest
    # scale that product is no normal float, so that a group of zeros would be 0 / 0.
    per_step = jnp.where(size < 2, 2.0, jnp.where(size < 4, 1.0, 0.5))
    return jnp.clip(jnp.round(x * per_step) * step, -E2M1_MAX, E2M1_MAX)


@typechecked
def hadamard(x: Float[Array, "*b x"]) -> Float[Array, "*b x"]:
    """x times the orthonormal Hadamard matrix in Sylvester's order; the width is a power of two."""
    matrix = jnp.asarray(hadamard_matrix(x.shape[-1]))
    return einsum("...x,xy->...y", x.astype(jnp.float32), matrix, x.dtype)


def hadamard_matrix(width: int) -> np.ndarray:
    """float32 `[width, width]`; H of 2n is [[H, H], [H, -H]], scaled by width ** -0.5.

    Raises:
        ValueError: the width is not a power of two.
    """
    if width & (width - 1):
        raise ValueError(f"hadamard: width={width}; a power of two is needed")
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix * width**-0.5).astype(np.float32)
