"""The public `quantize_activations`: check the call, choose an implementation, run it."""

from jaxtyping import Array, Float, Float8e4m3fn

from pallas_kernels._typing import Implementation, ScaleFormat, require_reference, typechecked
from pallas_kernels.quantize import reference


@typechecked
def quantize_activations(
    x: Float[Array, "m k"],
    *,
    group_size: int = 128,
    scale_format: ScaleFormat = "float32",
    implementation: Implementation = "auto",
) -> tuple[Float8e4m3fn[Array, "m k"], Float[Array, "m groups"]]:
    """Quantizes each row of activations to float8_e4m3fn, `group_size` columns sharing one scale.

    scale = max(max|x|, 1e-4) / 448 in float32 (DeepSeek-V3's `act_quant`); `ue8m0` rounds it up to
    a power of two (V3.1, V4). Finite input never gives NaN, and a group of zeros stays zero. A
    ragged last group is a group of its own.

    Returns:
        The values and their scales; `values * scale` of the group approximates `x`.
    """
    require_reference("quantize_activations", implementation)
    return reference.quantize_activations(x, group_size=group_size, scale_format=scale_format)
