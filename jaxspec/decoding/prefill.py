"""Taking in the prompts, chunk by chunk."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.cache.pages import CacheOptions, PageTables
from jaxspec.decoding.sampling import Sampling
from jaxspec.model import SpeculativeModel


def absorb_prompts(
    model: SpeculativeModel,
    prompts: Int[Array, "b t"],
    known: Int[Array, " b"],
    pages: PageTables,
    *,
    num_draft_tokens: int,
    sampling: Sampling | None,
    options: CacheOptions,
) -> tuple[Any, tuple[Any, Any] | None, Int[Array, " b"]]:
    """Fills the caches with the first `known` tokens of each row.

    With `sampling`, the anchor that follows is the target's choice; without, it is the prompt's own
    token at `known`, and the head is not run. Logits are computed for one position a row.

    Returns:
        The target's cache; the draft's and what it proposes from, or None; and the anchors.
    """
    draft = model.draft if num_draft_tokens else None
    b, t = prompts.shape
    chunk_size = min(options.prefill_chunk, t)
    prompts = jnp.pad(prompts, ((0, 0), (0, -t % chunk_size)))
    last_column = prompts.shape[1] - 1

    def run_chunk(start, cache, drafting, anchor):
        tokens = jax.lax.dynamic_slice_in_dim(prompts, start, chunk_size, axis=1)
        positions = jnp.broadcast_to(start + jnp.arange(chunk_size, dtype=jnp.int32), tokens.shape)
        valid = positions < known[:, None]
        logits, captured, cache = model.target.forward(
            tokens, positions, cache, valid, "last" if sampling else None
        )
        if sampling:
            ends_here = (known > start) & (known <= start + chunk_size)
            anchor = jnp.where(ends_here, sampling.pick(logits, None), anchor)
        if draft is not None:
            # The draft's row t joins token t + 1; behind the last known one that is the anchor.
            following = jnp.minimum(positions + 1, last_column)
            next_tokens = jnp.take_along_axis(prompts, following, axis=1)
            is_last = positions == known[:, None] - 1
            next_tokens = jnp.where(is_last, anchor[:, None], next_tokens)
            draft_cache, live = drafting
            draft_cache, new_live = draft.absorb(
                model.shared, draft_cache, next_tokens, positions, captured, valid
            )
            drafting = draft_cache, advance(new_live, live, valid.any(axis=1))
        return cache, drafting, anchor

    max_block = num_draft_tokens + 1
    cache = model.target.empty_cache(b, max_block, pages, options)
    drafting = None
    if draft is not None:
        drafting = draft.empty_cache(b, max_block, pages, options), draft.empty_live(b)
    anchor = jnp.take_along_axis(prompts, jnp.minimum(known, last_column)[:, None], axis=1)[:, 0]
    carry = cache, drafting, anchor
    if t == chunk_size:
        return run_chunk(0, *carry)
    num_chunks = -(-known.max() // chunk_size)
    return jax.lax.fori_loop(
        0, num_chunks, lambda i, carry: run_chunk(i * chunk_size, *carry), carry
    )


def advance(new: Any, old: Any, advances: Bool[Array, " b"]) -> Any:
    """A pytree of rows: `new` where a row advances, else `old`."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(advances.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, new, old)
