"""DeepSeek-V4's MTP draft: V4 blocks over the target's streams, used in turn.

Row t joins the target's streams of position t with the embedding of token t + 1 and gives the law
of token t + 2. To draft more than one token it feeds back its own streams.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.compressed import CompressedCache, empty_cache
from jaxspec.cache.pages import CacheOptions, PageTables
from jaxspec.config import DeepseekV4Config
from jaxspec.decoding.sampling import Sampling
from jaxspec.drafts.draft import Proposal, Shared
from jaxspec.execution import Execution
from jaxspec.layers.embedding import Embedding
from jaxspec.layers.hyper_connections import HyperHead
from jaxspec.layers.linear import Linear
from jaxspec.layers.norms import RMSNorm
from jaxspec.models.deepseek_v3 import last_valid
from jaxspec.models.deepseek_v4 import Block


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["streams", "logits"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class LiveStreams:
    """What the next proposal starts from.

    Attributes:
        streams: `[b, j, d]`; the draft's own, before its `hc_head`.
        logits: float32 `[b, w]`; the law of the first token to draft.
    """

    streams: jax.Array
    logits: jax.Array


class MTPLayer(nnx.Module):
    """enorm, hnorm, e_proj + h_proj, one block, and its own hc_head and norm."""

    def __init__(
        self, ratio: int, *, config: DeepseekV4Config, execution: Execution, rngs: nnx.Rngs
    ):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        d = config.hidden_size
        self.enorm = RMSNorm(d, eps=config.rms_norm_eps)
        self.hnorm = RMSNorm(d, eps=config.rms_norm_eps)
        self.e_proj = Linear(d, d, (None, None), **shared)
        self.h_proj = Linear(d, d, (None, None), **shared)
        self.block = Block(ratio, is_hash=False, **shared)
        self.hc_head = HyperHead(config=config, rngs=rngs)
        self.norm = RMSNorm(d, eps=config.rms_norm_eps)

    def join(
        self, embedding: Float[Array, "b t d"], streams: Float[Array, "b t j d"]
    ) -> Float[Array, "b t j d"]:
        """What the block runs on: x[j] = e_proj(enorm(embedding)) + h_proj(hnorm(h[j]))."""
        joined = self.e_proj(self.enorm(embedding))
        return self.h_proj(self.hnorm(streams)) + joined[:, :, None]

    def state(self, streams: Float[Array, "*b j d"]) -> Float[Array, "*b d"]:
        """The state in front of the head."""
        return self.norm(self.hc_head(streams))


class MTP(nnx.Module):
    """One or more layers; step s of a chain takes its output from layer s % num_layers.

    Every layer caches every row, so that none has a hole where another gave the output.

    Args:
        owns_embedding, owns_head: whether the checkpoint holds the draft's own instead of a copy.
        zero_first_embedding: whether the embedding that joins position 0 is zeroed.
    """

    def __init__(
        self,
        *,
        config: DeepseekV4Config,
        execution: Execution,
        rngs: nnx.Rngs,
        owns_embedding: bool = False,
        owns_head: bool = False,
        zero_first_embedding: bool = True,
    ):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.config, self.execution = config, execution
        self.zero_first_embedding = zero_first_embedding
        self.embed = Embedding(**shared) if owns_embedding else None
        w, d = config.vocab_size, config.hidden_size
        self.head = Linear(w, d, ("vocab", None), **shared) if owns_head else None
        self.layers = nnx.List(MTPLayer(ratio, **shared) for ratio in config.draft_compress_ratios)

    @property
    def default_num_draft_tokens(self) -> int:
        """One a layer."""
        return len(self.layers)

    def empty_cache(
        self, num_rows: int, max_block: int, pages: PageTables, options: CacheOptions
    ) -> CompressedCache:
        """Zeros for each layer."""
        ratios, config = self.config.draft_compress_ratios, self.config
        return empty_cache(ratios, num_rows, max_block, pages, options, config, self.execution)

    def forward(
        self,
        shared: Shared,
        cache: CompressedCache,
        next_tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        streams: Float[Array, "b t j d"],
        valid: Bool[Array, "b t"],
        only: Int[Array, " b"] | None = None,
        *,
        step: int = 0,
    ) -> tuple[Float[Array, "b t_out j d"], CompressedCache]:
        """The streams of step's layer, for every row or, with `only`, for one of each sequence."""
        embedding = (self.embed or shared.embed_tokens)(next_tokens)
        if self.zero_first_embedding:
            embedding = jnp.where((positions == 0)[..., None], 0, embedding)
        outputs = []
        for index, layer in enumerate(self.layers):
            block = layer.block
            output, layer_cache = block(
                layer.join(embedding, streams),
                next_tokens,
                positions,
                valid,
                cache.layers[index],
                cache.page_table(block.ratio),
                only,
            )
            cache = cache.with_layer(index, layer_cache)
            outputs.append(output)
        return outputs[step % len(outputs)], cache

    def logits(
        self, shared: Shared, streams: Float[Array, "*b j d"], step: int = 0
    ) -> Float[Array, "*b w"]:
        """float32 logits of a layer's streams."""
        layer = self.layers[step % len(self.layers)]
        return (self.head or shared.lm_head)(layer.state(streams), out_dtype=jnp.float32)

    def empty_live(self, num_rows: int) -> LiveStreams:
        """Zeros, in the shapes that `absorb` gives."""
        j, d, w = self.config.hc_mult, self.config.hidden_size, self.config.vocab_size
        streams = jnp.zeros((num_rows, j, d), self.execution.dtype)
        return LiveStreams(streams, jnp.zeros((num_rows, w), jnp.float32))

    def absorb(
        self,
        shared: Shared,
        cache: CompressedCache,
        next_tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        captured: Float[Array, "b t j d"],
        valid: Bool[Array, "b t"],
    ) -> tuple[CompressedCache, LiveStreams]:
        """Caches the keys of all valid tokens; the rest runs for each row's last one alone."""
        streams, cache = self.forward(
            shared, cache, next_tokens, positions, captured, valid, only=last_valid(valid)
        )
        return cache, self._live(shared, streams, 0)

    def _live(self, shared: Shared, streams: Float[Array, "b 1 j d"], step: int) -> LiveStreams:
        return LiveStreams(streams[:, 0], self.logits(shared, streams[:, 0], step))

    def propose(
        self,
        shared: Shared,
        cache: CompressedCache,
        live: LiveStreams,
        anchor: Int[Array, " b"],
        position: Int[Array, " b"],
        active: Bool[Array, " b"],
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        key: jax.Array | None,
    ) -> tuple[CompressedCache, Proposal]:
        """The first token from the live streams, each further one from the draft's own."""
        del anchor  # The live row has joined it already.
        tokens, logits = [sampling.pick(live.logits, key)], [live.logits]
        for step in range(1, num_draft_tokens):
            streams, cache = self.forward(
                shared,
                cache,
                tokens[-1][:, None],
                (position + step - 1)[:, None],
                live.streams[:, None],
                active[:, None],
                step=step,
            )
            live = self._live(shared, streams, step)
            tokens.append(sampling.pick(live.logits, key))
            logits.append(live.logits)
        return cache, Proposal(jnp.stack(tokens, axis=1), jnp.stack(logits, axis=1))
