"""The public `block_matmul`: check the call, choose an implementation, run it."""

from jaxtyping import Array, Float

from pallas_kernels._typing import Implementation, ScaleFormat, require_reference, typechecked
from pallas_kernels.block_matmul import reference
from pallas_kernels.quantized import QuantizedTensor


@typechecked
def block_matmul(
    x: Float[Array, "m k"],
    w: Float[Array, "n k"] | QuantizedTensor,
    *,
    out_dtype=None,
    quantize: bool = True,
    scale_format: ScaleFormat = "float32",
    implementation: Implementation = "auto",
) -> Float[Array, "m n"]:
    """y[m, n] = sum over k of x[m, k] w[n, k], accumulated in float32.

    Returned as `out_dtype`, by default x's dtype. A plain `w` is widened or rounded to x's dtype. A
    quantized `w` multiplies activations quantized per row and per `activation_group_size` columns,
    as DeepSeek's FP8 GEMM does; with `quantize=False` it is dequantized to x's dtype instead.

    Raises:
        ValueError: the contraction of a quantized `w` differs from x's.
    """
    if w.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"block_matmul: x has k={x.shape[-1]}, w has k={w.shape[-1]}; equal k is needed"
        )
    require_reference("block_matmul", implementation)
    return reference.block_matmul(
        x, w, out_dtype=out_dtype or x.dtype, quantize=quantize, scale_format=scale_format
    )
