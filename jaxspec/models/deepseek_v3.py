"""DeepSeek-V3 (arXiv:2412.19437): the target model. Module names are the checkpoint's own."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.latent import LatentCache, empty_cache
from jaxspec.cache.pages import CacheOptions, PageTables
from jaxspec.config import DeepseekV3Config
from jaxspec.execution import Execution
from jaxspec.layers.embedding import Embedding
from jaxspec.layers.linear import Linear
from jaxspec.layers.mla import LatentAttention, Pages, PageTable
from jaxspec.layers.moe import MLP, MoE
from jaxspec.layers.norms import RMSNorm
from jaxspec.models.target import Logits
from jaxspec.sharding import constrain


class DecoderLayer(nnx.Module):
    """x += attention(norm(x)); x += feed-forward(norm(x)). Dense first, a mixture later."""

    def __init__(
        self, *, is_moe: bool, config: DeepseekV3Config, execution: Execution, rngs: nnx.Rngs
    ):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LatentAttention(**shared)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MoE(**shared) if is_moe else MLP(config.intermediate_size, **shared)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        positions: Int[Array, "b t"],
        valid: Bool[Array, "b t"],
        pages: Pages,
        page_table: PageTable,
        only: Int[Array, " b"] | None = None,
    ) -> tuple[Float[Array, "b t_out d"], Pages]:
        """Runs the layer for each token or, with `only`, for one a row; keys are cached for all.

        Args:
            positions: absolute position of each token.
            valid: tokens that are neither cached, seen, nor sent to experts where False.
            only: index into t of the token whose output is wanted; the output then has t_out = 1.
        """
        normed = self.input_layernorm(x)
        pages = self.self_attn.write(normed, positions, valid, pages, page_table)
        if only is not None:
            x, normed = take_token(x, only), take_token(normed, only)
            positions = jnp.take_along_axis(positions, only[:, None], axis=1)
            valid = jnp.take_along_axis(valid, only[:, None], axis=1)
        # A query that is not valid sees nothing, so that it cannot reach what was never written.
        seen_from = jnp.where(valid, positions, -1)
        x = x + self.self_attn.attend(normed, seen_from, pages, page_table)
        normed = self.post_attention_layernorm(x)
        y = self.mlp(normed, valid) if isinstance(self.mlp, MoE) else self.mlp(normed)
        return x + y, pages


class DeepseekV3(nnx.Module):
    """Embedding, decoder layers, final norm and head."""

    def __init__(self, *, config: DeepseekV3Config, execution: Execution, rngs: nnx.Rngs):
        self.config, self.execution = config, execution
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.embed_tokens = Embedding(**shared)
        self.layers = nnx.List(
            DecoderLayer(is_moe=config.is_moe(layer), **shared)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = Linear(config.vocab_size, config.hidden_size, ("vocab", None), **shared)

    def empty_cache(
        self, num_rows: int, max_block: int, pages: PageTables, options: CacheOptions
    ) -> LatentCache:
        """Zeros for every layer; what a rejected token writes needs no room of its own."""
        del num_rows, max_block
        config = self.config
        num_layers = config.num_hidden_layers
        return empty_cache(num_layers, config.latent_dim, pages, options, self.execution)

    @property
    def embedding_and_head(self) -> tuple[Embedding, Linear]:
        """What a draft shares."""
        return self.embed_tokens, self.lm_head

    def forward(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        cache: LatentCache,
        valid: Bool[Array, "b t"],
        logits: Logits = "all",
    ) -> tuple[Any, Float[Array, "b t d"], LatentCache]:
        """`Target.forward`; a draft captures the states after the final norm."""
        x = self.embed_tokens(tokens)
        for index, layer in enumerate(self.layers):
            x = constrain(x, ("rows", None, None), self.execution.mesh)
            x, pages = layer(x, positions, valid, cache.pages[index], cache.page_table)
            cache = cache.with_layer(index, pages)
        captured = self.norm(x)
        if logits is None:
            return None, captured, cache
        if logits == "all":
            return self.lm_head(captured, out_dtype=jnp.float32), captured, cache
        last = take_token(captured, last_valid(valid))[:, 0]
        return self.lm_head(last, out_dtype=jnp.float32), captured, cache


def last_valid(valid: Bool[Array, "b t"]) -> Int[Array, " b"]:
    """Index of each row's last valid token, 0 where it has none."""
    return jnp.maximum(valid.sum(axis=1, dtype=jnp.int32) - 1, 0)


def take_token(x: Float[Array, "b t d"], index: Int[Array, " b"]) -> Float[Array, "b 1 d"]:
    """x[b, index[b]], the token axis kept."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, 1))(x, index)
