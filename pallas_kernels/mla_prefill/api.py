"""The public `mla_prefill`: check the call, choose an implementation, run it."""

from jaxtyping import Array, Float, Int

from pallas_kernels._typing import Implementation, require_reference, typechecked
from pallas_kernels.mla_prefill import reference


@typechecked
def mla_prefill(
    q: Float[Array, "b t h x"],
    k: Float[Array, "b s h n"],
    k_rope: Float[Array, "b s r"],
    v: Float[Array, "b s h v"],
    positions: Int[Array, "b t"],
    *,
    softmax_scale: float,
    implementation: Implementation = "auto",
) -> Float[Array, "b t h v"]:
    """Latent attention in its expanded form: a key and a value per head, the rotated key shared.

    Keys lie in order of position; a query at position p sees keys 0 to p, whether they belong to
    this call or to a prefix. Cheaper than the absorbed form once many queries share the expansion.

    Args:
        q: `x = n + r` columns, rotated part last.
        positions: absolute position of each query; a negative one sees nothing and gives zeros.
    """
    require_reference("mla_prefill", implementation)
    return reference.mla_prefill(q, k, k_rope, v, positions, softmax_scale=softmax_scale)
