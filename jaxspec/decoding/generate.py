"""`generate` and `stream`: prefill, then speculate, verify, commit, until every row is done.

One step serves the jitted loop and the stream. A row that is finished stays in the batch with all its
tokens masked: it writes nothing, sees nothing, and reaches no expert.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.latent import CacheOptions, LatentCache
from jaxspec.decoding.prefill import absorb_prompts, advance
from jaxspec.decoding.request import Prompts, Request, make_request
from jaxspec.decoding.sampling import Sampling
from jaxspec.decoding.stats import SpeculationStats
from jaxspec.decoding.verification import (
    FinishReason,
    commit,
    count_accepted,
    select_token,
)
from jaxspec.errors import RequestError
from jaxspec.model import SpeculativeModel

pytree = functools.partial(jax.tree_util.register_dataclass, meta_fields=[])


@functools.partial(
    pytree, data_fields=["tokens", "lengths", "finish_reason", "stats", "pad_token_id"]
)
@dataclasses.dataclass(frozen=True)
class Result:
    """What `generate` returns.

    Attributes:
        tokens: int32 `[b, max_new_tokens]`; `pad_token_id` past a row's length.
        lengths: int32 `[b]`; tokens of each row, its end token included.
        finish_reason: int32 `[b]`; a `FinishReason`.
        stats: counters per row.
        pad_token_id: the config's, else the first end token, else 0.
    """

    tokens: jax.Array
    lengths: jax.Array
    finish_reason: jax.Array
    stats: SpeculationStats
    pad_token_id: int


@functools.partial(pytree, data_fields=["tokens", "counts", "finished"])
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
    pytree,
    data_fields=[
        "cache", "draft_cache", "live", "anchor", "position", "remaining", "is_context_bound",
        "finish_reason", "stats",
    ],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that changes from step to step.

    Attributes:
        cache, draft_cache: rows below `position` are valid; what lies past it is never read.
        live: what the draft starts its next proposal from, or None.
        anchor: int32 `[b]`; the last committed token, which stands at `position`.
        position: int32 `[b]`; positions whose target state is known.
        remaining: int32 `[b]`; tokens that a row may still emit.
        is_context_bound: bool `[b]`; whether the model's context is what limits them.
        finish_reason: int32 `[b]`; `RUNNING` while a row decodes.
        stats: counters per row.
    """

    cache: LatentCache
    draft_cache: LatentCache | None
    live: Any
    anchor: jax.Array
    position: jax.Array
    remaining: jax.Array
    is_context_bound: jax.Array
    finish_reason: jax.Array
    stats: SpeculationStats

    @property
    def active(self) -> jax.Array:
        """bool `[b]`; rows that still decode."""
        return self.finish_reason == FinishReason.RUNNING


def generate(
    model: SpeculativeModel,
    prompts: Prompts,
    *,
    prompt_lengths: Any = None,
    max_new_tokens: int = 128,
    num_draft_tokens: int | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    eos_token_ids: Sequence[int] | None = None,
    draft_sampling: Literal["sampled", "greedy"] = "sampled",
    verification: Literal["fixed"] = "fixed",
    cache: CacheOptions | None = None,
) -> Result:
    """Continues each prompt as the target alone would, with the draft proposing tokens ahead.

    Runs as one jitted program; a second call whose prompts and budget fall in the same buckets
    compiles nothing. May be called under a user's `jit`.

    Args:
        prompts: lists of token ids, or int `[b, t]` with `prompt_lengths` `[b]`.
        max_new_tokens: tokens that a row emits at most, its end token included.
        num_draft_tokens: tokens drafted a round; default one a draft layer, 0 is plain decoding.
        sampling, key: greedy only so far, which uses no key.
        eos_token_ids: tokens that end a row; None is the config's, () none.
        draft_sampling: how the draft chooses when it samples; the same when greedy.
        verification: "fixed" verifies every drafted token.
        cache: pages, chunk of prefill, and dtype of the cache.

    Raises:
        RequestError: empty or too long prompts, ids outside the vocabulary, a negative budget.
        CapacityError: the pages do not hold the rows.
    """
    _check_choices(draft_sampling, verification)
    options = cache or CacheOptions()
    request = make_request(model, prompts, prompt_lengths, max_new_tokens, num_draft_tokens, options)
    tokens, state = _generate(
        model,
        *_arrays(model, request, eos_token_ids),
        num_pages=request.num_pages,
        max_new_tokens=request.max_new_tokens,
        num_draft_tokens=request.num_draft_tokens,
        sampling=sampling or Sampling(),
        options=options,
    )
    num_rows = request.num_rows
    lengths = (request.budgets - state.remaining)[:num_rows]
    tokens = tokens[:num_rows, :max_new_tokens]
    is_emitted = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    return Result(
        tokens=jnp.where(is_emitted, tokens, model.config.pad_token_id),
        lengths=lengths,
        finish_reason=state.finish_reason[:num_rows],
        stats=jax.tree.map(lambda x: x[:num_rows], state.stats),
        pad_token_id=model.config.pad_token_id,
    )


