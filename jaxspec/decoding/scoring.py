"""The parts of `generate` on their own: teacher-forced logits of both models, one proposal."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.pages import CacheOptions, PageTables, make_page_tables
from jaxspec.decoding.prefill import absorb_prompts
from jaxspec.decoding.prompts import Prompts, check_ids
from jaxspec.decoding.request import choose_num_draft_tokens, make_request
from jaxspec.decoding.sampling import Sampling
from jaxspec.drafts.draft import Draft, Proposal
from jaxspec.errors import RequestError
from jaxspec.model import SpeculativeModel
from jaxspec.models.target import Logits


def target_logits(model: SpeculativeModel, tokens: Int[Array, "b t"]) -> Float[Array, "b t w"]:
    """The target's float32 logits, teacher forced; row i is its law of token i + 1.

    Differentiable with respect to the model's floating-point parameters.

    Raises:
        RequestError: ids outside the vocabulary, no tokens, or more than the model's context.
    """
    padded = _checked(model, tokens)
    return _target_logits(model, padded)[: len(tokens)]


def draft_logits(
    model: SpeculativeModel, tokens: Int[Array, "b t"]
) -> Float[Array, "b t_minus_1 w"]:
    """The draft's float32 logits, teacher forced; row i is its law of token i + 2.

    Raises:
        RequestError: as `target_logits`; fewer than two tokens; a model without a draft.
    """
    require_draft(model, "draft_logits")
    padded = _checked(model, tokens)
    if padded.shape[1] < 2:
        raise RequestError("draft_logits: one token; the draft's first row needs two")
    return _draft_logits(model, padded)[: len(tokens)]


def propose(
    model: SpeculativeModel,
    prompts: Prompts,
    num_draft_tokens: int | None = None,
    sampling: Sampling | None = None,
    key: jax.Array | None = None,
    *,
    prompt_lengths: Any = None,
) -> Proposal:
    """What the draft proposes behind each prompt, whose last token is the anchor.

    The draft knows the target's states of the positions before the anchor.

    Raises:
        RequestError: as `generate`; a prompt of one token, which has no state before its anchor.
    """
    require_draft(model, "propose")
    g = choose_num_draft_tokens(model, num_draft_tokens)
    if g == 0:
        raise RequestError("propose: num_draft_tokens=0; at least 1 is needed")
    request = make_request(model, prompts, prompt_lengths, 0, g, sampling)
    lengths = request.lengths[: request.num_rows]
    if not isinstance(lengths, Tracer) and lengths.min() < 2:
        raise RequestError("propose: a prompt of one token has no target state before its anchor")
    proposal = _propose(
        model,
        request.prompts,
        request.lengths,
        request.pages,
        num_draft_tokens=g,
        sampling=request.sampling,
        options=request.options,
    )
    return jax.tree.map(lambda x: x[: request.num_rows], proposal)


def require_draft(model: SpeculativeModel, op: str) -> Draft:
    """The model's draft.

    Raises:
        RequestError: it was loaded without one.
    """
    if model.draft is None:
        raise RequestError(f"{op}: the model was loaded without a draft")
    return model.draft


@functools.partial(jax.jit, static_argnames=("num_draft_tokens", "sampling", "options"))
def _propose(model, prompts, lengths, pages, *, num_draft_tokens, sampling, options):
    known = lengths - 1
    _, drafting, anchor = absorb_prompts(
        model, prompts, known, pages,
        num_draft_tokens=num_draft_tokens, sampling=None, options=options,
    )  # fmt: skip
    assert drafting is not None  # `propose` has refused a model without a draft.
    _, proposal = model.draft.propose(
        model.shared, *drafting, anchor, known, known > 0,
        num_draft_tokens=num_draft_tokens, sampling=sampling, key=None,
    )  # fmt: skip
    return proposal


@jax.jit
def _target_logits(model, tokens):
    logits, _, _ = _forward(model, tokens, "all")
    return logits


@jax.jit
def _draft_logits(model, tokens):
    _, captured, _ = _forward(model, tokens[:, :-1], None)
    b, t = captured.shape[:2]
    draft: Any = model.draft  # NextN and MTP have rows to score.
    cache = draft.empty_cache(b, 1, *_whole_pages(model, b, t))
    hidden, _ = draft.forward(
        model.shared, cache, tokens[:, 1:], _positions(captured), captured, _all_valid(captured)
    )
    return draft.logits(model.shared, hidden)


def _forward(model: SpeculativeModel, tokens: Int[Array, "b t"], logits: Logits):
    """The target over whole sequences, with a cache of one page a row."""
    cache = model.target.empty_cache(len(tokens), 1, *_whole_pages(model, *tokens.shape))
    return model.target.forward(tokens, _positions(tokens), cache, _all_valid(tokens), logits)


def _whole_pages(model: SpeculativeModel, b: int, t: int) -> tuple[PageTables, CacheOptions]:
    options = CacheOptions(page_size=t)
    shards = model.execution.num_data_shards
    return make_page_tables(model.config.cache_ratios, b, t, options, shards), options


def _positions(x: jax.Array) -> Int[Array, "b t"]:
    return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])


def _all_valid(x: jax.Array) -> Bool[Array, "b t"]:
    return jnp.ones(x.shape[:2], jnp.bool_)


def _checked(model: SpeculativeModel, tokens: Any) -> jax.Array:
    """The tokens as int32 `[b, t]`, padded to whole data shards."""
    tokens = tokens if isinstance(tokens, Tracer) else _as_array(tokens)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.size == 0:
        raise RequestError(
            f"tokens: {tokens.dtype}{list(tokens.shape)}; integer ids [b, t] are needed"
        )
    if tokens.shape[1] > model.config.max_position_embeddings:
        raise RequestError(
            f"tokens: {tokens.shape[1]} positions; the model's context is "
            f"{model.config.max_position_embeddings}"
        )
    if not isinstance(tokens, Tracer):
        check_ids(tokens, model.config.vocab_size, "tokens")
    padding = -len(tokens) % model.execution.num_data_shards
    return jnp.pad(jnp.asarray(tokens).astype(jnp.int32), ((0, padding), (0, 0)))


def _as_array(tokens: Any) -> np.ndarray:
    """Concrete tokens on the host, where ids are compared in their own width."""
    try:
        return np.asarray(tokens)
    except ValueError as error:
        raise RequestError(
            "tokens: rows of different lengths; an array [b, t] is needed"
        ) from error
