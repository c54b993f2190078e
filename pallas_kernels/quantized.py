"""`QuantizedTensor`: a matrix stored in 8 bits with one scale a block, and what it stands for."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

E4M3_MAX = 448.0
"""Largest finite float8_e4m3fn. Casting more than 464 gives NaN, so every quantizer clips first."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["block_shape"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A stack of `[out, in]` matrices in float8_e4m3fn, each block of them sharing one scale.

    Block (i, j) covers rows `i * block_shape[0]` on and columns `j * block_shape[1]` on; the last
    block of either dimension may be ragged, so the block shape is carried and never inferred.

    Attributes:
        values: float8_e4m3fn `[..., n, k]`.
        scales: float32 or float8_e8m0fnu `[..., ceil(n / rows), ceil(k / columns)]`; a scale
            **multiplies** the stored value (DeepSeek-V3's `weight_scale_inv`).
        block_shape: rows and columns of a block.
    """

    values: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray
    block_shape: tuple[int, int] = (128, 128)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix that this stands for."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def format(self) -> str:
        """For example `fp8_e4m3_block128`."""
        rows, columns = self.block_shape
        return f"fp8_e4m3_block{rows}" if rows == columns else f"fp8_e4m3_block{rows}x{columns}"

    def __getitem__(self, index) -> "QuantizedTensor":
        """Selects along the leading (expert) axes; the matrices stay whole."""
        return QuantizedTensor(self.values[index], self.scales[index], self.block_shape)


def scales_shape(shape: tuple[int, ...], block_shape: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a matrix stack `[..., n, k]`, ragged last blocks included."""
    *lead, n, k = shape
    return (*lead, -(-n // block_shape[0]), -(-k // block_shape[1]))


def dequantize(w: QuantizedTensor, dtype=jnp.float32) -> Any:
    """Value times the scale of its block, multiplied in float32 and rounded once to `dtype`.

    Works on JAX and on NumPy arrays alike, and returns the kind it was given.
    """
    xp = np if isinstance(w.values, np.ndarray) else jnp
    *_, n, k = w.values.shape
    scales = w.scales.astype(np.float32)
    scales = xp.repeat(scales, w.block_shape[0], axis=-2)[..., :n, :]
    scales = xp.repeat(scales, w.block_shape[1], axis=-1)[..., :k]
    return (w.values.astype(np.float32) * scales).astype(dtype)


def quantize_blocks(
    w: np.ndarray, block_shape: tuple[int, int] = (128, 128), scale_dtype=np.float32
) -> QuantizedTensor:
    """Quantizes matrices `[..., n, k]` on the host, block by block: scale = max|w| / 448.

    An e8m0 scale is the next power of two. A block of zeros gets scale 1 and stays zero.
    """
    *lead, n, k = w.shape
    rows, columns = block_shape
    pad = [(0, 0)] * len(lead) + [(0, -n % rows), (0, -k % columns)]
    blocks = np.pad(np.asarray(w, np.float32), pad)
    blocks = blocks.reshape(*lead, -(-n // rows), rows, -(-k // columns), columns)
    largest = np.abs(blocks).max(axis=(-3, -1))
    scales = np.where(largest > 0, largest / np.float32(E4M3_MAX), np.float32(1))
    if np.dtype(scale_dtype) == np.dtype(ml_dtypes.float8_e8m0fnu):
        scales = np.exp2(np.ceil(np.log2(scales)))
    scales = scales.astype(scale_dtype)
    stored = scales.astype(np.float32)[..., :, None, :, None]
    values = np.clip(blocks / stored, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    values = values.reshape(*lead, n + -n % rows, k + -k % columns)[..., :n, :k]
    return QuantizedTensor(values, scales, block_shape)
