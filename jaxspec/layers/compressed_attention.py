"""DeepSeek-V4's attention: one shared key/value head, a window, and compressed entries before it."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.compressed import LayerCache
from jaxspec.cache.ring import read_ring, write_ring
from jaxspec.config_v4 import DeepseekV4Config
from jaxspec.execution import Execution
from jaxspec.layers.compressor import Compressor, Indexer, keep_best, simulate_keys
from jaxspec.layers.linear import Linear
from jaxspec.layers.norms import RMSNorm
from jaxspec.layers.rope import Rope, rotate_last
from pallas_kernels.paged_mla import gather_rows
from pallas_kernels.sparse_attention import sparse_attention


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
            Rope(config.compress_rope_theta, config.rope) if ratio else Rope(config.rope_theta, None)
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
        start = positions[:, 0]
        rows = self.kv_norm(self.wkv(x))[:, :, None]
        rows = rotate_last(rows, positions, self.config.qk_rope_head_dim, self.rope)[:, :, 0]
        if self.execution.quantize_activations:
            rows = simulate_keys(rows, self.config.qk_rope_head_dim)
        old_rows, old_positions = read_ring(cache.window, start)
        window = write_ring(cache.window, rows, positions, valid)
        entries, keys = self._compress(x, positions, valid, cache, page_table)
        cache = LayerCache(window, entries, keys)
        own_positions = jnp.where(valid, positions, -1)
        last = own_positions.max(axis=1)
        key_positions = jnp.concatenate((old_positions, own_positions), axis=1)
        rows = jnp.where(valid[..., None], rows, 0)
        seen = jnp.concatenate((old_rows.astype(rows.dtype), rows), axis=1)
        if only is not None:
            x = jnp.take_along_axis(x, only[:, None, None], axis=1)
            own_positions = jnp.take_along_axis(own_positions, only[:, None], axis=1)
        visible = self._in_window(own_positions, key_positions)
        q_latent = self.q_norm(self.wq_a(x))
        q = self._queries(q_latent, own_positions)
        if self.ratio:
            extra, extra_visible = self._entries(
                x, q_latent, own_positions, last, cache, page_table
            )
            seen = jnp.concatenate((seen, extra.astype(seen.dtype)), axis=1)
            visible = jnp.concatenate((visible, extra_visible), axis=2)
        out = sparse_attention(
            q,
            seen,
            visible,
            self.attn_sink.get_value(),
            softmax_scale=self.config.head_dim**-0.5,
            implementation=self.execution.kernels,
        )
        return self._output(out, own_positions), cache

    def _compress(self, x, positions, valid, cache: LayerCache, page_table):
        entries, keys = cache.entries, cache.keys
        if self.compressor is not None and entries is not None:
            entries = self.compressor(x, positions, valid, entries, page_table)
        if self.indexer is not None and keys is not None:
            keys = self.indexer.compressor(x, positions, valid, keys, page_table)
        return entries, keys

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

    def _entries(self, x, q_latent, positions, last, cache: LayerCache, page_table):
        """The compressed entries of each row, and which of them each query sees."""
        num_complete = (last + 1) // self.ratio
        entries = gather_rows(cache.entries.pages, page_table, num_complete)
        index = jnp.arange(entries.shape[1], dtype=jnp.int32)[None, None]
        visible = index < ((positions + 1) // self.ratio)[..., None]
        if self.indexer is not None:
            keys = gather_rows(cache.keys.pages, page_table, num_complete)
            scores = self.indexer.scores(x, q_latent, positions, keys)
            visible = keep_best(scores, visible, self.config.index_topk)
        return entries, visible

    def _output(self, out: Float[Array, "b t h x"], positions) -> Float[Array, "b t d"]:
        """Rotated back by the query's position, then projected by groups of heads."""
        config = self.config
        out = rotate_last(out, positions, config.qk_rope_head_dim, self.rope, inverse=True)
        b, t = positions.shape
        groups = out.reshape(b, t, config.o_groups, -1)
        # FP8 in the checkpoint, but its input is never quantized.
        wo_a = self.wo_a.dequantized().reshape(config.o_groups, config.o_lora_rank, -1)
        low = jnp.einsum(
            "btgy,goy->btgo",
            groups,
            wo_a,
            preferred_element_type=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
        )
        return self.wo_b(low.astype(out.dtype).reshape(b, t, -1))
