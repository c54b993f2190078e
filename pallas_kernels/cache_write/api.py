"""The public `write_rows`: check the call, choose an implementation, run it."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._typing import Implementation, require_reference, typechecked
from pallas_kernels.cache_write import reference


@typechecked
def write_rows(
    pages: Float[Array, "num_pages page_size x"],
    rows: Float[Array, "b t x"],
    page_table: Int[Array, "b pages_per_row"],
    positions: Int[Array, "b t"],
    valid: Bool[Array, "b t"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "num_pages page_size x"]:
    """Writes each valid row into the page and slot of its absolute position.

    Rows that are not valid, that lie past the page table, or whose page is -1 are dropped, so a
    call never touches another sequence's pages.
    """
    require_reference("write_rows", implementation)
    return reference.write_rows(pages, rows, page_table, positions, valid)
