"""The float64 reference reproduces the golden data, so other tests may rely on it."""

import numpy as np
import pytest

from tests import golden_case as golden
from tests.numpy_reference import Reference, quantize_activations, route

CASES = ["v3_bf16", "v3_fp8"]


@pytest.mark.parametrize("case", CASES)
def test_target_and_draft_follow_the_golden_data(case):
    keys = golden.expected(case)
    prefill, decode = int(keys["prefill_len"]), int(keys["decode_len"])
    ids = keys["input_ids"]
    reference = Reference(golden.checkpoint(case))
    target = reference.target(ids[:-1])
    draft = reference.draft(ids[1:], target.post_norm)
    for part, outputs in {"": target, "nextn_": draft}.items():
        want = keys[f"f32/{part or 'prefill_'}logits"], keys[f"f32/{part}decode_logits"]
        golden.assert_within(outputs.logits, np.concatenate(want), 2e-4)
    golden.assert_within(target.pre_norm[:prefill], keys["f32/prefill_hidden_pre_norm"], 1e-4)
    golden.assert_within(target.post_norm[:prefill], keys["f32/prefill_hidden_post_norm"], 1e-4)
    golden.assert_within(target.post_norm[prefill:], keys["f32/decode_hidden_post_norm"], 1e-4)
    golden.assert_within(draft.post_norm[:prefill], keys["f32/nextn_hidden_post_norm"], 1e-4)
    assert len(target.logits) == prefill + decode
    for layer, chosen in target.router.items():
        np.testing.assert_array_equal(chosen[:prefill], keys[f"f32/router_idx/layer{layer}"])


@pytest.mark.parametrize("case", CASES)
def test_chain_and_masked_draft_follow_the_golden_data(case):
    keys = golden.expected(case)
    prefill, ids = int(keys["prefill_len"]), keys["input_ids"]
    reference = Reference(golden.checkpoint(case))
    chain = reference.chain(ids[: prefill + 1], 4, fed=list(keys["chain_input_ids"][0][1:]) + [0])
    golden.assert_within(chain, keys["f32/nextn_chain_logits"], 2e-4)
    np.testing.assert_array_equal(chain.argmax(-1), keys["f32/nextn_chain_tokens"])
    masked = reference.draft(ids[1:33], reference.target(ids[:32]).post_norm, mask_first=True)
    golden.assert_within(masked.logits, keys["f32/nextn_logits_mask0"], 2e-4)


def test_quantized_activations_follow_the_golden_data():
    keys = golden.expected("v3_fp8")
    ids = keys["input_ids"]
    reference = Reference(golden.checkpoint("v3_fp8"), quantize_activations=True)
    target = reference.target(ids[:-1])
    draft = reference.draft(ids[1:], target.post_norm)
    for part, outputs in {"": target, "nextn_": draft}.items():
        want = keys[f"f32_w8a8/{part or 'prefill_'}logits"], keys[f"f32_w8a8/{part}decode_logits"]
        golden.assert_rows_within(
            outputs.logits, np.concatenate(want), share=0.97, atol=1e-3, limit=0.5
        )


def test_linears_follow_the_golden_data():
    keys = golden.expected("v3_fp8")
    reference = Reference(golden.checkpoint("v3_fp8"))
    names = {key.split("/")[1] for key in keys if key.startswith("linear/")}
    for name in sorted(names):
        weight = reference.weight(name)
        x = golden.linear_input("v3_fp8", weight.shape[1])
        golden.assert_within(x @ weight.T, keys[f"linear/{name}/dequant"], 5e-5)
        quantized = quantize_activations(x) @ weight.T
        golden.assert_within(quantized, keys[f"linear/{name}/w8a8"], 2e-5)


@pytest.mark.parametrize("case", CASES)
def test_blocks_follow_the_golden_data(case):
    keys = golden.expected(case)
    reference = Reference(golden.checkpoint(case))
    x, next_tokens = golden.block_input(case)
    num_layers = reference.config["num_hidden_layers"]
    for layer in range(num_layers + 1):
        name = f"layer{layer}" if layer < num_layers else "nextn_layer"
        golden.assert_within(reference.layer(layer, x, {})[::4], keys[f"f32/block/{name}"], 1e-4)
    logits = reference.draft(next_tokens, x).logits
    golden.assert_within(logits[::8], keys["f32/block/nextn_logits"], 2e-4)


def test_scalar_router_keeps_its_rules():
    config = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5}
    # Group 0 has the best expert and a poor one; groups 1 and 2 have the better sums.
    logits = np.array([4.0, -9.0, 1.0, 1.1, 0.9, 1.2, -9.0, -9.0])
    experts, weights = route(logits, np.full(8, -3.0), config)
    assert experts == [5, 3]
    assert sum(weights) == pytest.approx(2.5)
    assert weights[0] / weights[1] == pytest.approx((1 + np.exp(-1.1)) / (1 + np.exp(-1.2)))
    assert route(np.zeros(8), np.zeros(8), config)[0] == [0, 1]
