"""Rings: the last rows of a sequence, each in the slot of its position.

A ring of `size` slots keeps position p in slot `p % size`. With `size` at least the positions that
a valid read may touch plus the longest block that may be rejected, what a rejected token wrote has
replaced only positions that no later read touches, so nothing is ever put back.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def write_ring(
    ring: Float[Array, "b size x"],
    rows: Float[Array, "b t x"],
    positions: Int[Array, "b t"],
    valid: Bool[Array, "b t"],
) -> Float[Array, "b size x"]:
    """The ring with the valid rows in it; of more rows than it has slots, the last ones."""
    size = ring.shape[1]
    last = jnp.where(valid, positions, -1).max(axis=1, keepdims=True)
    slot = jnp.where(valid & (positions > last - size), positions % size, size)
    row = jnp.arange(len(ring))[:, None]
    return ring.at[row, slot].set(rows.astype(ring.dtype), mode="drop")


def ring_positions(start: Int[Array, " b"], size: int) -> Int[Array, "b size"]:
    """The latest position before `start` that each slot can hold; negative where there is none."""
    newest = start[:, None] - 1
    return newest - (newest - jnp.arange(size, dtype=jnp.int32)[None]) % size


def read_ring(
    ring: Float[Array, "b size x"], start: Int[Array, " b"]
) -> tuple[Float[Array, "b size x"], Int[Array, "b size"]]:
    """All rows before `start`, and their positions; zeros and a negative position where none is."""
    positions = ring_positions(start, ring.shape[1])
    # What was never written may be NaN, and 0 * NaN is NaN.
    return jnp.where((positions >= 0)[..., None], ring, 0), positions


def read_at(
    ring: Float[Array, "b size x"],
    rows: Float[Array, "b t x"],
    start: Int[Array, " b"],
    positions: Int[Array, "b n"],
) -> Float[Array, "b n x"]:
    """Rows by position: before `start` from the ring, from there on from `rows`; else zeros."""
    size, t = ring.shape[1], rows.shape[1]
    old = jnp.take_along_axis(ring, (positions % size)[..., None], axis=1)
    offset = positions - start[:, None]
    new = jnp.take_along_axis(rows, jnp.clip(offset, 0, t - 1)[..., None], axis=1)
    is_old = (positions >= 0) & (offset < 0)
    is_new = (offset >= 0) & (offset < t)
    found = jnp.where(is_old[..., None], old, jnp.where(is_new[..., None], new, 0))
    return found
