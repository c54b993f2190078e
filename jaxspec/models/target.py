"""What every target is to the decoding loop."""

from typing import Any, Literal, Protocol

from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.pages import CacheOptions, PageTables
from jaxspec.layers.embedding import Embedding
from jaxspec.layers.linear import Linear

Logits = Literal["all", "last"] | None


class Target(Protocol):
    """One call for prefill, decode, verification and teacher forcing, and a cache to go with it."""

    @property
    def embedding_and_head(self) -> tuple[Embedding, Linear]:
        """What a draft shares."""
        ...

    def empty_cache(
        self, num_rows: int, max_block: int, pages: PageTables, options: CacheOptions
    ) -> Any:
        """A cache that holds nothing.

        Args:
            max_block: most tokens of a call of which some may be rejected, `g + 1`.
        """
        ...

    def forward(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        cache: Any,
        valid: Bool[Array, "b t"],
        logits: Logits = "all",
    ) -> tuple[Any, Float[Array, "b t *d"], Any]:
        """Runs tokens behind what the cache holds.

        Args:
            positions: absolute and consecutive in each row; those below the first are in the cache.
            valid: False for padding, which must follow a row's tokens.
            logits: which to compute; "last" is that of each row's last valid token.

        Returns:
            float32 logits, `[b, t, w]`, `[b, w]` for "last", or None; the states that a draft
            captures, in the compute dtype; and the cache with the valid tokens written.
        """
        ...
