"""DeepSeek-V4's compressor, one entry a group of positions, and the indexer that chooses.

Entry i covers positions i * ratio to i * ratio + ratio - 1 and exists once all of them are known.
At ratio 4 entries overlap: each also pools the group before its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.compressed import Compressed
from jaxspec.cache.ring import read_at, write_ring
from jaxspec.config import DeepseekV4Config
from jaxspec.execution import Execution
from jaxspec.layers.linear import Linear, matrix
from jaxspec.layers.norms import RMSNorm
from jaxspec.layers.rope import Rope, rotate_last
from pallas_kernels._products import einsum
from pallas_kernels.cache_write import write_rows
from pallas_kernels.quantize import hadamard, simulate_fp4, simulate_fp8

ROWS = P("data")


class Compressor(nnx.Module):
    """Pools keys with a learned softmax over positions, then norms and rotates them; in float32.

    Args:
        width: of an entry.
        rotate: whether entries are the indexer's, which are turned by the Hadamard matrix and
            rounded to FP4; the others have their unrotated columns rounded to FP8.
    """

    def __init__(
        self,
        ratio: int,
        width: int,
        rope: Rope,
        *,
        is_indexer: bool,
        config: DeepseekV4Config,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.ratio, self.width, self.rope, self.is_indexer = ratio, width, rope, is_indexer
        self.config, self.execution = config, execution
        self.halves = 2 if ratio == 4 else 1
        shape = (self.halves * width, config.hidden_size)
        self.ape = nnx.Param(jnp.zeros((ratio, shape[0]), jnp.float32), axes=(None, None))
        self.wkv = Plain(shape, rngs)
        self.wgate = Plain(shape, rngs)
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        positions: Int[Array, "b t"],
        valid: Bool[Array, "b t"],
        cache: Compressed,
        page_table: Int[Array, "b pages_per_row"],
    ) -> Compressed:
        """Writes each entry whose last position is in this call, and keeps what later ones pool."""
        wide = x.astype(jnp.float32)
        rows = jnp.concatenate((self.wkv(wide), self.wgate(wide)), axis=-1)
        run = self.execution.per_device(Compressor._append, (P(), *(ROWS,) * 5), ROWS)
        return run(self, rows, positions, valid, cache, page_table)

    def _append(self, rows, positions, valid, cache: Compressed, page_table) -> Compressed:
        start, t = positions[:, 0], positions.shape[1]
        first = start[:, None] // self.ratio
        index = first + jnp.arange(t // self.ratio + 1, dtype=jnp.int32)[None]
        end = (index + 1) * self.ratio - 1
        last = jnp.where(valid, positions, -1).max(axis=1, keepdims=True)
        is_complete = (end >= start[:, None]) & (end <= last)
        entries = self.round(self.pool(rows, start, index, cache.raw), index)
        pages = write_rows(cache.pages, entries, page_table, index, is_complete)
        return Compressed(write_ring(cache.raw, rows, positions, valid), pages)

    def pool(
        self,
        rows: Float[Array, "b t x"],
        start: Int[Array, " b"],
        index: Int[Array, "b n"],
        raw: Float[Array, "b size x"],
    ) -> Float[Array, "b n y"]:
        """Weighted means, normed: of the group's positions, at ratio 4 of the one before too."""
        b, n = index.shape
        covered = self.halves * self.ratio
        offset = jnp.arange(covered, dtype=jnp.int32) - (covered - self.ratio)
        members = index[..., None] * self.ratio + offset[None, None]
        found = read_at(raw, rows, start, members.reshape(b, -1)).reshape(b, n, covered, -1)
        kv, gate = jnp.split(found, 2, axis=-1)
        ape = jnp.tile(self.ape.get_value(), (self.halves, 1))
        gate = gate + jnp.broadcast_to(ape, gate.shape)
        if self.halves == 2:
            kv, gate = self._own_half(kv), self._own_half(gate)
        gate = jnp.where((members >= 0)[..., None], gate, -jnp.inf)
        pooled = (jax.nn.softmax(gate, axis=2) * kv).sum(axis=2)
        return self.norm(pooled)

    def _own_half(self, x: Float[Array, "b n m y2"]) -> Float[Array, "b n m y"]:
        """The first half of the columns for the group before, the second half for the own group."""
        before, own = jnp.split(x, 2, axis=2)
        return jnp.concatenate((before[..., : self.width], own[..., self.width :]), axis=2)

    def round(self, entries: Float[Array, "b n y"], index: Int[Array, "b n"]):
        """Entries rotated at their group's first position, and rounded as the cache stores them."""
        width = self.config.qk_rope_head_dim
        entries = rotate_last(entries[:, :, None], index * self.ratio, width, self.rope)[:, :, 0]
        if not self.execution.quantize_activations:
            return entries
        if self.is_indexer:
            return simulate_fp4(hadamard(entries))
        return simulate_keys(entries, width)


