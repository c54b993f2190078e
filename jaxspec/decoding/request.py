"""A decoding call, laid out: padded arrays, page tables and bucketed sizes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxspec.cache.pages import CacheOptions, PageTables, make_page_tables
from jaxspec.decoding.prompts import Prompts, bucket, end_tokens, pad_prompts, whole_number
from jaxspec.decoding.sampling import Sampling
from jaxspec.errors import RequestError
from jaxspec.model import SpeculativeModel


@dataclasses.dataclass(frozen=True)
class Request:
    """A decoding call, ready to run. Sizes are buckets, so that similar calls share a program.

    Attributes:
        prompts: int32 `[b, bucket]`, b a multiple of the data shards.
        lengths: int32 `[b]`; prompt tokens of each row. Added rows have one token and no budget.
        budgets: int32 `[b]`; tokens that each row may emit.
        is_context_bound: bool `[b]`; whether the model's context, not the caller, sets the budget.
        pages: which pages each row has.
        eos_token_ids: int32 `[num_eos]`.
        num_rows: rows that the caller asked for; the first ones.
        max_new_tokens: the bucket that holds the largest budget; no row outgrows the context.
        num_draft_tokens: tokens drafted a round; 0 is plain decoding.
        sampling: the law that tokens are chosen from.
        options: of the cache.
    """

    prompts: jax.Array
    lengths: jax.Array
    budgets: jax.Array
    is_context_bound: jax.Array
    pages: PageTables
    eos_token_ids: jax.Array
    num_rows: int
    max_new_tokens: int
    num_draft_tokens: int
    sampling: Sampling
    options: CacheOptions

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The traced arguments of `start`, in its order."""
        return (
            self.prompts,
            self.lengths,
            self.budgets,
            self.is_context_bound,
            self.pages,
            self.eos_token_ids,
        )


def make_request(
    model: SpeculativeModel,
    prompts: Prompts,
    prompt_lengths: Any = None,
    max_new_tokens: Any = 0,
    num_draft_tokens: Any = None,
    sampling: Sampling | None = None,
    eos_token_ids: Any = None,
    cache: CacheOptions | None = None,
) -> Request:
    """Checks and lays out a decoding call.

    Raises:
        RequestError: prompts that are empty, too long or hold ids outside the vocabulary; a
            negative budget; drafted tokens without a draft.
        CapacityError: `cache.num_pages` do not hold the rows.
    """
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
    g = choose_num_draft_tokens(model, num_draft_tokens)
    sampling, cache = sampling or Sampling(), cache or CacheOptions()
    if not isinstance(sampling, Sampling) or not isinstance(cache, CacheOptions):
        raise RequestError("sampling takes a jaxspec.Sampling, cache a jaxspec.CacheOptions")
    tokens, lengths = pad_prompts(prompts, prompt_lengths, model.config)
    eos = end_tokens(eos_token_ids, model.config)
    num_rows = tokens.shape[0]
    tokens, lengths, budgets, is_context_bound = _plan_rows(model, tokens, lengths, max_new_tokens)
    context = model.config.max_position_embeddings
    new_bucket = bucket(min(max_new_tokens, context))
    num_positions = min(tokens.shape[1] + new_bucket, max(tokens.shape[1], context))
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
            num_positions + g + 1,
            cache,
            model.execution.num_data_shards,
            ends,
        ),
        eos_token_ids=jnp.asarray(eos, jnp.int32).reshape(-1),
        num_rows=num_rows,
        max_new_tokens=new_bucket,
        num_draft_tokens=g,
        sampling=sampling,
        options=cache,
    )


def choose_num_draft_tokens(model: SpeculativeModel, num_draft_tokens: Any) -> int:
    """Tokens drafted a round: by default one for each draft layer, none without a draft."""
    if num_draft_tokens is None:
        return 0 if model.draft is None else model.draft.default_num_draft_tokens
    g = whole_number("num_draft_tokens", num_draft_tokens)
    if g and model.draft is None:
        raise RequestError(f"num_draft_tokens={g}, but the model was loaded without a draft")
    return g


def _plan_rows(model: SpeculativeModel, tokens: Any, lengths: Any, max_new_tokens: int):
    """Adds rows up to a multiple of the data shards, and gives each row its budget."""
    is_traced = isinstance(tokens, Tracer) or isinstance(lengths, Tracer)
    xp = jnp if is_traced else np
    num_added = -len(tokens) % model.execution.num_data_shards
    tokens = xp.pad(tokens, ((0, num_added), (0, 0)))
    room = xp.maximum(model.config.max_position_embeddings - lengths, 0)
    budgets = xp.pad(xp.minimum(room, max_new_tokens), (0, num_added)).astype(np.int32)
    is_context_bound = xp.pad(room < max_new_tokens, (0, num_added))
    lengths = xp.pad(lengths, (0, num_added), constant_values=1)
    return tokens, lengths, budgets, is_context_bound
