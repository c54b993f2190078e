"""Prompts and results of the decoding tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import jaxspec

LENGTHS = (5, 1, 17, 16, 2, 9, 15, 8)
"""Prompt lengths of a batch: on both sides of a page's and a bucket's edge."""

VOCAB = 96


def prompts(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def rows(result: jaxspec.Result) -> list[list[int]]:
    """The tokens of each row, checked to be padded behind them."""
    out = []
    for tokens, length in zip(np.asarray(result.tokens), np.asarray(result.lengths), strict=True):
        assert (tokens[length:] == result.pad_token_id).all()
        out.append(tokens[:length].tolist())
    return out


def generate(model: Any, prompts: Any, max_new_tokens: int, **options: Any) -> jaxspec.Result:
    """`jaxspec.generate` without end tokens, unless `options` name some."""
    options = {"eos_token_ids": (), **options}
    return jaxspec.generate(model, prompts, max_new_tokens=max_new_tokens, **options)
