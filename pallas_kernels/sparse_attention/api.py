"""The public `sparse_attention`: check the call, choose an implementation, run it."""

from jaxtyping import Array, Bool, Float

from pallas_kernels._typing import Implementation, require_reference, typechecked
from pallas_kernels.sparse_attention import reference


@typechecked
def sparse_attention(
    q: Float[Array, "b t h x"],
    keys: Float[Array, "b s x"],
    visible: Bool[Array, "b t s"],
    sink: Float[Array, " h"],
    *,
    softmax_scale: float,
    implementation: Implementation = "auto",
) -> Float[Array, "b t h x"]:
    """Attention to one shared head whose rows are keys and values at once (DeepSeek-V4).

    The softmax's sum has one term more, exp(sink), which has no value and is not scaled; a query
    that sees nothing gives zeros. Keys that no query sees must be finite. Statistics are float32.
    """
    require_reference("sparse_attention", implementation)
    return reference.sparse_attention(q, keys, visible, sink, softmax_scale=softmax_scale)
