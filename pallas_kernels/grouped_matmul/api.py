"""The public `expert_mlp`: check the call, choose an implementation, run it."""

from typing import Literal

from jaxtyping import Array, Float, Int

from pallas_kernels._typing import Implementation, ScaleFormat, require_reference, typechecked
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.quantized import QuantizedTensor


@typechecked
def expert_mlp(
    x: Float[Array, "m d"],
    expert_ids: Int[Array, "m k"],
    expert_weights: Float[Array, "m k"],
    gate: Float[Array, "e f d"] | QuantizedTensor,
    up: Float[Array, "e f d"] | QuantizedTensor,
    down: Float[Array, "e d f"] | QuantizedTensor,
    *,
    limit: float | None = None,
    weigh: Literal["output", "hidden"] = "output",
    quantize: bool = True,
    scale_format: ScaleFormat = "float32",
    implementation: Implementation = "auto",
) -> Float[Array, "m d"]:
    """The routed experts of a mixture: each row runs through its k experts, weighted and summed.

    y[m] = sum over k of expert_weights[m, k] * down(silu(gate(x[m])) * up(x[m])), with the matrices
    of expert `expert_ids[m, k]`; the sum is float32. Only experts that have rows are read.

    Args:
        expert_ids: 0 to e - 1; -1 leaves out a masked row or another device's expert.
        limit: the gate is cut above it, up on both sides; None cuts nothing.
        weigh: where the weight is applied: to the output, or to the input of down (DeepSeek-V4),
            which matters when that is quantized.
        quantize, scale_format: as for `block_matmul`.
    """
    require_reference("expert_mlp", implementation)
    return reference.expert_mlp(
        x,
        expert_ids,
        expert_weights,
        gate,
        up,
        down,
        limit=limit,
        weigh=weigh,
        quantize=quantize,
        scale_format=scale_format,
    )
