"""DeepSeek-V3's NextN draft (arXiv:2412.19437, 2.2): one decoder layer over the target's states.

Row t joins the target's state of position t with the embedding of token t + 1 and gives the law of
token t + 2. To draft more than one token it feeds back its own state.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.latent import LatentCache, empty_cache
from jaxspec.cache.pages import CacheOptions, PageTables
from jaxspec.config import DeepseekV3Config
from jaxspec.decoding.sampling import Sampling
from jaxspec.drafts.draft import Proposal, Shared
from jaxspec.execution import Execution
from jaxspec.layers.embedding import Embedding
from jaxspec.layers.linear import Linear
from jaxspec.layers.norms import RMSNorm
from jaxspec.models.deepseek_v3 import DecoderLayer, last_valid


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["hidden", "logits"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Live:
    """What the next proposal starts from.

    Attributes:
        hidden: `[b, d]`; the draft's state, after `shared_head.norm`.
        logits: float32 `[b, w]`; the law of the first token to draft.
    """

    hidden: jax.Array
    logits: jax.Array


class SharedHead(nnx.Module):
    """The draft's final norm, and its own head where that differs from the target's."""

    def __init__(
        self, *, owns_head: bool, config: DeepseekV3Config, execution: Execution, rngs: nnx.Rngs
    ):
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        w, d = config.vocab_size, config.hidden_size
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.head = Linear(w, d, ("vocab", None), **shared) if owns_head else None


class NextN(nnx.Module):
    """enorm, hnorm, eh_proj, one mixture-of-experts decoder layer with its own cache, shared_head.

    Args:
        owns_embedding, owns_head: whether the checkpoint holds the draft's own instead of a copy.
        zero_first_embedding: whether the embedding that joins position 0 is zeroed.
    """

    default_num_draft_tokens = 1

    def __init__(
        self,
        *,
        config: DeepseekV3Config,
        execution: Execution,
        rngs: nnx.Rngs,
        owns_embedding: bool = False,
        owns_head: bool = False,
        zero_first_embedding: bool = False,
    ):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.config, self.execution = config, execution
        self.zero_first_embedding = zero_first_embedding
        d = config.hidden_size
        self.embed_tokens = Embedding(**shared) if owns_embedding else None
        self.enorm = RMSNorm(d, eps=config.rms_norm_eps)
        self.hnorm = RMSNorm(d, eps=config.rms_norm_eps)
        self.eh_proj = Linear(d, 2 * d, (None, None), **shared)
        self.decoder = DecoderLayer(is_moe=True, **shared)
        self.shared_head = SharedHead(owns_head=owns_head, **shared)

    def forward(
        self,
        shared: Shared,
        cache: LatentCache,
        next_tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        hidden: Float[Array, "b t d"],
        valid: Bool[Array, "b t"],
        only: Int[Array, " b"] | None = None,
    ) -> tuple[Float[Array, "b t_out d"], LatentCache]:
        """States after `shared_head.norm`, of every token or, with `only`, of one a row."""
        embedding = (self.embed_tokens or shared.embed_tokens)(next_tokens)
        if self.zero_first_embedding:
            embedding = jnp.where((positions == 0)[..., None], 0, embedding)
        # The released weights take the embedding first, though the paper writes it second.
        x = self.eh_proj(jnp.concatenate((self.enorm(embedding), self.hnorm(hidden)), axis=-1))
        x, pages = self.decoder(x, positions, valid, cache.pages[0], cache.page_table, only)
        return self.shared_head.norm(x), cache.with_layer(0, pages)

    def logits(self, shared: Shared, hidden: Float[Array, "*b d"]) -> Float[Array, "*b w"]:
        """float32 logits of normed states."""
        return (self.shared_head.head or shared.lm_head)(hidden, out_dtype=jnp.float32)

    def empty_cache(
        self, num_rows: int, max_block: int, pages: PageTables, options: CacheOptions
    ) -> LatentCache:
        """Zeros for the one layer; what a rejected token writes needs no room of its own."""
        del num_rows, max_block
        return empty_cache(1, self.config.latent_dim, pages, options, self.execution)

    def empty_live(self, num_rows: int) -> Live:
        """Zeros, in the shapes that `absorb` gives."""
        hidden = jnp.zeros((num_rows, self.config.hidden_size), self.execution.dtype)
        return Live(hidden, jnp.zeros((num_rows, self.config.vocab_size), jnp.float32))

    def absorb(
        self,
        shared: Shared,
        cache: LatentCache,
        next_tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        captured: Float[Array, "b t d"],
        valid: Bool[Array, "b t"],
    ) -> tuple[LatentCache, Live]:
        """Caches the keys of all valid tokens; the rest runs for each row's last one alone."""
        hidden, cache = self.forward(
            shared, cache, next_tokens, positions, captured, valid, only=last_valid(valid)
        )
        return cache, Live(hidden[:, 0], self.logits(shared, hidden[:, 0]))

    def propose(
        self,
        shared: Shared,
        cache: LatentCache,
        live: Live,
        anchor: Int[Array, " b"],
        position: Int[Array, " b"],
        active: Bool[Array, " b"],
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        key: jax.Array | None,
    ) -> tuple[LatentCache, Proposal]:
        """The first token from the live state, each further one from the draft's own."""
        del anchor  # The live row has joined it already.
        tokens, logits = [sampling.pick(live.logits, key)], [live.logits]
        for step in range(num_draft_tokens - 1):
            hidden, cache = self.forward(
                shared,
                cache,
                tokens[-1][:, None],
                (position + step)[:, None],
                live.hidden[:, None],
                active[:, None],
            )
            live = Live(hidden[:, 0], self.logits(shared, hidden[:, 0]))
            tokens.append(sampling.pick(live.logits, key))
            logits.append(live.logits)
        return cache, Proposal(jnp.stack(tokens, axis=1), jnp.stack(logits, axis=1))
