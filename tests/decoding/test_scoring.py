"""Teacher-forced logits against float64, their gradient, and single proposals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspec
from tests import models
from tests.decoding import texts
from tests.numpy_reference import Reference

SIZE = {"num_hidden_layers": 2}
TOKENS = texts.prompts([62])[0]
YARN = {
    "unequal mscales": {"mscale": 0.7, "mscale_all_dim": 1.0},
    "equal mscales": {},
    "no scaling": {"rope_scaling": None},
}


@pytest.mark.parametrize("yarn", YARN)
def test_logits_at_far_positions(yarn):
    """D17: position 0 alone proves nothing about YaRN; 32 is where the original context ends."""
    options = {**SIZE, **YARN[yarn]}
    logits = jaxspec.target_logits(models.load("v3", **options), jnp.array([TOKENS]))
    want = Reference(models.source("v3", **options)).target(TOKENS).logits
    for position in (0, 1, 31, 32, 60):
        np.testing.assert_allclose(logits[0, position], want[position], atol=1e-4)


def test_yarn_settings_matter():
    """The settings above give different logits, so that the test can tell them apart."""
    logits = [
        Reference(models.source("v3", **SIZE, **options)).target(TOKENS).logits
        for options in YARN.values()
    ]
    for i, j in ((0, 1), (1, 2), (0, 2)):
        assert np.abs(logits[i] - logits[j])[[1, 31, 32, 60]].max(-1).min() > 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {"q_lora_rank": None},
        {"quantized": True},
        {"quantized": True, "weight_block_size": (64, 32)},
        {"num_nextn_predict_layers": 0, "first_k_dense_replace": 0, "n_shared_experts": 2},
    ],
    ids=["direct queries", "ragged blocks", "small blocks", "no dense layer, no draft"],
)
def test_other_shapes_of_the_family(options):
    """D10 among them: 192 rows of kv_a are one whole and one partial block."""
    options = {**SIZE, **options}
    model, reference = models.load("v3", **options), Reference(models.source("v3", **options))
    want = reference.target(TOKENS)
    logits = jaxspec.target_logits(model, jnp.array([TOKENS]))
    np.testing.assert_allclose(logits[0], want.logits, atol=2e-4)
    if model.draft is not None:
        draft = reference.draft(TOKENS[1:], want.post_norm[:-1])
        logits = jaxspec.draft_logits(model, jnp.array([TOKENS]))
        np.testing.assert_allclose(logits[0], draft.logits, atol=2e-4)


def test_rows_of_a_batch_are_scored_alone():
    model = models.load("v3", **SIZE)
    batch = jnp.array([TOKENS, TOKENS[::-1], TOKENS])
    logits = jaxspec.target_logits(model, batch)
    np.testing.assert_allclose(logits[0], logits[2], atol=1e-6)
    want = jaxspec.target_logits(model, batch[1:2])
    np.testing.assert_allclose(logits[1], want[0], atol=1e-5)


def test_proposals_are_the_references():
    """Prompts of unlike lengths in one call; the first row of two tokens has one known state."""
    prompts = texts.prompts([2, 17, 9])
    proposal = jaxspec.propose(models.load("v3", **SIZE), prompts, num_draft_tokens=3)
    reference = Reference(models.source("v3", **SIZE))
    for row, prompt in enumerate(prompts):
        np.testing.assert_allclose(proposal.logits[row], reference.chain(prompt, 3), atol=2e-4)
    assert proposal.tokens.tolist() == proposal.logits.argmax(-1).tolist()
    assert proposal.confidence is None


PARAMETERS = [
    "layers/0/self_attn/q_b_proj/weight",
    "layers/1/self_attn/kv_b_proj/weight",
    "layers/1/mlp/experts/up_proj/weight",
    "layers/1/mlp/gate/weight",
]


def test_gradient_is_the_finite_difference():
    """One weight of each kind, in float32 so that a small step is representable."""
    model = models.load("v3", **SIZE)
    tokens = jnp.array([TOKENS[:24]])
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda x: x.astype(jnp.float32), state)

    def loss(state):
        logits = jaxspec.target_logits(nnx.merge(graph, state), tokens)
        return -jnp.take_along_axis(
            jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], 2
        ).mean()

    value = jax.jit(loss)
    gradient = jax.jit(jax.grad(loss))(state)
    leaves = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(gradient)}
    assert all(bool(jnp.isfinite(leaf.get_value()).all()) for leaf in leaves.values())
    weights = {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    for name in PARAMETERS:
        slope = np.asarray(leaves[f"target/{name}"].get_value())
        place = np.unravel_index(np.argmax(np.abs(slope)), slope.shape)
        weight = weights[f"target/{name}"]
        kept, step, sides = weight.get_value(), 1e-2, []
        for sign in (1, -1):
            weight.set_value(kept.at[place].add(sign * step))
            sides.append(float(value(state)))
        weight.set_value(kept)
        np.testing.assert_allclose((sides[0] - sides[1]) / (2 * step), slope[place], rtol=0.05)
