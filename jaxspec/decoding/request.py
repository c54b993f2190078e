"""From a user's arguments to padded arrays, page tables and bucketed sizes; checked on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxspec.cache.pages import CacheOptions, PageTables, make_page_tables
from jaxspec.config import ModelConfig
from jaxspec.errors import RequestError
from jaxspec.model import SpeculativeModel

Prompts = Sequence[Sequence[int]] | np.ndarray | jax.Array

SMALLEST_BUCKET = 16


@dataclasses.dataclass(frozen=True)
class Request:
    """A decoding call, ready to run. Sizes are buckets, so that similar calls share a program.

    Attributes:
        prompts: int32 `[b, bucket]`, b a multiple of the data shards.
        lengths: int32 `[b]`; prompt tokens of each row. Added rows have one token and no budget.
        budgets: int32 `[b]`; tokens that each row may emit.
        is_context_bound: bool `[b]`; whether the model's context, not the caller, sets the budget.
        pages: which pages each row has.
        num_rows: rows that the caller asked for; the first ones.
        max_new_tokens: the bucket that holds the largest budget.
        num_draft_tokens: tokens drafted a round; 0 is plain decoding.
    """

    prompts: jax.Array
    lengths: jax.Array
    budgets: jax.Array
    is_context_bound: jax.Array
    pages: PageTables
    num_rows: int
    max_new_tokens: int
    num_draft_tokens: int


def bucket(size: int) -> int:
    """The next power of two, 16 at least."""
    return max(SMALLEST_BUCKET, 1 << (size - 1).bit_length()) if size > 0 else SMALLEST_BUCKET


def make_request(
    model: SpeculativeModel,
    prompts: Prompts,
    prompt_lengths: Any,
    max_new_tokens: int,
    num_draft_tokens: int | None,
    cache: CacheOptions,
) -> Request:
    """Checks and lays out a decoding call.

    Raises:
        RequestError: prompts that are empty, too long or hold ids outside the vocabulary; a
            negative budget; more draft tokens than zero without a draft.
        CapacityError: `cache.num_pages` do not hold the rows.
    """
    if max_new_tokens < 0:
        raise RequestError(f"max_new_tokens={max_new_tokens}; 0 or more is needed")
    g = choose_num_draft_tokens(model, num_draft_tokens)
    tokens, lengths = pad_prompts(prompts, prompt_lengths, model.config)
    num_rows = tokens.shape[0]
    tokens, lengths, budgets, is_context_bound = _plan_rows(model, tokens, lengths, max_new_tokens)
    new_bucket = bucket(max_new_tokens)
    ends = None
    if cache.num_pages is not None:
        if isinstance(lengths, Tracer):
            raise RequestError(
                "CacheOptions.num_pages needs concrete prompt lengths; leave it None under jit"
            )
        ends = np.asarray(lengths) + np.asarray(budgets) + g + 1
    return Request(
        prompts=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths),
        budgets=jnp.asarray(budgets),
        is_context_bound=jnp.asarray(is_context_bound),
        pages=make_page_tables(
            model.config.cache_ratios,
            len(tokens),
            tokens.shape[1] + new_bucket + g + 1,
            cache,
            model.execution.num_data_shards,
            ends,
        ),
        num_rows=num_rows,
        max_new_tokens=new_bucket,
        num_draft_tokens=g,
    )


def choose_num_draft_tokens(model: SpeculativeModel, num_draft_tokens: int | None) -> int:
    """Tokens drafted a round: by default one for each draft layer, none without a draft."""
    if num_draft_tokens is None:
        return 0 if model.draft is None else model.draft.default_num_draft_tokens
    if num_draft_tokens < 0:
        raise RequestError(f"num_draft_tokens={num_draft_tokens}; 0 or more is needed")
    if num_draft_tokens and model.draft is None:
        raise RequestError(
            f"num_draft_tokens={num_draft_tokens}, but the model was loaded without a draft"
        )
    return num_draft_tokens


def pad_prompts(prompts: Prompts, prompt_lengths: Any, config: ModelConfig) -> tuple[Any, Any]:
    """Prompts as int32 `[b, bucket]` and `[b]`; NumPy where the values are concrete.

    Raises:
        RequestError: see `make_request`.
    """
    if isinstance(prompts, np.ndarray | jax.Array):
        if prompts.ndim != 2 or not jnp.issubdtype(prompts.dtype, jnp.integer):
            raise RequestError(
                f"prompts: {prompts.dtype}{list(prompts.shape)}; integer ids [b, t] are needed"
            )
        b, t = prompts.shape
        lengths = jnp.full(b, t) if prompt_lengths is None else prompt_lengths
    else:
        if prompt_lengths is not None:
            raise RequestError("prompt_lengths goes with an array of prompts, not with a list")
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        b, t = len(prompts), int(lengths.max(initial=0))
    if b == 0 or t == 0:
        raise RequestError(
            f"prompts: {b} rows of {t} tokens; at least one row of one token is needed"
        )
    if any(isinstance(x, Tracer) for x in (prompts, lengths)):
        padded = jnp.zeros((b, bucket(t)), jnp.int32).at[:, :t].set(jnp.asarray(prompts, jnp.int32))
        return padded, jnp.asarray(lengths, jnp.int32)
    lengths = np.asarray(lengths, np.int32)
    if lengths.shape != (b,) or lengths.max() > t:
        raise RequestError(
            f"prompt_lengths: {lengths.tolist()}; one of 1 to {t} for each of {b} rows is needed"
        )
    padded = np.zeros((b, bucket(t)), np.int32)
    for row, prompt in enumerate(
        np.asarray(prompts) if isinstance(prompts, jax.Array) else prompts
    ):
        padded[row, : lengths[row]] = _checked_ids(prompt, int(lengths[row]), row, config)
    return padded, lengths


def _checked_ids(prompt: Any, length: int, row: int, config: ModelConfig) -> np.ndarray:
    """A row's ids, each inside the vocabulary."""
    if length < 1:
        raise RequestError(f"prompts: row {row} is empty; a prompt has at least one token")
    if length >= config.max_position_embeddings:
        raise RequestError(
            f"prompts: row {row} has {length} tokens; the model's context is "
            f"{config.max_position_embeddings}, one of them for an answer"
        )
    ids = np.asarray(prompt[:length], np.int64)
    check_ids(ids, config.vocab_size, f"prompts: row {row}")
    return ids


def check_ids(ids: Any, vocab_size: int, where: str = "tokens") -> None:
    """Refuses ids outside the vocabulary, which an indexed read would clamp or wrap without a word.

    Raises:
        RequestError: names the first such id.
    """
    ids = np.asarray(ids)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise RequestError(f"{where} holds id {outside[0]}; ids are 0 to {vocab_size - 1}")


def _plan_rows(model: SpeculativeModel, tokens: Any, lengths: Any, max_new_tokens: int):
    """Adds rows up to a multiple of the data shards, and gives each row its budget."""
    xp = jnp if isinstance(lengths, Tracer) else np
    num_added = -len(tokens) % model.execution.num_data_shards
    tokens = xp.pad(tokens, ((0, num_added), (0, 0)))
    room = model.config.max_position_embeddings - lengths
    budgets = xp.pad(xp.minimum(room, max_new_tokens), (0, num_added)).astype(np.int32)
    is_context_bound = xp.pad(room < max_new_tokens, (0, num_added))
    lengths = xp.pad(lengths, (0, num_added), constant_values=1)
    return tokens, lengths, budgets, is_context_bound
