"""The public `paged_mla`: check the call, choose an implementation, run it."""

from jaxtyping import Array, Float, Int

from pallas_kernels._typing import Implementation, require_reference, typechecked
from pallas_kernels.paged_mla import reference


@typechecked
def paged_mla(
    q: Float[Array, "b t h x"],
    pages: Float[Array, "num_pages page_size x"],
    page_table: Int[Array, "b pages_per_row"],
    positions: Int[Array, "b t"],
    *,
    kv_lora_rank: int,
    softmax_scale: float,
    implementation: Implementation = "auto",
) -> Float[Array, "b t h c"]:
    """Latent attention in its absorbed form, for decode and verification (arXiv:2405.04434, 2.1).

    A cached row is key and value of every head at once: all `x = c + r` columns are the key, the
    first `c = kv_lora_rank` the value. A query at position p sees positions 0 to p, which must have
    been written. Softmax statistics are float32.

    Args:
        q: queries absorbed into the latent space, rotated part last.
        page_table: page of each `page_size` positions of a sequence; -1 is none.
        positions: absolute position of each query; a negative one sees nothing and gives zeros.
    """
    require_reference("paged_mla", implementation)
    return reference.paged_mla(
        q, pages, page_table, positions, kv_lora_rank=kv_lora_rank, softmax_scale=softmax_scale
    )


@typechecked
def gather_rows(
    pages: Float[Array, "num_pages page_size x"],
    page_table: Int[Array, "b pages_per_row"],
    num_valid: Int[Array, " b"],
) -> Float[Array, "b s x"]:
    """The cached rows of each sequence in order of position; zeros from `num_valid` on."""
    return reference.gather_rows(pages, page_table, num_valid)
