"""What every draft is to the decoding loop.

Let n be the number of positions whose target state is known; token n is the anchor. After a
verification the draft *absorbs* the committed positions, then it *proposes* tokens n + 1 on.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.pages import CacheOptions, PageTables
from jaxspec.decoding.sampling import Sampling
from jaxspec.layers.embedding import Embedding
from jaxspec.layers.linear import Linear


class Shared(NamedTuple):
    """What a draft uses of the target, unless the checkpoint holds the draft's own."""

    embed_tokens: Embedding
    lm_head: Linear


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "logits", "confidence"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Proposal:
    """Drafted tokens; number k stands at position n + 1 + k.

    Attributes:
        tokens: int32 `[b, g]`.
        logits: float32 `[b, g, w]`; the draft's law of each token.
        confidence: float32 `[b, g]`, or None where the draft has no confidence head.
    """

    tokens: jax.Array
    logits: jax.Array
    confidence: jax.Array | None = None


class Draft(Protocol):
    """The protocol; the loop knows no more of a draft."""

    @property
    def default_num_draft_tokens(self) -> int:
        """Tokens drafted a round where the caller does not say."""
        ...

    def empty_cache(
        self, num_rows: int, max_block: int, pages: PageTables, options: CacheOptions
    ) -> Any:
        """A cache that has absorbed nothing."""
        ...

    def empty_live(self, num_rows: int) -> Any:
        """What `absorb` gives for rows that have absorbed nothing."""
        ...

    def absorb(
        self,
        shared: Shared,
        cache: Any,
        next_tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        captured: Float[Array, "b t *d"],
        valid: Bool[Array, "b t"],
    ) -> tuple[Any, Any]:
        """Takes in committed positions.

        `captured[b, i]` is the target's state at `positions[b, i]`, `next_tokens[b, i]` the token
        one position later. Returns the cache, and what `propose` needs of each row's last valid
        token.
        """
        ...

    def propose(
        self,
        shared: Shared,
        cache: Any,
        live: Any,
        anchor: Int[Array, " b"],
        position: Int[Array, " b"],
        active: Bool[Array, " b"],
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        key: jax.Array | None,
    ) -> tuple[Any, Proposal]:
        """Drafts the tokens behind the anchor, which stands at `position`.

        Rows that are not active touch no cache.
        """
        ...
