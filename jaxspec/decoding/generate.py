"""`generate` and `stream`: prefill, then speculate, verify, commit, until every row is done."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.pages import CacheOptions
from jaxspec.decoding.prompts import Prompts
from jaxspec.decoding.request import Request, make_request
from jaxspec.decoding.sampling import Sampling
from jaxspec.decoding.stats import SpeculationStats
from jaxspec.decoding.step import Chunk, start, step
from jaxspec.errors import RequestError
from jaxspec.model import SpeculativeModel


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "finish_reason", "stats"],
    meta_fields=["pad_token_id"],
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

    Runs as one jitted program; a second call with the same options whose prompts fall in the same
    bucket compiles nothing. May be called under a user's `jit`.

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
    request = make_request(
        model,
        prompts,
        prompt_lengths,
        max_new_tokens,
        num_draft_tokens,
        sampling,
        eos_token_ids,
        cache,
    )
    result = _generate(
        model,
        *request.arrays,
        max_new_tokens=request.max_new_tokens,
        num_draft_tokens=request.num_draft_tokens,
        sampling=request.sampling,
        options=request.options,
    )
    rows = jax.tree.map(lambda x: x[: request.num_rows], result)
    # The program's width is a bucket, and no wider than the model's context.
    missing = max(max_new_tokens - rows.tokens.shape[1], 0)
    padded = jnp.pad(rows.tokens, ((0, 0), (0, missing)), constant_values=rows.pad_token_id)
    return dataclasses.replace(rows, tokens=padded[:, :max_new_tokens])


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

    Arguments and errors are `generate`'s; errors are raised at once, not at the first chunk. The
    host drives it step by step, so it cannot be traced: use `generate` under `jit`.
    """
    _check_choices(draft_sampling, verification)
    request = make_request(
        model,
        prompts,
        prompt_lengths,
        max_new_tokens,
        num_draft_tokens,
        sampling,
        eos_token_ids,
        cache,
    )
    return _stream(model, request)


def _stream(model: SpeculativeModel, request: Request) -> Iterator[Chunk]:
    static = {"num_draft_tokens": request.num_draft_tokens, "sampling": request.sampling}
    state, chunk = start(model, *request.arrays, options=request.options, **static)
    # Taking a deep model apart costs the host more than a step costs the device: once will do.
    leaves, structure = jax.tree.flatten(model)
    while True:
        yield jax.tree.map(lambda x: x[: request.num_rows], chunk)
        if bool(chunk.finished.all()):
            return
        state, chunk = _step(leaves, state, request.eos_token_ids, structure=structure, **static)


@functools.partial(
    jax.jit, static_argnames=("structure", "num_draft_tokens", "sampling"), donate_argnums=1
)
def _step(leaves, state, eos, *, structure, num_draft_tokens, sampling):
    """`step` of a model that is taken apart."""
    model = jax.tree.unflatten(structure, leaves)
    return step(model, state, eos, num_draft_tokens=num_draft_tokens, sampling=sampling)


def _check_choices(draft_sampling: str, verification: str) -> None:
    if draft_sampling not in ("sampled", "greedy"):
        raise RequestError(f"draft_sampling={draft_sampling!r}; 'sampled' or 'greedy' is needed")
    if verification != "fixed":
        raise RequestError(f"verification={verification!r}; only 'fixed' is available")


@functools.partial(
    jax.jit, static_argnames=("max_new_tokens", "num_draft_tokens", "sampling", "options")
)
def _generate(
    model, prompts, lengths, budgets, is_context_bound, pages, eos, *,
    max_new_tokens, num_draft_tokens, sampling, options,
) -> Result:  # fmt: skip
    """The whole call as one program, for the bucketed sizes."""
    state, chunk = start(
        model, prompts, lengths, budgets, is_context_bound, pages, eos,
        num_draft_tokens=num_draft_tokens, sampling=sampling, options=options,
    )  # fmt: skip
    pad_token_id = model.config.pad_token_id
    tokens = jnp.full((prompts.shape[0], max_new_tokens), pad_token_id, jnp.int32)

    def body(carry):
        state, tokens, emitted = carry
        state, chunk = step(model, state, eos, num_draft_tokens=num_draft_tokens, sampling=sampling)
        return state, append(tokens, emitted, chunk), emitted + chunk.counts

    carry = state, append(tokens, jnp.zeros_like(budgets), chunk), chunk.counts
    state, tokens, emitted = jax.lax.while_loop(lambda carry: carry[0].active.any(), body, carry)
    return Result(tokens, emitted, state.finish_reason, state.stats, pad_token_id)


def append(
    buffer: Int[Array, "b max_new_tokens"], emitted: Int[Array, " b"], chunk: Chunk
) -> Int[Array, "b max_new_tokens"]:
    """Writes a chunk behind what each row has emitted."""
    offset = jnp.arange(chunk.tokens.shape[1])[None]
    place = jnp.where(offset < chunk.counts[:, None], emitted[:, None] + offset, buffer.shape[1])
    return buffer.at[jnp.arange(len(buffer))[:, None], place].set(chunk.tokens, mode="drop")
