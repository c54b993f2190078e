"""Which drafted tokens stand, and how many tokens a row commits."""

import enum

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class FinishReason(enum.IntEnum):
    """Why a row stopped."""

    RUNNING = 0
    END_TOKEN = 1
    BUDGET = 2
    CONTEXT = 3


def count_accepted(
    draft_tokens: Int[Array, "b g"], target_tokens: Int[Array, "b g_plus_1"]
) -> Int[Array, " b"]:
    """Greedy verification: the length of the drafted prefix that equals the target's own choice.

    `target_tokens[:, i]` is the target's token after `i` drafted ones, so its first
    `num_accepted + 1` are what plain decoding would have produced.
    """
    agrees = draft_tokens == target_tokens[:, :-1]
    return jnp.cumprod(agrees, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)


def commit(
    tokens: Int[Array, "b t"],
    num_tokens: Int[Array, " b"],
    remaining: Int[Array, " b"],
    eos_token_ids: Int[Array, " num_eos"],
) -> tuple[Int[Array, " b"], Bool[Array, " b"]]:
    """How many of the first `num_tokens` a row takes, and whether it took an end token.

    A row takes no more than `remaining`, and nothing after its first end token, which it takes.
    """
    is_end = (tokens[..., None] == eos_token_ids[None, None]).any(axis=-1)
    limit = jnp.minimum(num_tokens, remaining)
    is_end &= jnp.arange(tokens.shape[1])[None] < limit[:, None]
    first_end = jnp.argmax(is_end, axis=1).astype(jnp.int32)
    ended = is_end.any(axis=1)
    return jnp.where(ended, first_end + 1, limit), ended


def select_token(tokens: Int[Array, "b t"], index: Int[Array, " b"]) -> Int[Array, " b"]:
    """tokens[b, index[b]]."""
    return jnp.take_along_axis(tokens, index[:, None], axis=1)[:, 0]
