"""What `expert_mlp` means. Every implementation is tested against this file.

Work is proportional to the rows that are dispatched: they are gathered by expert, each expert's
padded to whole tiles, and a scan visits the tiles that hold rows. An expert without rows is never
read.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_matmul.reference import block_matmul


class Tiles(NamedTuple):
    """Where each dispatched row goes.

    Attributes:
        row: int32 `[num_tiles, tile]`; the assignment, of the flat `[m * k]`, in each place, or -1.
        expert: int32 `[num_tiles]`; the expert whose rows a tile holds.
        place: int32 `[m * k]`; the flat place of each assignment, or -1 where it is left out.
        num_used: int32; tiles that hold rows. They come first.
    """

    row: jax.Array
    expert: jax.Array
    place: jax.Array
    num_used: jax.Array


def tile_size(num_rows: int, num_experts: int) -> int:
    """Rows a tile: the mean rows an expert, as a power of two from 8 to 128."""
    mean = -(-num_rows // num_experts)
    return min(max(8, 1 << (mean - 1).bit_length()), 128)


def tile_rows(expert_ids, num_experts, tile) -> Tiles:
    """Gathers the assignments `[m * k]` by expert, each padded to whole tiles."""
    (num_rows,) = expert_ids.shape
    num_tiles = min(num_rows, num_rows // tile + num_experts)
    # Counting instead of sorting: a row's rank is the number of earlier rows of its expert.
    is_of = (expert_ids[:, None] == jnp.arange(num_experts)[None]).astype(jnp.int32)
    up_to = jnp.cumsum(is_of, axis=0)
    tiles_of = -(-up_to[-1] // tile)
    last_tile = jnp.cumsum(tiles_of)
    rank_and_start = up_to - 1 + (last_tile - tiles_of)[None] * tile
    place = jnp.where(expert_ids >= 0, (is_of * rank_and_start).sum(axis=1), -1)
    target = jnp.where(expert_ids >= 0, place, num_tiles * tile)
    row = jnp.full(num_tiles * tile, -1, jnp.int32)
    row = row.at[target].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")
    expert = (jnp.arange(num_tiles)[:, None] >= last_tile[None]).sum(axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    return Tiles(row.reshape(num_tiles, tile), expert, place, last_tile[-1])


def swiglu(gate, up, limit):
    """silu(gate) * up in float32; with a limit, the gate is cut above it and up on both sides."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


def expert_mlp(
    x, expert_ids, expert_weights, gate, up, down, *, limit, weigh, quantize, scale_format
):
    """y[m] = sum over k of weight[m, k] * down_e(silu(gate_e(x[m])) * up_e(x[m])), e = id[m, k]."""
    num_experts, (_, k) = gate.shape[0], expert_ids.shape
    tile = tile_size(expert_ids.size, num_experts)
    tiles = tile_rows(expert_ids.reshape(-1), num_experts, tile)

    def matmul(x, w):
        return block_matmul(x, w, out_dtype=x.dtype, quantize=quantize, scale_format=scale_format)

    def run_tile(_, step):
        index, row, expert = step

        def compute():
            x_tile = jnp.where((row >= 0)[:, None], x[jnp.maximum(row, 0) // k], 0)
            hidden = swiglu(matmul(x_tile, gate[expert]), matmul(x_tile, up[expert]), limit)
            if weigh == "hidden":
                hidden *= expert_weights.reshape(-1)[jnp.maximum(row, 0)][:, None]
            return matmul(hidden.astype(x.dtype), down[expert])

        return None, jax.lax.cond(
            index < tiles.num_used, compute, lambda: jnp.zeros((tile, x.shape[1]), x.dtype)
        )

    steps = (jnp.arange(tiles.expert.shape[0]), tiles.row, tiles.expert)
    _, y = jax.lax.scan(run_tile, None, steps)
    y = y.reshape(-1, x.shape[1])[jnp.maximum(tiles.place, 0)].astype(jnp.float32)
    y = jnp.where((tiles.place >= 0)[:, None], y, 0).reshape(*expert_ids.shape, x.shape[1])
    if weigh == "output":
        y *= expert_weights[..., None]
    return y.sum(axis=1).astype(x.dtype)
