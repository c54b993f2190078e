"""DeepSeek-V4's attention: one shared key/value head, a window, compressed entries before it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.compressed import LayerCache
from jaxspec.cache.ring import read_ring, write_ring
from jaxspec.config import DeepseekV4Config
from jaxspec.execution import Execution
from jaxspec.layers.compressor import (
    Compressor,
    Indexer,
    IndexQueries,
    keep_best,
    simulate_keys,
)
from jaxspec.layers.linear import Linear
from jaxspec.layers.norms import RMSNorm
from jaxspec.layers.rope import Rope, rotate_last
from pallas_kernels._products import einsum
from pallas_kernels.paged_mla import gather_rows
from pallas_kernels.sparse_attention import sparse_attention

ROWS, HEADS = P("data"), P("data", None, "model")


class Context(NamedTuple):
    """The window keys of one call: those in the ring before it, and its own.

    Attributes:
        rows: `[b, t, x]`; the call's keys.
        positions: int32 `[b, t]`, consecutive in each row.
        valid: bool `[b, t]`.
        window: `[b, size, x]`; the ring as it was before the call.
    """

    rows: jax.Array
    positions: jax.Array
    valid: jax.Array
    window: jax.Array

    def keys(self) -> tuple[Float[Array, "b s x"], Int[Array, "b s"]]:
        """All of them and their positions; zeros and a negative position where there is none."""
        old, old_positions = read_ring(self.window, self.positions[:, 0])
        rows = jnp.where(self.valid[..., None], self.rows, 0)
        own_positions = jnp.where(self.valid, self.positions, -1)
        return (
            jnp.concatenate((old.astype(rows.dtype), rows), axis=1),
            jnp.concatenate((old_positions, own_positions), axis=1),
        )


class CompressedAttention(nnx.Module):
    """Low-rank queries, a shared 1-head key that is its own value, a sink, a grouped output.

    Args:
        ratio: 0 sees the window only; 4 adds the entries that the indexer chooses, 128 all entries.
    """

    def __init__(
        self, ratio: int, *, config: DeepseekV4Config, execution: Execution, rngs: nnx.Rngs
    ):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.ratio, self.config, self.execution = ratio, config, execution
        self.rope = (
            Rope(config.compress_rope_theta, config.rope)
            if ratio
            else Rope(config.rope_theta, None)
        )
        h, d, x, eps = (
            config.num_attention_heads, config.hidden_size, config.head_dim, config.rms_norm_eps,
        )  # fmt: skip
        self.wq_a = Linear(config.q_lora_rank, d, (None, None), **shared)
        self.q_norm = RMSNorm(config.q_lora_rank, eps=eps)
        self.wq_b = Linear(h * x, config.q_lora_rank, ("heads", None), **shared)
        self.wkv = Linear(x, d, (None, None), **shared)
        self.kv_norm = RMSNorm(x, eps=eps)
        self.attn_sink = nnx.Param(jnp.zeros(h, jnp.float32), axes=("heads",))
        rank = config.o_groups * config.o_lora_rank
        self.wo_a = Linear(rank, h * x // config.o_groups, ("heads", None), **shared)
        self.wo_b = Linear(d, rank, (None, "heads"), **shared)
        self.compressor = (
            Compressor(ratio, x, self.rope, is_indexer=False, **shared) if ratio else None
        )
        self.indexer = Indexer(self.rope, **shared) if ratio == 4 else None

    def __call__(
        self,
        x: Float[Array, "b t d"],
        positions: Int[Array, "b t"],
        valid: Bool[Array, "b t"],
        cache: LayerCache,
        page_table: Int[Array, "b pages_per_row"] | None,
        only: Int[Array, " b"] | None = None,
    ) -> tuple[Float[Array, "b t_out d"], LayerCache]:
        """Attention of each token, or of one a row with `only`; every valid token is cached.

        A call may have more tokens than the ring has slots: it sees the old ring and its own rows.
        """
        rows = self.kv_norm(self.wkv(x))[:, :, None]
        rows = rotate_last(rows, positions, self.config.qk_rope_head_dim, self.rope)[:, :, 0]
        if self.execution.quantize_activations:
            rows = simulate_keys(rows, self.config.qk_rope_head_dim)
        context = Context(rows, positions, valid, cache.window)
        cache = self._write(x, context, cache, page_table)
        queries = jnp.where(valid, positions, -1)
        if only is not None:
            x = jnp.take_along_axis(x, only[:, None, None], axis=1)
            queries = jnp.take_along_axis(queries, only[:, None], axis=1)
        q_latent = self.q_norm(self.wq_a(x))
        q = self._queries(q_latent, queries)
        index_q = None
        if self.indexer is not None:
            index_q = self.indexer.queries(x, q_latent, queries)
        out = self._attend(q, queries, context, index_q, cache, page_table)
        return self._output(out, queries), cache

    def _write(
        self, x: Float[Array, "b t d"], context: Context, cache: LayerCache, page_table
    ) -> LayerCache:
        """The cache with the rows of this call, and the entries that they complete."""
        entries, keys = cache.entries, cache.keys
        positions, valid = context.positions, context.valid
        if self.compressor is not None and entries is not None:
            entries = self.compressor(x, positions, valid, entries, page_table)
        if self.indexer is not None and keys is not None:
            keys = self.indexer.compressor(x, positions, valid, keys, page_table)
        write = self.execution.per_device(write_ring, (ROWS,) * 4, ROWS)
        return LayerCache(write(cache.window, context.rows, positions, valid), entries, keys)

    def _attend(
        self,
        q: Float[Array, "b t h x"],
        queries: Int[Array, "b t"],
        context: Context,
        index_q: IndexQueries | None,
        cache: LayerCache,
        page_table: Int[Array, "b pages_per_row"] | None,
    ) -> Float[Array, "b t h x"]:
        """Attention to the window and the entries, on each device for its rows and heads."""

        def attend_local(q, sink, queries, context, index_q, cache, page_table):
            seen, key_positions = context.keys()
            visible = self._in_window(queries, key_positions)
            if cache.entries is not None:
                last = jnp.where(context.valid, context.positions, -1).max(axis=1)
                num_complete = (last + 1) // self.ratio
                entries = gather_rows(cache.entries.pages, page_table, num_complete)
                index = jnp.arange(entries.shape[1], dtype=jnp.int32)[None, None]
                chosen = index < ((queries + 1) // self.ratio)[..., None]
                if cache.keys is not None:
                    keys = gather_rows(cache.keys.pages, page_table, num_complete)
                    chosen = keep_best(index_q.scores(keys), chosen, self.config.index_topk)
                seen = jnp.concatenate((seen, entries.astype(seen.dtype)), axis=1)
                visible = jnp.concatenate((visible, chosen), axis=2)
            return sparse_attention(
                q,
                seen,
                visible,
                sink,
                softmax_scale=self.config.head_dim**-0.5,
                implementation=self.execution.kernels,
            )

        specs = (HEADS, P("model"), ROWS, ROWS, ROWS, ROWS, ROWS)
        attend = self.execution.per_device(attend_local, specs, HEADS)
        sink = self.attn_sink.get_value()
        return attend(q, sink, queries, context, index_q, cache, page_table)

    def _in_window(self, positions, key_positions) -> Bool[Array, "b t s"]:
        query, key = positions[:, :, None], key_positions[:, None]
        return (key >= 0) & (key <= query) & (key > query - self.config.sliding_window)

    def _queries(self, q_latent, positions) -> Float[Array, "b t h x"]:
        """Per head divided by its root mean square, without a weight, and rotated."""
        config = self.config
        q = self.wq_b(q_latent)
        q = q.reshape(*q.shape[:2], config.num_attention_heads, config.head_dim)
        wide = q.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + config.rms_norm_eps)
        return rotate_last(wide.astype(q.dtype), positions, config.qk_rope_head_dim, self.rope)

    def _output(self, out: Float[Array, "b t h x"], positions) -> Float[Array, "b t d"]:
        """Rotated back by the query's position, then projected by groups of heads."""
        config = self.config
        out = rotate_last(out, positions, config.qk_rope_head_dim, self.rope, inverse=True)
        b, t = positions.shape
        groups = out.reshape(b, t, config.o_groups, -1)
        # FP8 in the checkpoint, but its input is never quantized.
        wo_a = self.wo_a.dequantized().reshape(config.o_groups, config.o_lora_rank, -1)
        low = einsum("goy,btgy->btgo", wo_a, groups, out.dtype)
        return self.wo_b(low.reshape(b, t, -1))
