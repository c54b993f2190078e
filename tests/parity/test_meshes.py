"""Eight devices give what one gives, on every mesh that divides; on others the load is refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.layers.moe import MLP, MoE
from tests import models
from tests.decoding import texts

# 8 heads, 8 experts and 96 words divide by 8; FP8 blocks of 128 are cut through by most meshes.
MODEL: dict[str, Any] = {"num_attention_heads": 8, "num_hidden_layers": 2}
TOKENS = np.random.default_rng(5).integers(0, 96, (3, 40))


@functools.cache
def logits(quantized: bool, mesh_shape: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Target's and draft's logits of three rows, which most data axes do not divide."""
    model = models.load("v3", mesh_shape=mesh_shape, quantized=quantized, **MODEL)
    tokens = jnp.asarray(TOKENS)
    outputs = jaxspec.target_logits(model, tokens), jaxspec.draft_logits(model, tokens)
    return np.asarray(outputs[0]), np.asarray(outputs[1])


@pytest.mark.parametrize(
    "quantized, mesh_shape",
    [
        (True, (8, 1)),
        (True, (2, 4)),
        (True, (1, 8)),
        pytest.param(True, (4, 2), marks=pytest.mark.slow),
        pytest.param(False, (1, 8), marks=pytest.mark.slow),
        pytest.param(False, (2, 4), marks=pytest.mark.slow),
    ],
)
def test_logits(quantized, mesh_shape):
    for got, want in zip(logits(quantized, mesh_shape), logits(quantized, None), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, atol=2e-4)


def test_weights_lie_on_their_devices():
    """Heads, experts, vocabulary and width are cut over `model`; nothing large is replicated."""
    model = models.load("v3", mesh_shape=(2, 4), quantized=True, **MODEL)
    attention, mlp = model.target.layers[1].self_attn, model.target.layers[1].mlp
    dense = model.target.layers[0].mlp
    assert isinstance(mlp, MoE) and isinstance(dense, MLP)
    cut = {
        "q_b_proj": (attention.q_b_proj.weight.get_value().values, 0),
        "kv_b_proj": (attention.kv_b_proj.weight.get_value().values, 0),
        "o_proj": (attention.o_proj.weight.get_value().values, 1),
        "experts": (mlp.experts.down_proj.weight.get_value().values, 0),
        "dense": (dense.gate_proj.weight.get_value().values, 0),
        "embedding": (model.target.embed_tokens.weight.get_value(), 0),
        "head": (model.target.lm_head.weight.get_value(), 0),
    }
    for name, (array, axis) in cut.items():
        local = array.sharding.shard_shape(array.shape)
        assert local[axis] * 4 == array.shape[axis], f"{name}: {local} of {array.shape}"


@pytest.mark.parametrize("mesh_shape", [(4, 2), pytest.param((8, 1), marks=pytest.mark.slow)])
def test_text(mesh_shape):
    """Five rows are padded to eight; text and counters are one device's."""
    options = {"draft": "half", "branch_gain": 5.0, "num_hidden_layers": 2}
    prompts = texts.prompts(texts.LENGTHS[:5])
    results = [
        texts.generate(
            models.load("perm", mesh_shape=shape, **options),
            prompts,
            24,
            num_draft_tokens=2,
            eos_token_ids=(3, 50),
        )
        for shape in (None, mesh_shape)
    ]
    one, many = results
    assert many.tokens.shape == (5, 24)
    assert texts.rows(many) == texts.rows(one)
    assert many.stats.accepted.tolist() == one.stats.accepted.tolist()
    assert many.finish_reason.tolist() == one.finish_reason.tolist()


def test_pages_of_a_pool_are_each_data_shards_own():
    options = {"draft": "half", "branch_gain": 5.0, "num_hidden_layers": 2}
    model = models.load("perm", mesh_shape=(4, 2), **options)
    prompts = texts.prompts(texts.LENGTHS[:5])
    cache = jaxspec.CacheOptions(page_size=16, num_pages=4 * 7)
    got = texts.generate(model, prompts, 24, num_draft_tokens=2, eos_token_ids=(3, 50), cache=cache)
    want = texts.generate(
        models.load("perm", **options), prompts, 24, num_draft_tokens=2, eos_token_ids=(3, 50)
    )
    assert texts.rows(got) == texts.rows(want)


@pytest.mark.parametrize(
    "overrides, mesh_shape, message",
    [
        ({}, (1, 8), r"axis 'model' of size 8 does not divide num_attention_heads \(4 heads\)"),
        ({"vocab_size": 98}, (2, 4), r"axis 'model' of size 4 does not divide .*\(98 vocab\)"),
        ({"n_routed_experts": 6, "n_group": 3}, (2, 4), r"size 4 does not divide .*\(6 experts\)"),
        ({"intermediate_size": 130}, (2, 4), r"size 4 does not divide .*\(130 width\)"),
    ],
    ids=["heads", "vocabulary", "experts", "width"],
)
def test_a_mesh_that_does_not_divide_is_refused(overrides, mesh_shape, message):
    with pytest.raises(jaxspec.MeshError, match=message):
        models.load("v3", mesh_shape=mesh_shape, num_hidden_layers=2, **overrides)


def test_three_devices_are_refused():
    with pytest.raises(jaxspec.MeshError, match="axis 'model' of size 3"):
        models.load("v3", mesh_shape=(1, 3), **MODEL)


def test_an_axis_of_another_name_is_refused():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    with pytest.raises(
        jaxspec.MeshError, match="axis 'tensor' is not known; use 'data' and 'model'"
    ):
        jaxspec.load(models.checkpoint("v3", quantized=True, **MODEL), mesh=mesh)
