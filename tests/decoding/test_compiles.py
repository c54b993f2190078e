"""Lengths are bucketed: a program is compiled once a bucket, and `generate` works inside `jit`."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from tests import models
from tests.decoding import texts

EVENT = "/jax/core/compile/backend_compile_duration"
_compiled: list[float] = []


@pytest.fixture(scope="module", autouse=True)
def listen():
    def note(event: str, duration_secs: float, **_):
        if event == EVENT:
            _compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield
    jax.monitoring.unregister_event_duration_listener(note)


@contextlib.contextmanager
def compiles():
    """A list that holds the seconds of each program compiled meanwhile."""
    seen: list[float] = []
    start = len(_compiled)
    yield seen
    seen.extend(_compiled[start:])


def generate(prompts, new=317, draft="steered"):
    """Text that ends early although the maximum is odd and large."""
    source = models.perm(draft="steered", num_hidden_layers=2)
    ends = tuple(int(cycle[0]) for cycle in source.cycles)
    model = models.load("perm", draft=draft, num_hidden_layers=2)
    result = jaxspec.generate(
        model, prompts, max_new_tokens=new, num_draft_tokens=2, eos_token_ids=ends
    )
    return texts.rows(result)


def test_the_count_counts():
    x = jnp.arange(7)
    with compiles() as programs:
        jax.jit(lambda x: x * 3 + 17)(x).block_until_ready()
    assert len(programs) == 1


def test_one_program_a_bucket():
    """D41: prompts of 1 to 40 tokens; the first of a bucket compiles, no other does."""
    seen, batch = set(), 2
    for length in (1, 9, 16, 17, 32, 33, 40):
        bucket = max(16, 1 << (length - 1).bit_length())
        with compiles() as programs:
            generate(texts.prompts([length] + [1] * (batch - 1), seed=length))
        if bucket in seen:
            assert not programs, f"{length} tokens: {len(programs)} programs"
        seen.add(bucket)
    with compiles() as programs:
        for length in (40, 20, 5):
            generate(texts.prompts([length] + [2] * (batch - 1), seed=99))
    assert not programs


@pytest.mark.slow
def test_every_length_and_batch():
    """D41, exhaustively: two passes over prompts of 1 to 40 tokens and batches of 1 to 4."""
    for is_second_pass in (False, True):
        buckets = set()
        for batch in (1, 2, 3, 4):
            for length in range(1, 41):
                prompts = texts.prompts([max(1, length - row) for row in range(batch)], seed=length)
                with compiles() as programs:
                    generate(prompts)
                bucket = batch, max(16, 1 << (length - 1).bit_length())
                assert not programs or (bucket not in buckets and not is_second_pass)
                buckets.add(bucket)
        assert len(buckets) == 12


def test_checkpoints_share_the_program():
    """Another checkpoint of the same shapes compiles nothing."""
    generate(texts.prompts([9, 2]))
    generate(texts.prompts([9, 2]), draft="perfect")  # loads it
    with compiles() as programs:
        generate(texts.prompts([11, 3]), draft="perfect")
    assert not programs


def test_generate_inside_jit():
    """The user's program takes arrays with lengths; its text is that of the call outside."""
    model = models.load("perm", draft="half", branch_gain=5.0, num_hidden_layers=2)
    prompts = texts.prompts([5, 1, 16])
    lengths = jnp.array([5, 1, 16])
    # D20: inside `jit` the padding reaches the program as it is.
    array = np.resize(np.array([-7, 10**6], np.int32), (3, 16))
    for row, prompt in zip(array, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def run(model, array, lengths):
        return texts.generate(model, array, 16, prompt_lengths=lengths, num_draft_tokens=2)

    inside = run(model, jnp.asarray(array), lengths)
    outside = texts.generate(model, prompts, 16, num_draft_tokens=2)
    assert texts.rows(inside) == texts.rows(outside)
    assert inside.stats.accepted.tolist() == outside.stats.accepted.tolist()


def test_what_jit_cannot_do_is_said():
    model = models.load("perm", draft="half", branch_gain=5.0, num_hidden_layers=2)
    cache = jaxspec.CacheOptions(num_pages=8)

    @jax.jit
    def run(array, lengths):
        return texts.generate(model, array, 4, prompt_lengths=lengths, cache=cache).tokens

    with pytest.raises(jaxspec.RequestError, match="num_pages needs concrete prompt lengths"):
        run(jnp.ones((1, 4), jnp.int32), jnp.array([3]))
