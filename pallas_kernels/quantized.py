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


E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the low three bits of a float4_e2m1 code stand for; the fourth is the sign."""


FP4_BLOCK_SHAPE = (1, 32)
"""Rows and columns of a float4_e2m1 block; no other is in use."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["block_shape"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A stack of `[out, in]` matrices in float8_e4m3fn or float4_e2m1, with a scale a block.

    Block (i, j) covers rows `i * block_shape[0]` on and columns `j * block_shape[1]` on; the last
    block of either dimension may be ragged, so the block shape is carried and never inferred.

    Attributes:
        values: float8_e4m3fn `[..., n, k]`, or uint8 `[..., n, k / 2]` of two float4_e2m1 codes,
            the even column in the low half.
        scales: float32 or float8_e8m0fnu `[..., ceil(n / rows), ceil(k / columns)]`; a scale
            **multiplies** the stored value (DeepSeek-V3's `weight_scale_inv`, V4's `scale`).
        block_shape: rows and columns of a block.
    """

    values: jax.Array | np.ndarray
    scales: jax.Array | np.ndarray
    block_shape: tuple[int, int] = (128, 128)

    @property
    def is_fp4(self) -> bool:
        return self.values.dtype == np.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix that this stands for."""
        *lead, k = self.values.shape
        return (*lead, 2 * k if self.is_fp4 else k)

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def format(self) -> str:
        """For example `fp8_e4m3_block128` or `fp4_e2m1_block32`."""
        rows, columns = self.block_shape
        if self.is_fp4:
            return f"fp4_e2m1_block{columns}"
        return f"fp8_e4m3_block{rows}" if rows == columns else f"fp8_e4m3_block{rows}x{columns}"

    @property
    def activation_group_size(self) -> int:
        """Columns of an activation that share a scale in front of this matrix."""
        return 128 if self.is_fp4 else self.block_shape[1]

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
    *_, n, k = w.shape
    scales = w.scales.astype(np.float32)
    scales = xp.repeat(scales, w.block_shape[0], axis=-2)[..., :n, :]
    scales = xp.repeat(scales, w.block_shape[1], axis=-1)[..., :k]
    values = unpack_fp4(w.values) if w.is_fp4 else w.values.astype(np.float32)
    return (values * scales).astype(dtype)


def unpack_fp4(packed: Any) -> Any:
    """uint8 `[..., k / 2]` to float32 `[..., k]`: the low half of a byte is the even column.

    A byte viewed as signed would drag its sign into the high half, hence uint8.
    """
    xp = np if isinstance(packed, np.ndarray) else jnp
    table = xp.asarray(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), np.float32)
    codes = xp.stack((packed & 0xF, packed >> 4), axis=-1)
    return table[codes].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def quantize_blocks(
    w: np.ndarray, block_shape: tuple[int, int] = (128, 128), scale_dtype: Any = np.float32
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
