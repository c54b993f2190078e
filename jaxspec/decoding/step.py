"""One round of decoding, and the state that it changes; for the jitted loop and for the stream.

A row that is finished stays in the batch with its tokens masked: it writes nothing, sees nothing,
and reaches no expert.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.cache.pages import CacheOptions, PageTables
from jaxspec.decoding.prefill import absorb_prompts, advance
from jaxspec.decoding.sampling import Sampling
from jaxspec.decoding.stats import SpeculationStats
from jaxspec.decoding.verification import FinishReason, commit, count_accepted, select_token
from jaxspec.model import SpeculativeModel


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "counts", "finished"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one step commits.

    Attributes:
        tokens: int32 `[b, g + 1]`; only the first `counts[b]` of a row count.
        counts: int32 `[b]`; 0 for a row that had finished before.
        finished: bool `[b]`; whether the row is done after this step.
    """

    tokens: jax.Array
    counts: jax.Array
    finished: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "cache", "drafting", "anchor", "position", "remaining", "is_context_bound",
        "finish_reason", "stats",
    ],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that changes from step to step.

    Attributes:
        cache: rows below `position` are valid; what lies past it is never read.
        drafting: the draft's cache, likewise, and what its next proposal starts from; None in plain
            decoding.
        anchor: int32 `[b]`; the last committed token, which stands at `position`.
        position: int32 `[b]`; positions whose target state is known.
        remaining: int32 `[b]`; tokens that a row may still emit.
        is_context_bound: bool `[b]`; whether the model's context is what limits them.
        finish_reason: int32 `[b]`; `RUNNING` while a row decodes.
        stats: counters per row.
    """

    cache: Any
    drafting: tuple[Any, Any] | None
    anchor: jax.Array
    position: jax.Array
    remaining: jax.Array
    is_context_bound: jax.Array
    finish_reason: jax.Array
    stats: SpeculationStats

    @property
    def active(self) -> Bool[Array, " b"]:
        """Rows that still decode."""
        return self.finish_reason == FinishReason.RUNNING


@functools.partial(jax.jit, static_argnames=("num_draft_tokens", "sampling", "options"))
def start(
    model: SpeculativeModel,
    prompts: Int[Array, "b t"],
    lengths: Int[Array, " b"],
    budgets: Int[Array, " b"],
    is_context_bound: Bool[Array, " b"],
    pages: PageTables,
    eos: Int[Array, " num_eos"],
    *,
    num_draft_tokens: int,
    sampling: Sampling,
    options: CacheOptions,
) -> tuple[DecodeState, Chunk]:
    """The state behind the prompts, and the first token of each row as a chunk."""
    cache, drafting, anchor = absorb_prompts(
        model,
        prompts,
        lengths,
        pages,
        num_draft_tokens=num_draft_tokens,
        sampling=sampling,
        options=options,
    )
    counts, ended = commit(anchor[:, None], jnp.ones_like(lengths), budgets, eos)
    remaining = budgets - counts
    state = DecodeState(
        cache=cache,
        drafting=drafting,
        anchor=anchor,
        position=lengths,
        remaining=remaining,
        is_context_bound=is_context_bound,
        finish_reason=_finish_reason(ended, remaining, is_context_bound),
        stats=SpeculationStats.zeros(len(prompts), num_draft_tokens),
    )
    tokens = jnp.pad(anchor[:, None], ((0, 0), (0, num_draft_tokens)))
    return state, Chunk(tokens, counts, ~state.active)


@functools.partial(jax.jit, static_argnames=("num_draft_tokens", "sampling"), donate_argnums=1)
def step(
    model: SpeculativeModel,
    state: DecodeState,
    eos: Int[Array, " num_eos"],
    *,
    num_draft_tokens: int,
    sampling: Sampling,
) -> tuple[DecodeState, Chunk]:
    """The draft proposes, the target verifies in one pass, and each row commits what stands."""
    active = state.active
    tokens, drafting = _speculate(model, state, num_draft_tokens, sampling)
    positions = state.position[:, None] + jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)[None]
    valid = jnp.broadcast_to(active[:, None], tokens.shape)
    logits, captured, cache = model.target.forward(tokens, positions, state.cache, valid)
    chosen = sampling.pick(logits, None)
    num_accepted = count_accepted(tokens[:, 1:], chosen)
    may_commit = jnp.where(active, state.remaining, 0)
    counts, ended = commit(chosen, num_accepted + 1, may_commit, eos)
    committed = jnp.arange(num_draft_tokens + 1)[None] < counts[:, None]
    remaining = state.remaining - counts
    finish_reason = _finish_reason(ended, remaining, state.is_context_bound)
    last = select_token(chosen, jnp.maximum(counts - 1, 0))
    state = dataclasses.replace(
        state,
        cache=cache,
        drafting=_absorb(model, drafting, chosen, positions, captured, committed),
        anchor=jnp.where(active, last, state.anchor),
        position=state.position + counts,
        remaining=remaining,
        finish_reason=jnp.where(active, finish_reason, state.finish_reason),
        stats=state.stats.count(num_accepted, counts, ended, state.remaining, active),
    )
    return state, Chunk(chosen, counts, ~state.active)


def _speculate(
    model: SpeculativeModel, state: DecodeState, num_draft_tokens: int, sampling: Sampling
):
    """The block to verify `[b, g + 1]`, the anchor first; and the draft's cache and `live`."""
    anchor = state.anchor[:, None]
    if model.draft is None or state.drafting is None:
        return anchor, None
    cache, live = state.drafting
    cache, proposal = model.draft.propose(
        model.shared,
        cache,
        live,
        state.anchor,
        state.position,
        state.active,
        num_draft_tokens=num_draft_tokens,
        sampling=sampling,
        key=None,
    )
    return jnp.concatenate((anchor, proposal.tokens), axis=1), (cache, live)


def _absorb(model: SpeculativeModel, drafting, tokens, positions, captured, committed):
    """Gives the draft the target's states of what was committed; other rows keep their `live`."""
    if model.draft is None or drafting is None:
        return None
    cache, live = drafting
    cache, new_live = model.draft.absorb(
        model.shared, cache, tokens, positions, captured, committed
    )
    return cache, advance(new_live, live, committed.any(axis=1))


def _finish_reason(ended, remaining, is_context_bound) -> Int[Array, " b"]:
    out_of_room = jnp.where(is_context_bound, FinishReason.CONTEXT, FinishReason.BUDGET)
    unfinished = jnp.where(remaining > 0, FinishReason.RUNNING, out_of_room)
    return jnp.where(ended, FinishReason.END_TOKEN, unfinished).astype(jnp.int32)
