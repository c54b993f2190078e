"""D15: the router against the scalar reference, where rules of dropped groups and biases show."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from jaxspec.config import DeepseekV3Config
from jaxspec.layers.moe import route
from tests import fixtures, numpy_reference

HF_CONFIG = fixtures.v3_config(num_experts_per_tok=3)
CONFIG = DeepseekV3Config.from_hf(HF_CONFIG)


def check(logits, bias, **overrides) -> list[list[int]]:
    """Ids and weights of every row are the reference's; returns the ids."""
    config = dataclasses.replace(CONFIG, **overrides)
    logits, bias = np.asarray(logits, np.float32), np.asarray(bias, np.float32)
    ids, weights = route(jnp.asarray(logits), jnp.asarray(bias), config)
    for row, got_ids, got_weights in zip(logits, ids.tolist(), weights, strict=True):
        want_ids, want_weights = numpy_reference.route(row, bias, HF_CONFIG | overrides)
        assert got_ids == want_ids
        np.testing.assert_allclose(got_weights, want_weights, rtol=1e-5)
    np.testing.assert_allclose(weights.sum(-1), config.routed_scaling_factor, rtol=1e-6)
    return ids.tolist()


def test_negative_scores_do_not_let_dropped_groups_in():
    """All choice scores are below 0, which is what a dropped group must not be set to."""
    logits = np.random.default_rng(0).standard_normal((64, 8))
    ids = check(logits, np.full(8, -3.0))
    assert all(len({expert // 2 for expert in row}) <= 2 for row in ids)


def test_a_group_is_worth_its_two_best():
    """Expert 0 is the best of all, and its group is dropped for a poor runner-up."""
    ids = check([[4.0, -9.0, 1.0, 1.1, 0.9, 1.2, -9.0, -9.0]], np.zeros(8))
    assert sorted(ids[0]) == [2, 3, 5]


def test_the_bias_selects_and_does_not_weigh():
    bias = np.zeros(8)
    bias[[0, 1]] = 5.0
    ids = check([[-3.0, -2.0, 1.0, 2.0, 3.0, 0.0, -1.0, -2.0]], bias)
    assert ids[0][:2] == [1, 0]


def test_ties_go_to_the_lowest_index():
    assert check(np.zeros((1, 8)), np.zeros(8)) == [[0, 1, 2]]
    assert check([[0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]], np.zeros(8)) == [[2, 3, 4]]


def test_neighbouring_biases_keep_their_order():
    """Spaced 0.001 around 6.9, where bfloat16 would see one value."""
    bias = 6.9 + 0.001 * np.array([3, 1, 2, 0, 5, 4, 7, 6])
    assert check(np.zeros((1, 8)), bias) == [[6, 7, 4]]


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
    logits=st.lists(st.lists(st.integers(-20, 20), min_size=8, max_size=8), min_size=4, max_size=4),
    bias=st.lists(st.integers(-4, 4), min_size=8, max_size=8),
    sizes=st.sampled_from([(4, 2, 3), (4, 2, 2), (2, 1, 4), (1, 1, 3), (8, 3, 3)]),
)
def test_any_scores(logits, bias, sizes):
    groups, kept, experts = sizes
    check(
        np.array(logits) / 4,
        np.array(bias) / 8,
        n_group=groups,
        topk_group=kept,
        num_experts_per_tok=experts,
    )