class Plain(nnx.Module):
    """A matrix applied in float32."""

    def __init__(self, shape: tuple[int, int], rngs: nnx.Rngs):
        self.weight = matrix(shape, (None, None), rngs, quantizable=False)

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t o"]:
        weight = self.weight.get_value().astype(jnp.float32)
        return einsum("btd,od->bto", x, weight)


def simulate_keys(x: Float[Array, "*b x"], rope_width: int) -> Float[Array, "*b x"]:
    """Keys as the cache would hold them: the unrotated columns in FP8, by groups of 64."""
    still, turning = jnp.split(x, [x.shape[-1] - rope_width], axis=-1)
    return jnp.concatenate((simulate_fp8(still), turning), axis=-1)


class IndexQueries(NamedTuple):
    """The indexer's side of the queries of a call.

    Attributes:
        q: `[b, t, heads, x]`.
        weights: float32 `[b, t, heads]`; may be negative.
    """

    q: jax.Array
    weights: jax.Array

    def scores(self, keys: Float[Array, "b n x"]) -> Float[Array, "b t n"]:
        """sum over heads of relu(q . k) w, in float32."""
        products = einsum("bthx,bnx->bthn", self.q, keys.astype(self.q.dtype))
        return einsum("bthn,bth->btn", jax.nn.relu(products), self.weights)


class Indexer(nnx.Module):
    """Scores every compressed entry for every query and keeps the best `index_topk`."""

    def __init__(
        self, rope: Rope, *, config: DeepseekV4Config, execution: Execution, rngs: nnx.Rngs
    ):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.config, self.execution, self.rope = config, execution, rope
        h, width = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(h * width, config.q_lora_rank, (None, None), **shared)
        self.weights_proj = Linear(h, config.hidden_size, (None, None), **shared)
        self.compressor = Compressor(4, width, rope, is_indexer=True, **shared)

    def queries(
        self,
        x: Float[Array, "b t d"],
        q_latent: Float[Array, "b t a"],
        positions: Int[Array, "b t"],
    ) -> IndexQueries:
        """What each token asks for: rotated queries, and a weight for each of their heads."""
        b, t, _ = x.shape
        h, width = self.config.index_n_heads, self.config.index_head_dim
        q = self.wq_b(q_latent).reshape(b, t, h, width)
        q = rotate_last(q, positions, self.config.qk_rope_head_dim, self.rope)
        if self.execution.quantize_activations:
            q = simulate_fp4(hadamard(q))
        return IndexQueries(q, self.weights_proj(x).astype(jnp.float32) * (width * h) ** -0.5)


def keep_best(
    scores: Float[Array, "b t n"], visible: Bool[Array, "b t n"], count: int
) -> Bool[Array, "b t n"]:
    """The `count` best visible entries of each query; ties go to the lowest index."""
    if scores.shape[-1] <= count:
        return visible
    _, best = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), count)
    chosen = jnp.zeros(scores.shape, jnp.bool_)
    chosen = jnp.put_along_axis(chosen, best, True, axis=-1, inplace=False)
    return chosen & visible
