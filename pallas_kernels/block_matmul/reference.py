"""What `block_matmul` means. Every implementation is tested against this file."""

import jax.numpy as jnp

from pallas_kernels._products import einsum
from pallas_kernels.quantize.reference import quantize_activations
from pallas_kernels.quantized import QuantizedTensor, dequantize


def block_matmul(x, w, *, out_dtype, quantize, scale_format):
    """y[m, n] = sum over k of x[m, k] w[n, k], accumulated in float32.

    With `quantize`, x stands for its float8 values times their scales. DeepSeek scales the partial
    sum of each block; scaling both factors first means the same and differs by 2**-24 a factor.
    """
    if isinstance(w, QuantizedTensor) and quantize:
        group_size = w.activation_group_size
        values, scales = quantize_activations(x, group_size=group_size, scale_format=scale_format)
        scales = jnp.repeat(scales, group_size, axis=-1)[:, : x.shape[1]]
        x = values.astype(jnp.float32) * scales
    w = dequantize(w, x.dtype) if isinstance(w, QuantizedTensor) else w.astype(x.dtype)
    return einsum("mk,nk->mn", x, w, out_dtype)
