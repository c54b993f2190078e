"""Checkpoints and models of the tests: each converted by the command and loaded once a session."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from convert import cli
from jaxspec.cache.pages import CacheOptions, make_page_tables
from tests import fixtures, fixtures_v4, golden_case

GOLDEN = ("v3_bf16", "v3_fp8", "v4_bf16", "v4_quant")
FIXTURES = {
    "v3": fixtures.v3,
    "perm": fixtures.v3_perm,
    "v4": fixtures_v4.v4,
    "v4_perm": fixtures_v4.v4_perm,
}


@functools.cache
def folder() -> Path:
    """A folder of this process, removed when it ends."""
    path = Path(tempfile.mkdtemp(prefix="jaxspec-tests-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def source(kind: str, **options: Any) -> fixtures.HFModel:
    """A golden case by its name, or what a function of `FIXTURES` makes of the options."""
    if kind in GOLDEN:
        return golden_case.checkpoint(kind)
    return FIXTURES[kind](**options)


def perm(kind: str = "perm", **options: Any) -> fixtures.PermModel:
    model = source(kind, **options)
    assert isinstance(model, fixtures.PermModel)
    return model


@functools.cache
def checkpoint(kind: str, **options: Any) -> Path:
    """The source of that name, converted."""
    name = "-".join([kind, *(f"{key}={value}" for key, value in options.items())])
    return convert(source(kind, **options), name)


def convert(model: fixtures.HFModel, name: str, *arguments: str) -> Path:
    """Writes and converts a model; `name` names the folders."""
    hf = model.write(folder() / "hf" / name)
    destination = folder() / "converted" / name
    destination.parent.mkdir(exist_ok=True)
    assert cli.main(["convert", str(hf), str(destination), *arguments]) == 0
    return destination


def mesh(data: int, model: int) -> jax.sharding.Mesh:
    return jax.make_mesh((data, model), ("data", "model"), devices=jax.devices()[: data * model])


@functools.cache
def load(
    kind: str,
    *,
    mesh_shape: tuple[int, int] | None = None,
    dtype: str = "float32",
    quantize_activations: bool = False,
    use_draft: Any = "auto",
    zero_first_embedding: bool | None = None,
    **options: Any,
) -> jaxspec.SpeculativeModel:
    """A loaded checkpoint, by default ready for exact comparison, on one device."""
    return jaxspec.load(
        checkpoint(kind, **options),
        mesh=mesh(*mesh_shape) if mesh_shape else None,
        dtype=dtype,
        quantize_activations=quantize_activations,
        draft=use_draft,
        zero_first_embedding=zero_first_embedding,
    )


def filled(cache: Any, value: float) -> Any:
    """The cache with `value` in every slot; its page tables stay."""
    return jax.tree.map(
        lambda x: jnp.full_like(x, value) if jnp.issubdtype(x.dtype, jnp.floating) else x, cache
    )


@dataclasses.dataclass
class Session:
    """One sequence of a model, fed call by call through target and draft with their own caches.

    The batch has as many equal rows as the mesh has data shards; row 0 is returned.
    """

    model: jaxspec.SpeculativeModel
    target_cache: Any
    draft_cache: Any

    @classmethod
    def start(
        cls,
        model: jaxspec.SpeculativeModel,
        capacity: int,
        *,
        fill: float = 0,
        max_block: int = 1,
    ) -> Session:
        """Empty caches of `capacity` positions a row, every slot holding `fill`.

        Args:
            max_block: tokens of a call of which some may be rejected, by calling from an earlier
                position next.
        """
        options = CacheOptions(page_size=16)
        shards = model.execution.num_data_shards
        pages = make_page_tables(model.config.cache_ratios, shards, capacity, options, shards)
        draft_cache = model.draft and model.draft.empty_cache(shards, max_block, pages, options)
        target_cache = model.target.empty_cache(shards, max_block, pages, options)
        return cls(model, filled(target_cache, fill), filled(draft_cache, fill))

    def target(self, tokens: Any, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Logits [t, w] and captured states [t, ...] of `tokens`, the first at position `start`."""
        inputs = self._rows(tokens), self._positions(len(tokens), start)
        logits, captured, self.target_cache = _target(self.model, *inputs, self.target_cache)
        return np.asarray(logits[0]), np.asarray(captured[0].astype(jnp.float32))

    def draft(self, next_tokens: Any, hidden: Any, start: int) -> tuple[np.ndarray, np.ndarray]:
        """The draft's logits [t, w] and states [t, ...] for `hidden` [t, ...]."""
        inputs = self._rows(next_tokens), self._positions(len(next_tokens), start)
        states = self._rows(jnp.asarray(hidden, self.model.execution.dtype))
        logits, own, self.draft_cache = _draft(self.model, *inputs, states, self.draft_cache)
        return np.asarray(logits[0]), np.asarray(own[0].astype(jnp.float32))

    def _rows(self, values: Any) -> jax.Array:
        values = jnp.asarray(values)
        return jnp.tile(values[None], (self.model.execution.num_data_shards, *[1] * values.ndim))

    def _positions(self, count: int, start: int) -> jax.Array:
        return self._rows(jnp.arange(start, start + count, dtype=jnp.int32))


@jax.jit
def _target(model, tokens, positions, cache):
    return model.target.forward(tokens, positions, cache, jnp.ones_like(tokens, bool))


@jax.jit
def _draft(model, tokens, positions, hidden, cache):
    valid = jnp.ones_like(tokens, bool)
    states, cache = model.draft.forward(model.shared, cache, tokens, positions, hidden, valid)
    return model.draft.logits(model.shared, states), states, cache
