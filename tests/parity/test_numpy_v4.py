"""The float64 reference of V4 reproduces the golden data, so other tests may rely on it."""

import numpy as np
import pytest

from tests import golden_case as golden
from tests.numpy_v4 import Reference

VARIANTS = [
    ("v4_bf16", "f32"),
    ("v4_bf16", "f32_sim"),
    ("v4_quant", "f32"),
    ("v4_quant", "f32_full"),
]


@pytest.mark.parametrize(
    "case, variant",
    [pytest.param(*v, marks=[] if v[0] == "v4_quant" else pytest.mark.slow) for v in VARIANTS],
)
def test_target_and_draft_follow_the_golden_data(case, variant):
    keys = golden.expected(case)
    prefill, ids = int(keys["prefill_len"]), keys["input_ids"]
    reference = Reference(golden.checkpoint(case), simulate=variant != "f32")
    target = reference.target(ids[:-1])
    want = np.concatenate([keys[f"{variant}/{part}_logits"] for part in ("prefill", "decode")])
    draft = reference.draft(ids[1:], target.streams)
    decoded = keys[f"{variant}/mtp_decode_logits"]
    if variant == "f32":
        golden.assert_within(target.logits, want, 2e-4)
        hidden = target.streams[keys["hidden_positions"]]
        golden.assert_within(hidden, keys["f32/prefill_hidden"], 1e-4)
        golden.assert_within(draft.logits, np.concatenate([keys["f32/mtp_logits"], decoded]), 2e-4)
        golden.assert_within(draft.streams[prefill - 1], keys["f32/mtp_hidden_last"], 1e-4)
    else:
        bounds = {"share": 0.97, "atol": 1e-3, "limit": 0.5}
        golden.assert_rows_within(target.logits, want, **bounds)
        rows = draft.logits[keys["mtp_positions"]]
        golden.assert_rows_within(rows, keys[f"{variant}/mtp_logits_sub"], **bounds)
    for prefix, chosen in target.router.items():
        layer = prefix.split(".")[1]
        np.testing.assert_array_equal(chosen[:prefill], keys[f"{variant}/router_idx/layer{layer}"])
    for prefix, chosen in target.chosen.items():
        want = keys[f"{variant}/index_topk/layer{prefix.split('.')[1]}"]
        assert chosen[:prefill] == [[i for i in row if i >= 0] for row in want.tolist()]


def test_chain_and_masked_draft_follow_the_golden_data():
    keys = golden.expected("v4_quant")
    prefill, ids = int(keys["prefill_len"]), keys["input_ids"].tolist()
    reference = Reference(golden.checkpoint("v4_quant"))
    chain = reference.chain(ids[: prefill + 1], 4, mask_first=False)
    golden.assert_within(chain, keys["f32/mtp_chain_logits"], 2e-4)
    np.testing.assert_array_equal(chain.argmax(-1), keys["f32/mtp_chain_tokens"])
    masked = reference.draft(ids[1:33], reference.target(ids[:32]).streams, mask_first=True)
    golden.assert_within(masked.logits, keys["f32/mtp_logits_mask0"], 2e-4)