def stream(
    model: SpeculativeModel,
    prompts: Prompts,
    *,
    prompt_lengths: Any = None,
    max_new_tokens: int = 128,
    num_draft_tokens: int | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    eos_token_ids: Sequence[int] | None = None,
    draft_sampling: Literal["sampled", "greedy"] = "sampled",
    verification: Literal["fixed"] = "fixed",
    cache: CacheOptions | None = None,
) -> Iterator[Chunk]:
    """`generate`, handing out what each step commits; the first chunk is the prefill's token.

    Arguments and errors are `generate`'s; errors are raised at once, not at the first chunk.
    """
    _check_choices(draft_sampling, verification)
    options = cache or CacheOptions()
    request = make_request(model, prompts, prompt_lengths, max_new_tokens, num_draft_tokens, options)
    return _stream(model, request, eos_token_ids, sampling or Sampling(), options)


def _stream(
    model: SpeculativeModel,
    request: Request,
    eos_token_ids: Sequence[int] | None,
    sampling: Sampling,
    options: CacheOptions,
) -> Iterator[Chunk]:
    arrays = _arrays(model, request, eos_token_ids)
    eos = arrays[-1]
    static = {"num_draft_tokens": request.num_draft_tokens, "sampling": sampling}
    state, chunk = prefill(
        model, *arrays, num_pages=request.num_pages, options=options, **static
    )
    while True:
        rows = slice(request.num_rows)
        yield Chunk(chunk.tokens[rows], chunk.counts[rows], chunk.finished[rows])
        if bool(chunk.finished.all()):
            return
        state, chunk = step(model, state, eos, **static)


def _check_choices(draft_sampling: str, verification: str) -> None:
    if draft_sampling not in ("sampled", "greedy"):
        raise RequestError(f"draft_sampling={draft_sampling!r}; 'sampled' or 'greedy' is needed")
    if verification != "fixed":
        raise RequestError(f"verification={verification!r}; only 'fixed' is available")


def _arrays(model: SpeculativeModel, request: Request, eos_token_ids: Sequence[int] | None):
    """The traced arguments of a decoding program."""
    eos = model.config.eos_token_ids if eos_token_ids is None else tuple(eos_token_ids)
    return (
        request.prompts,
        request.lengths,
        request.budgets,
        request.is_context_bound,
        request.page_table,
        jnp.asarray(eos, jnp.int32).reshape(-1),
    )


@functools.partial(
    jax.jit,
    static_argnames=("num_pages", "max_new_tokens", "num_draft_tokens", "sampling", "options"),
)
def _generate(
    model, prompts, lengths, budgets, is_context_bound, page_table, eos, *,
    num_pages, max_new_tokens, num_draft_tokens, sampling, options,
):  # fmt: skip
    """The whole call as one program: tokens `[b, max_new_tokens]` and the last state."""
    state, chunk = prefill(
        model, prompts, lengths, budgets, is_context_bound, page_table, eos,
        num_pages=num_pages, num_draft_tokens=num_draft_tokens, sampling=sampling, options=options,
    )  # fmt: skip
    buffer = jnp.zeros((prompts.shape[0], max_new_tokens), jnp.int32)
    emitted = jnp.zeros_like(budgets)

    def body(carry):
        state, buffer, emitted = carry
        state, chunk = step(model, state, eos, num_draft_tokens=num_draft_tokens, sampling=sampling)
        return state, append(buffer, emitted, chunk), emitted + chunk.counts

    carry = state, append(buffer, emitted, chunk), emitted + chunk.counts
    state, buffer, _ = jax.lax.while_loop(lambda carry: carry[0].active.any(), body, carry)
    return buffer, state


