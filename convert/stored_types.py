"""What a tensor's stored type stands for, and the type that its values are kept in.

The stored type decides, never the config: F8_E4M3 is a matrix in blocks with scales; I8, U8 and F4
are packed FP4, two values a byte, kept as uint8; anything else is kept as it is, except that I64
tables of small numbers are kept as int32, since JAX has no 64-bit integers by default.
"""

import jax.numpy as jnp
import numpy as np

from convert.safetensors_file import DTYPES, TensorInfo
from jaxspec.model import ParameterSpec
from pallas_kernels.quantized import FP4_BLOCK_SHAPE

FLOATS = ("BF16", "F16", "F32")
INTEGERS = ("I32", "I64")
FP8 = "F8_E4M3"
FP4 = ("I8", "U8", "F4")
SCALES = ("F32", "F8_E8M0")


def allowed(spec: ParameterSpec) -> tuple[str, ...]:
    """Types in which a parameter may be stored; stacks of experts may be FP4."""
    if jnp.issubdtype(spec.dtype, jnp.integer):
        return INTEGERS
    if not spec.quantizable:
        return FLOATS
    return (*FLOATS, FP8, *FP4) if len(spec.shape) == 3 else (*FLOATS, FP8)


def needs_scales(dtype: str) -> bool:
    return dtype == FP8 or dtype in FP4


def block_shape(dtype: str, fp8_block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    return FP4_BLOCK_SHAPE if dtype in FP4 else fp8_block


def values_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the array that holds a tensor of this shape."""
    return (*shape[:-1], shape[-1] // 2) if dtype in FP4 else shape


def kept_as(info: TensorInfo) -> np.dtype:
    """The type of the array in the tree."""
    if info.dtype in FP4:
        return np.dtype(np.uint8)
    return np.dtype(np.int32) if info.dtype == "I64" else DTYPES[info.dtype][0]
