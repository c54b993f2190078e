"""What a caller can get wrong is refused with one clear line, before anything runs."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from tests import models

CALLS = {
    "generate": lambda model, prompts: jaxspec.generate(model, prompts, max_new_tokens=4),
    "stream": lambda model, prompts: jaxspec.stream(model, prompts, max_new_tokens=4),
    "propose": jaxspec.propose,
}
LOGITS = {"target": jaxspec.target_logits, "draft": jaxspec.draft_logits}


def load():
    return models.load("perm", draft="perfect", num_hidden_layers=2)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("token", [-1, 96, 10**9])
def test_ids_outside_the_vocabulary(call, token):
    """D20: an indexed read would clamp or wrap them without a word."""
    with pytest.raises(jaxspec.RequestError, match=rf"row 1 holds id {token}; ids are 0 to 95"):
        CALLS[call](load(), [[1, 2], [3, token, 4]])
    with pytest.raises(jaxspec.RequestError, match=rf"row 0 holds id {token}"):
        CALLS[call](load(), np.array([[1, token]]))


@pytest.mark.parametrize("call", LOGITS)
@pytest.mark.parametrize("token", [-1, 96])
def test_ids_outside_the_vocabulary_of_logits(call, token):
    with pytest.raises(jaxspec.RequestError, match=f"id {token}; ids are 0 to 95"):
        LOGITS[call](load(), jnp.array([[3, token, 4]]))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "prompts, message",
    [
        ([], "at least one is needed"),
        ([[]], "row 0 is empty"),
        ([[1, 2], []], "row 1 is empty"),
        ([[1, 2], [3] * 512], "row 1 has 512 tokens"),
        (np.zeros((2, 3)), "float64"),
        (np.zeros(3, np.int32), "integer ids"),
    ],
    ids=["no rows", "no tokens", "empty row", "too long", "floats", "one axis"],
)
def test_prompts_without_sense(call, prompts, message):
    with pytest.raises(jaxspec.RequestError, match=message):
        CALLS[call](load(), prompts)


@pytest.mark.parametrize("lengths", [[2], [0, 1], [4, 2], [-1, 2]])
def test_prompt_lengths_that_do_not_fit(lengths):
    with pytest.raises(jaxspec.RequestError):
        jaxspec.generate(load(), np.ones((2, 3), np.int32), prompt_lengths=lengths)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"num_draft_tokens": -1}, "num_draft_tokens=-1"),
        ({"prompt_lengths": [2]}, "prompt_lengths"),
        ({"draft_sampling": "best"}, "draft_sampling='best'"),
        ({"verification": "scheduled"}, "verification='scheduled'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_without_sense(options, message):
    for call in (jaxspec.generate, jaxspec.stream):
        with pytest.raises(jaxspec.RequestError, match=message):
            call(load(), [[1, 2]], **options)


@pytest.mark.parametrize("token", [-1, 96])
def test_end_tokens_outside_the_vocabulary(token):
    with pytest.raises(jaxspec.RequestError, match=str(token)):
        jaxspec.generate(load(), [[1, 2]], max_new_tokens=4, eos_token_ids=(token,))


def test_sampling_is_not_here_yet():
    with pytest.raises(NotImplementedError, match="temperature=0.5"):
        jaxspec.Sampling(temperature=0.5)


def test_proposals_need_a_state_before_the_anchor():
    with pytest.raises(jaxspec.RequestError, match="one token"):
        jaxspec.propose(load(), [[1, 2], [3]])
    with pytest.raises(jaxspec.RequestError, match="num_draft_tokens=0"):
        jaxspec.propose(load(), [[1, 2]], num_draft_tokens=0)
    with pytest.raises(jaxspec.RequestError, match="needs two"):
        jaxspec.draft_logits(load(), jnp.array([[1]]))


def test_logits_of_no_tokens_and_of_too_many():
    for call in LOGITS.values():
        for tokens in (np.zeros((1, 0), np.int32), np.zeros((1, 513), np.int32), np.zeros((1, 2))):
            with pytest.raises(jaxspec.RequestError, match="tokens"):
                call(load(), jnp.asarray(tokens))
