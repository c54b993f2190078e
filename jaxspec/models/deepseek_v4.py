"""DeepSeek-V4: the target model. Module names are the checkpoint's own."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.compressed import CompressedCache, LayerCache, empty_cache
from jaxspec.cache.pages import CacheOptions, PageTables
from jaxspec.config import DeepseekV4Config
from jaxspec.execution import Execution
from jaxspec.layers.compressed_attention import CompressedAttention
from jaxspec.layers.embedding import Embedding
from jaxspec.layers.hyper_connections import HyperConnection, HyperHead
from jaxspec.layers.linear import Linear
from jaxspec.layers.moe_v4 import ClampedMoE
from jaxspec.layers.norms import RMSNorm
from jaxspec.models.deepseek_v3 import last_valid
from jaxspec.models.target import Logits
from jaxspec.sharding import constrain


class Block(nnx.Module):
    """Attention and experts, each inside a hyper-connection over the residual streams."""

    def __init__(
        self,
        ratio: int,
        *,
        is_hash: bool,
        config: DeepseekV4Config,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.ratio = ratio
        self.hc_attn = HyperConnection(config=config, rngs=rngs)
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn = CompressedAttention(ratio, **shared)
        self.hc_ffn = HyperConnection(config=config, rngs=rngs)
        self.ffn_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ffn = ClampedMoE(is_hash=is_hash, **shared)

    def __call__(
        self,
        streams: Float[Array, "b t j d"],
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        valid: Bool[Array, "b t"],
        cache: LayerCache,
        page_table: Int[Array, "b pages_per_row"] | None,
        only: Int[Array, " b"] | None = None,
    ) -> tuple[Float[Array, "b t_out j d"], LayerCache]:
        """Runs the block for each token or, with `only`, for one a row; caches all valid ones.

        Args:
            tokens: ids, for layers that route by them.
            positions: absolute, consecutive in each row.
        """
        mix = self.hc_attn.coefficients(streams)
        x = self.attn_norm(self.hc_attn.gather(streams, mix))
        y, cache = self.attn(x, positions, valid, cache, page_table, only)
        if only is not None:
            streams, tokens, valid = (take(a, only) for a in (streams, tokens, valid))
            mix = type(mix)(*(take(a, only) for a in mix))
        streams = self.hc_attn.spread(y, streams, mix)
        mix = self.hc_ffn.coefficients(streams)
        x = self.ffn_norm(self.hc_ffn.gather(streams, mix))
        return self.hc_ffn.spread(self.ffn(x, tokens, valid), streams, mix), cache


class DeepseekV4(nnx.Module):
    """Embedding, blocks over `hc_mult` residual streams, the mix that collapses them, a head."""

    def __init__(self, *, config: DeepseekV4Config, execution: Execution, rngs: nnx.Rngs):
        self.config, self.execution = config, execution
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.embed = Embedding(**shared)
        self.layers = nnx.List(
            Block(ratio, is_hash=layer < config.num_hash_layers, **shared)
            for layer, ratio in enumerate(config.compress_ratios)
        )
        self.hc_head = HyperHead(config=config, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = Linear(config.vocab_size, config.hidden_size, ("vocab", None), **shared)

    def empty_cache(
        self, num_rows: int, max_block: int, pages: PageTables, options: CacheOptions
    ) -> CompressedCache:
        """Zeros for every layer."""
        ratios, config = self.config.compress_ratios, self.config
        return empty_cache(ratios, num_rows, max_block, pages, options, config, self.execution)

    @property
    def embedding_and_head(self) -> tuple[Embedding, Linear]:
        """What a draft shares."""
        return self.embed, self.head

    def forward(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        cache: CompressedCache,
        valid: Bool[Array, "b t"],
        logits: Logits = "all",
    ) -> tuple[Any, Float[Array, "b t j d"], CompressedCache]:
        """`Target.forward`; a draft captures the streams behind the last block."""
        x = self.embed(tokens)
        streams = jnp.repeat(x[:, :, None], self.config.hc_mult, axis=2)
        for index, block in enumerate(self.layers):
            streams = constrain(streams, ("rows", None, None, None), self.execution.mesh)
            table = cache.page_table(block.ratio)
            streams, layer = block(streams, tokens, positions, valid, cache.layers[index], table)
            cache = cache.with_layer(index, layer)
        if logits is None:
            return None, streams, cache
        if logits == "all":
            return self.logits(streams), streams, cache
        return self.logits(take(streams, last_valid(valid)))[:, 0], streams, cache

    def logits(self, streams: Float[Array, "b t j d"]) -> Float[Array, "b t w"]:
        """float32 logits of the streams behind the last block."""
        return self.head(self.norm(self.hc_head(streams)), out_dtype=jnp.float32)


def take(x, index: Int[Array, " b"]):
    """x[b, index[b]], the token axis kept; any trailing shape."""
    return jnp.take_along_axis(x, index.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)
