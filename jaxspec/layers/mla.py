"""Multi-head latent attention (arXiv:2405.04434, section 2.1) over a paged latent cache.

One cached row a token, `[normed latent c | rotated key r]`, serves every head. Few queries are
absorbed into the latent space and attend to the rows as they lie; many queries share the work of
expanding the rows into keys and values of their heads. Both give the same output.
"""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import DeepseekV3Config
from jaxspec.execution import Execution
from jaxspec.layers.linear import Linear
from jaxspec.layers.norms import RMSNorm
from jaxspec.layers.rope import Rope, rope_amplitude, rotate, softmax_scale
from pallas_kernels._products import einsum
from pallas_kernels.cache_write import write_rows
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.paged_mla import gather_rows, paged_mla

Pages = Float[Array, "num_pages page_size x"]
PageTable = Int[Array, "b pages_per_row"]

ROWS, HEADS = P("data"), P("data", None, "model")


class LatentAttention(nnx.Module):
    """`write` caches tokens, `attend` reads; a draft attends for fewer than it writes."""

    def __init__(self, *, config: DeepseekV3Config, execution: Execution, rngs: nnx.Rngs):
        self.config, self.execution = config, execution
        self.rope = Rope(config.rope_theta, config.rope, rope_amplitude(config.rope))
        h, d, c = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
        n, r, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        shared = {"config": config, "execution": execution, "rngs": rngs}
        if config.q_lora_rank is None:
            self.q_proj = Linear(h * (n + r), d, ("heads", None), **shared)
        else:
            a = config.q_lora_rank
            self.q_a_proj = Linear(a, d, (None, None), **shared)
            self.q_a_layernorm = RMSNorm(a, eps=config.rms_norm_eps)
            self.q_b_proj = Linear(h * (n + r), a, ("heads", None), **shared)
        self.kv_a_proj_with_mqa = Linear(c + r, d, (None, None), **shared)
        self.kv_a_layernorm = RMSNorm(c, eps=config.rms_norm_eps)
        self.kv_b_proj = Linear(h * (n + v), c, ("heads", None), **shared)
        self.o_proj = Linear(d, h * v, (None, "heads"), **shared)

    def write(
        self,
        x: Float[Array, "b t d"],
        positions: Int[Array, "b t"],
        valid: Bool[Array, "b t"],
        pages: Pages,
        page_table: PageTable,
    ) -> Pages:
        """Caches the latent and the rotated key of each valid token at its position."""
        latent, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [self.config.kv_lora_rank], axis=-1)
        k_rope = rotate(k_rope[:, :, None], positions, self.rope)[:, :, 0]
        rows = jnp.concatenate((self.kv_a_layernorm(latent), k_rope), axis=-1)

        def write_local(pages, rows, page_table, positions, valid):
            return write_rows(
                pages, rows, page_table, positions, valid, implementation=self.execution.kernels
            )

        write = self.execution.per_device(write_local, (ROWS,) * 5, ROWS)
        return write(pages, rows, page_table, positions, valid)

    def attend(
        self,
        x: Float[Array, "b t d"],
        positions: Int[Array, "b t"],
        pages: Pages,
        page_table: PageTable,
    ) -> Float[Array, "b t d"]:
        """Attention of each token to the positions up to its own, which must have been written."""
        b, t, _ = x.shape
        config = self.config
        if config.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(b, t, config.num_attention_heads, -1)
        q_nope, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        q_rope = rotate(q_rope, positions, self.rope)
        attend = self._attend_expanded if t > self.expansion_threshold else self._attend_absorbed
        out = attend(q_nope, q_rope, positions, pages, page_table)
        return self.o_proj(out.reshape(b, t, -1))

    @property
    def expansion_threshold(self) -> int:
        """Query tokens above which expanding costs fewer FLOPs than absorbing (V3: 170).

        A key costs 2c + r a query when absorbed; n + r + v a query and (n + v) c once if expanded.
        """
        n, v, c = self.config.qk_nope_head_dim, self.config.v_head_dim, self.config.kv_lora_rank
        saved = 2 * c - n - v
        return (n + v) * c // saved if saved > 0 else 2**31

    def _kv_b(self) -> tuple[Float[Array, "h n c"], Float[Array, "h v c"]]:
        """The two halves of `kv_b_proj` by head: latent to key, latent to value."""
        config = self.config
        w = self.kv_b_proj.dequantized().reshape(
            config.num_attention_heads, -1, config.kv_lora_rank
        )
        key, value = jnp.split(w, [config.qk_nope_head_dim], axis=1)
        return key, value

    def _attend_absorbed(self, q_nope, q_rope, positions, pages, page_table):
        key, value = self._kv_b()
        q_latent = einsum("hnc,bthn->bthc", key, q_nope, q_nope.dtype)

        def attend_local(q, pages, page_table, positions):
            return paged_mla(
                q,
                pages,
                page_table,
                positions,
                kv_lora_rank=self.config.kv_lora_rank,
                softmax_scale=softmax_scale(self.config),
                implementation=self.execution.kernels,
            )

        attend = self.execution.per_device(attend_local, (HEADS, ROWS, ROWS, ROWS), HEADS)
        q = jnp.concatenate((q_latent, q_rope), axis=-1)
        latent = attend(q, pages, page_table, positions)
        return einsum("hvc,bthc->bthv", value, latent, q.dtype)

    def _attend_expanded(self, q_nope, q_rope, positions, pages, page_table):
        def attend_local(q, key, value, pages, page_table, positions):
            rows = gather_rows(pages, page_table, positions.max(axis=1) + 1).astype(q.dtype)
            latent, k_rope = jnp.split(rows, [self.config.kv_lora_rank], axis=-1)
            return mla_prefill(
                q,
                einsum("bsc,hnc->bshn", latent, key, q.dtype),
                k_rope,
                einsum("bsc,hvc->bshv", latent, value, q.dtype),
                positions,
                softmax_scale=softmax_scale(self.config),
                implementation=self.execution.kernels,
            )

        specs = (HEADS, P("model"), P("model"), ROWS, ROWS, ROWS)
        attend = self.execution.per_device(attend_local, specs, HEADS)
        q = jnp.concatenate((q_nope, q_rope), axis=-1)
        return attend(q, *self._kv_b(), pages, page_table, positions)