def append(
    buffer: Int[Array, "b max_new_tokens"], emitted: Int[Array, " b"], chunk: Chunk
) -> Int[Array, "b max_new_tokens"]:
    """Writes a chunk behind what each row has emitted."""
    offset = jnp.arange(chunk.tokens.shape[1])[None]
    place = jnp.where(offset < chunk.counts[:, None], emitted[:, None] + offset, buffer.shape[1])
    return buffer.at[jnp.arange(len(buffer))[:, None], place].set(chunk.tokens, mode="drop")


@functools.partial(
    jax.jit, static_argnames=("num_pages", "num_draft_tokens", "sampling", "options")
)
def prefill(
    model, prompts, lengths, budgets, is_context_bound, page_table, eos, *,
    num_pages, num_draft_tokens, sampling, options,
):  # fmt: skip
    """The state behind the prompts, and the first token of each row as a chunk."""
    cache, draft_cache, anchor, live = absorb_prompts(
        model, prompts, lengths, page_table,
        num_pages=num_pages, with_draft=num_draft_tokens > 0, sampling=sampling, options=options,
    )  # fmt: skip
    counts, ended = commit(anchor[:, None], jnp.ones_like(lengths), budgets, eos)
    remaining = budgets - counts
    state = DecodeState(
        cache=cache,
        draft_cache=draft_cache,
        live=live,
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
    """One round: the draft proposes, the target verifies in one pass, each row commits what stands."""
    active, draft = state.active, model.draft
    draft_cache, tokens = state.draft_cache, state.anchor[:, None]
    if num_draft_tokens:
        draft_cache, proposal = draft.propose(
            model.shared, draft_cache, state.live, state.anchor, state.position, active,
            num_draft_tokens=num_draft_tokens, sampling=sampling, key=None,
        )  # fmt: skip
        tokens = jnp.concatenate((tokens, proposal.tokens), axis=1)
    positions = state.position[:, None] + jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)[None]
    valid = jnp.broadcast_to(active[:, None], tokens.shape)
    logits, captured, cache = model.target.forward(tokens, positions, state.cache, valid)
    chosen = sampling.pick(logits, None)
    num_accepted = count_accepted(tokens[:, 1:], chosen)
    may_commit = jnp.where(active, state.remaining, 0)
    counts, ended = commit(chosen, num_accepted + 1, may_commit, eos)
    remaining = state.remaining - counts
    live = state.live
    if num_draft_tokens:
        committed = jnp.arange(num_draft_tokens + 1)[None] < counts[:, None]
        draft_cache, new_live = draft.absorb(
            model.shared, draft_cache, chosen, positions, captured, committed
        )
        live = advance(new_live, live, active)
    finish_reason = _finish_reason(ended, remaining, state.is_context_bound)
    last = select_token(chosen, jnp.maximum(counts - 1, 0))
    state = DecodeState(
        cache=cache,
        draft_cache=draft_cache,
        live=live,
        anchor=jnp.where(active, last, state.anchor),
        position=state.position + counts,
        remaining=remaining,
        is_context_bound=state.is_context_bound,
        finish_reason=jnp.where(active, finish_reason, state.finish_reason),
        stats=state.stats.count(num_accepted, counts, ended, state.remaining, active),
    )
    return state, Chunk(chosen, counts, ~state.active)


def _finish_reason(ended, remaining, is_context_bound):
    out_of_room = jnp.where(is_context_bound, FinishReason.CONTEXT, FinishReason.BUDGET)
    unfinished = jnp.where(remaining > 0, FinishReason.RUNNING, out_of_room)
    return jnp.where(ended, FinishReason.END_TOKEN, unfinished).astype(jnp.int32)
