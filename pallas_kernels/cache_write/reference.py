"""What `write_rows` means. Every implementation is tested against this file."""

import jax.numpy as jnp


def write_rows(pages, rows, page_table, positions, valid):
    """pages[page_table[b, p // page_size], p % page_size] = rows[b, t], p = positions[b, t]."""
    num_pages, page_size, _ = pages.shape
    block = positions // page_size
    inside = valid & (block >= 0) & (block < page_table.shape[1])
    page = jnp.take_along_axis(page_table, jnp.where(inside, block, 0), axis=1)
    # A negative index would wrap around; one past the end is dropped.
    page = jnp.where(inside & (page >= 0), page, num_pages)
    return pages.at[page, positions % page_size].set(rows.astype(pages.dtype), mode="drop")
