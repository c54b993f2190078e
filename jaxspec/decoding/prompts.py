"""Prompts as users give them, checked and padded on the host."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxspec.config import ModelConfig
from jaxspec.errors import RequestError

Prompts = Sequence[Sequence[int]] | np.ndarray | jax.Array

SMALLEST_BUCKET = 16


def bucket(size: int) -> int:
    """The next power of two, 16 at least."""
    return max(SMALLEST_BUCKET, 1 << max(size - 1, 0).bit_length())


def pad_prompts(prompts: Prompts, prompt_lengths: Any, config: ModelConfig) -> tuple[Any, Any]:
    """Prompts as int32 `[b, bucket]` and `[b]`; NumPy where the values are concrete.

    Raises:
        RequestError: no or empty prompts, more tokens than the context, ids outside the vocabulary,
            anything that is not integers.
    """
    if isinstance(prompts, Tracer) or isinstance(prompt_lengths, Tracer):
        array = jnp.asarray(prompts)
        _check_array("prompts", array, 2)
        b, t = array.shape
        if prompt_lengths is None or not isinstance(prompt_lengths, Tracer):
            lengths = _concrete_lengths(prompt_lengths, b, t)
            for index, length in enumerate(lengths):
                _check_length(int(length), f"prompts: row {index}", config)
            prompt_lengths = lengths
        padded = jnp.zeros((b, bucket(t)), jnp.int32).at[:, :t].set(array.astype(jnp.int32))
        return padded, jnp.asarray(prompt_lengths, jnp.int32)
    rows = _rows(prompts, prompt_lengths)
    if not rows:
        raise RequestError("prompts: no rows; at least one is needed")
    for index, row in enumerate(rows):
        _check_row(row, f"prompts: row {index}", config)
    padded = np.zeros((len(rows), bucket(max(map(len, rows)))), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded, np.array([len(row) for row in rows], np.int32)


def _rows(prompts: Any, prompt_lengths: Any) -> list[np.ndarray]:
    """One array of ids a prompt."""
    if isinstance(prompts, np.ndarray | jax.Array):
        array = np.asarray(prompts)
        _check_array("prompts", array, 2)
        lengths = _concrete_lengths(prompt_lengths, *array.shape)
        return [row[:length] for row, length in zip(array, lengths, strict=True)]
    if prompt_lengths is not None:
        raise RequestError("prompt_lengths goes with an array of prompts, not with a list")
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        raise RequestError(
            f"prompts: {type(prompts).__name__}; lists of token ids, or an array [b, t], are needed"
        )
    return [np.asarray(row) if len_of(row) else np.zeros(0, np.int32) for row in prompts]


def _concrete_lengths(prompt_lengths: Any, b: int, t: int) -> np.ndarray:
    """Tokens of each of b rows of t."""
    if prompt_lengths is None:
        return np.full(b, t)
    lengths = np.asarray(prompt_lengths)
    _check_array("prompt_lengths", lengths, 1)
    if len(lengths) != b or (lengths > t).any() or (lengths < 1).any():
        raise RequestError(
            f"prompt_lengths: {lengths.tolist()}; one of 1 to {t} for each of {b} rows is needed"
        )
    return lengths


def len_of(row: Any) -> int:
    """Tokens of one prompt."""
    if isinstance(row, str | bytes) or not hasattr(row, "__len__"):
        raise RequestError(f"prompts: a row is {row!r:.40}; each is a list of token ids")
    return len(row)


def _check_array(name: str, array: Any, ndim: int) -> None:
    if array.ndim != ndim or not jnp.issubdtype(array.dtype, jnp.integer) or 0 in array.shape:
        needed = "integers [b]" if ndim == 1 else "integer ids [b, t]"
        raise RequestError(f"{name}: {array.dtype}{list(array.shape)}; {needed} are needed")


def _check_row(row: np.ndarray, where: str, config: ModelConfig) -> None:
    _check_length(len(row), where, config)
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise RequestError(f"{where} holds {row.dtype}{list(row.shape)}; integer ids are needed")
    check_ids(row, config.vocab_size, where)


def _check_length(length: int, where: str, config: ModelConfig) -> None:
    if length < 1:
        raise RequestError(f"{where} is empty; a prompt has at least one token")
    if length >= config.max_position_embeddings:
        raise RequestError(
            f"{where} has {length} tokens; the model's context is "
            f"{config.max_position_embeddings}, one of them for an answer"
        )


def check_ids(ids: Any, vocab_size: int, where: str) -> None:
    """Refuses ids outside the vocabulary, which an indexed read would clamp or wrap without a word.

    Raises:
        RequestError: names the first such id.
    """
    ids = np.asarray(ids)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise RequestError(f"{where} holds id {outside[0]}; ids are 0 to {vocab_size - 1}")


def whole_number(name: str, value: Any, smallest: int = 0) -> int:
    """The value as an int.

    Raises:
        RequestError: it is not a whole number, or below `smallest`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < smallest:
        raise RequestError(f"{name}={value!r}; a whole number of at least {smallest} is needed")
    return number


def end_tokens(eos_token_ids: Any, config: ModelConfig) -> Any:
    """The ids that end a row; None is the config's.

    Raises:
        RequestError: not a sequence of ids, or one outside the vocabulary.
    """
    if eos_token_ids is None:
        return config.eos_token_ids
    if isinstance(eos_token_ids, np.ndarray | jax.Array):
        _check_array("eos_token_ids", eos_token_ids, 1)
        if isinstance(eos_token_ids, Tracer):
            return eos_token_ids
        eos_token_ids = np.asarray(eos_token_ids).tolist()
    if not isinstance(eos_token_ids, Sequence | set | frozenset) or isinstance(eos_token_ids, str):
        raise RequestError(f"eos_token_ids={eos_token_ids!r}; a sequence of token ids is needed")
    ids = tuple(whole_number("eos_token_ids: id", token) for token in eos_token_ids)
    check_ids(ids, config.vocab_size, "eos_token_ids")
    return ids
