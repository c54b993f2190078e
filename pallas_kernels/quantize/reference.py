"""What activation quantization means. Every implementation is tested against this file."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantized import E4M3_MAX

SMALLEST_MAX = 1e-4
"""DeepSeek's floor of a group's largest magnitude, so that zeros do not divide by zero."""


def power_of_two_at_least(x: jax.Array) -> jax.Array:
    """2 ** ceil(log2(x)) of positive normal float32; from the bits, since `log2` may round up."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).astype(jnp.int32)
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


def quantize_activations(x, *, group_size, scale_format):
    """Group a of a row: scale = max(max|a|, 1e-4) / 448, or the power of two at or above it.

    value = round to nearest even of clip(a / scale, -448, 448).
    """
    m, k = x.shape
    groups = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -k % group_size)))
    groups = groups.reshape(m, -1, group_size)
    largest = jnp.maximum(jnp.abs(groups).max(axis=-1), SMALLEST_MAX)
    scales = divide(largest, jnp.float32(E4M3_MAX))
    if scale_format == "ue8m0":
        scales = power_of_two_at_least(scales)
    values = divide(groups, scales[..., None])
    values = jnp.clip(values, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return values.reshape(m, -1)[:, :k], scales


def divide(x, divisor):
    """x / divisor, rounded once.

    XLA turns a division by a constant or by a broadcast into a product with the reciprocal, which
    is one unit off for many values and so picks another float8. It leaves a select alone.
    """
    return x / jnp.where(x == x, divisor, 1)
