"""DeepSeek-V4 and MTP against the golden data, after conversion by the command and from Orbax."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.layers.compressor import keep_best
from pallas_kernels.paged_mla import gather_rows
from pallas_kernels.quantize import simulate_fp8
from pallas_kernels.quantized import QuantizedTensor, dequantize
from tests import golden_case as golden
from tests import models

VARIANTS = {
    "v4_bf16": ("v4_bf16", "f32"),
    "v4_bf16 simulated": ("v4_bf16", "f32_sim"),
    "v4_quant": ("v4_quant", "f32"),
    "v4_quant simulated": ("v4_quant", "f32_full"),
}
MESH = (4, 2)

LARGER = pytest.param("v4_bf16", marks=pytest.mark.exhaustive)


def variants(*fast: str) -> pytest.MarkDecorator:
    """All variants, on one device and on eight; those not named are exhaustive."""
    cases = []
    for name, (case, variant) in VARIANTS.items():
        for mesh_shape in (None, MESH):
            label = f"{name}, 8 devices" if mesh_shape else name
            marks = [] if label in fast else [pytest.mark.exhaustive]
            cases.append(pytest.param(case, variant, mesh_shape, id=label, marks=marks))
    return pytest.mark.parametrize("case, variant, mesh_shape", cases)


def load(case: str, variant: str, mesh_shape=None) -> jaxspec.SpeculativeModel:
    """DeepSeek's own code does not zero the draft's first embedding, nor do most golden keys."""
    simulate = variant != "f32"
    return models.load(
        case, quantize_activations=simulate, mesh_shape=mesh_shape, zero_first_embedding=False
    )


def check_logits(got, want: np.ndarray, variant: str) -> None:
    if variant == "f32":
        golden.assert_within(got, want, 2e-4)
    else:
        # A value next to a rounding boundary may fall on its other side, and the step propagates.
        golden.assert_rows_within(got, want, share=0.97, atol=1e-3, limit=0.5)


def check_streams(got, want: np.ndarray, variant: str) -> None:
    if variant == "f32":
        golden.assert_within(got, want, 1e-4)
    else:
        golden.assert_rows_within(got, want, share=0.9, atol=1e-3, limit=1.0)


def prefilled(case: str, variant: str, mesh_shape=None):
    """A session of its own after the prompt in one call, and what that call gave."""
    session, logits, captured = _prefill(case, variant, mesh_shape)
    return dataclasses.replace(session), logits, captured


@functools.cache
def _prefill(case: str, variant: str, mesh_shape):
    keys = golden.expected(case)
    prompt = keys["input_ids"][: int(keys["prefill_len"])]
    capacity = len(keys["input_ids"]) + 4
    session = models.Session.start(load(case, variant, mesh_shape), capacity, fill=np.nan)
    return session, *session.target(prompt, 0)


@variants("v4_bf16", "v4_quant simulated, 8 devices")
def test_prefill_and_single_steps(case, variant, mesh_shape):
    keys = golden.expected(case)
    session, logits, streams = prefilled(case, variant, mesh_shape)
    check_logits(logits, keys[f"{variant}/prefill_logits"], variant)
    hidden = streams[keys["hidden_positions"]]
    check_streams(hidden, keys[f"{variant}/prefill_hidden"], variant)
    start, steps = int(keys["prefill_len"]), []
    for position in range(start, start + int(keys["decode_len"])):
        steps.append(session.target(keys["input_ids"][position : position + 1], position))
    logits, streams = (np.concatenate(part) for part in zip(*steps, strict=True))
    check_logits(logits, keys[f"{variant}/decode_logits"], variant)
    check_streams(streams, keys[f"{variant}/decode_hidden"], variant)


# Divisors of the prompts' 374 and 246 tokens, so that each cut compiles one program.
@pytest.mark.parametrize(
    "case, variant, chunk",
    [
        ("v4_bf16", "f32", 34),
        *(
            pytest.param("v4_bf16", variant, chunk, marks=pytest.mark.exhaustive)
            for variant in ("f32", "f32_sim")
            for chunk in (1, 2, 11, 17, 187)
        ),
        *(
            pytest.param("v4_quant", variant, chunk, marks=pytest.mark.exhaustive)
            for variant in ("f32", "f32_full")
            for chunk in (1, 6, 41, 123)
        ),
    ],
)
def test_prefill_in_chunks_is_the_prefill(case, variant, chunk):
    keys = golden.expected(case)
    session = models.Session.start(load(case, variant), len(keys["input_ids"]) + 4, fill=np.nan)
    prompt = keys["input_ids"][: int(keys["prefill_len"])]
    parts = [session.target(prompt[i : i + chunk], i) for i in range(0, len(prompt), chunk)]
    logits, streams = (np.concatenate(part) for part in zip(*parts, strict=True))
    check_logits(logits, keys[f"{variant}/prefill_logits"], variant)
    hidden = streams[keys["hidden_positions"]]
    check_streams(hidden, keys[f"{variant}/prefill_hidden"], variant)


@variants()
def test_public_logits(case, variant, mesh_shape):
    keys = golden.expected(case)
    model, end = load(case, variant, mesh_shape), int(keys["prefill_len"])
    tokens = jnp.asarray(keys["input_ids"])[None]
    target = jaxspec.target_logits(model, tokens)[0]
    want = [keys[f"{variant}/{part}_logits"] for part in ("prefill", "decode")]
    check_logits(target[:-1], np.concatenate(want), variant)
    draft = jaxspec.draft_logits(model, tokens)[0]
    check_logits(draft[end:], keys[f"{variant}/mtp_decode_logits"], variant)
    check_draft(np.asarray(draft[:end]), keys, variant)


def check_draft(logits: np.ndarray, keys, variant: str) -> None:
    """The draft's logits behind the prompt; some variants hold a part of the rows."""
    if variant == "f32":
        check_logits(logits, keys["f32/mtp_logits"], variant)
    else:
        rows = keys["mtp_positions"]
        check_logits(logits[rows], keys[f"{variant}/mtp_logits_sub"], variant)


@variants("v4_bf16", "v4_quant simulated, 8 devices")
def test_draft_teacher_forced_with_its_cache_and_chained(case, variant, mesh_shape):
    keys = golden.expected(case)
    session, _, captured = prefilled(case, variant, mesh_shape)
    ids, end = keys["input_ids"], int(keys["prefill_len"])
    logits, streams = session.draft(ids[1 : end + 1], captured, 0)
    check_draft(logits, keys, variant)
    check_streams(streams[-1], keys[f"{variant}/mtp_hidden_last"], variant)

    chain = [(logits[-1], streams[-1])]
    for step in range(1, 4):
        fed = keys["chain_input_ids"][step : step + 1]
        logits, streams = session.draft(fed, chain[-1][1][None], end - 1 + step)
        chain.append((logits[0], streams[0]))
    logits, streams = (np.stack(part) for part in zip(*chain, strict=True))
    check_logits(logits, keys[f"{variant}/mtp_chain_logits"], variant)
    check_streams(streams, keys[f"{variant}/mtp_chain_hidden"], variant)
    np.testing.assert_array_equal(logits.argmax(-1), keys[f"{variant}/mtp_chain_tokens"])


@variants("v4_bf16")
def test_draft_takes_committed_rows_where_its_chain_has_written(case, variant, mesh_shape):
    keys = golden.expected(case)
    session, _, captured = prefilled(case, variant, mesh_shape)
    ids, end = keys["input_ids"], int(keys["prefill_len"])
    _, streams = session.draft(ids[1 : end + 1], captured, 0)
    session.draft(ids[:1], streams[-1:], end)  # A token that is then rejected.
    forced = [
        session.draft(ids[end + i + 1 : end + i + 2], state[None], end + i)[0][0]
        for i, state in enumerate(keys[f"{variant}/decode_hidden"])
    ]
    check_logits(np.stack(forced), keys[f"{variant}/mtp_decode_logits"], variant)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["v4_quant", "v4_bf16"])
def test_propose_chains(case):
    keys = golden.expected(case)
    prompt = keys["input_ids"][: int(keys["prefill_len"]) + 1]
    proposal = jaxspec.propose(load(case, "f32"), [prompt.tolist()], num_draft_tokens=4)
    golden.assert_within(proposal.logits[0], keys["f32/mtp_chain_logits"], 2e-4)
    np.testing.assert_array_equal(proposal.tokens[0], keys["f32/mtp_chain_tokens"])


@pytest.mark.parametrize("case", ["v4_quant", LARGER])
def test_the_first_embedding_is_zeroed_unless_told_otherwise(case):
    keys = golden.expected(case)
    tokens = jnp.asarray(keys["input_ids"])[None, :33]
    for model, want in (
        (models.load(case), keys["f32/mtp_logits_mask0"]),
        (load(case, "f32"), keys["f32/mtp_logits"][:32]),
    ):
        golden.assert_within(jaxspec.draft_logits(model, tokens)[0], want, 2e-4)


# rms, median of the rows' largest difference, and top-1 agreement of DeepSeek's own bf16 run
# against the float32 variant that rounds where it does.
BF16_NOISE = {
    "v4_bf16": {
        "prefill": (0.15, 0.33, 0.94), "mtp": (0.12, 0.25, 0.96), "decode": (0.22, 0.43, None),
    },
    "v4_quant": {
        "prefill": (0.33, 0.97, 0.87), "mtp": (0.32, 0.89, 0.87), "decode": (0.37, 1.1, None),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param("v4_quant", marks=pytest.mark.slow), LARGER])
def test_bfloat16_is_as_near_as_deepseeks_own(case):
    keys, variant = golden.expected(case), VARIANTS[f"{case} simulated"][1]
    model = models.load(
        case, dtype="bfloat16", quantize_activations=True, zero_first_embedding=False
    )
    end, tokens = int(keys["prefill_len"]), jnp.asarray(keys["input_ids"])[None]
    target = np.asarray(jaxspec.target_logits(model, tokens)[0])
    draft = np.asarray(jaxspec.draft_logits(model, tokens)[0])
    assert target.dtype == draft.dtype == np.float32
    got = {
        "prefill": (target[:end], keys[f"{variant}/prefill_logits"]),
        "mtp": (draft[keys["mtp_positions"]], keys[f"{variant}/mtp_logits_sub"]),
        "decode": (target[end:-1], keys[f"{variant}/decode_logits"]),
    }
    for part, (rms, median, top1) in BF16_NOISE[case].items():
        logits, want = got[part]
        assert np.sqrt(np.mean((logits - want) ** 2)) <= 1.5 * rms
        assert np.median(golden.row_errors(logits, want)) <= 1.5 * median
        if top1 is not None:
            assert np.mean(logits.argmax(-1) == want.argmax(-1)) >= top1 - 0.07


@jax.jit
def run_block(block, streams, tokens, cache, page_table):
    """One block on a whole sequence; also the experts and entries that it chooses."""
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    valid = jnp.ones_like(tokens, bool)
    mix = block.hc_attn.coefficients(streams)
    x = block.attn_norm(block.hc_attn.gather(streams, mix))
    y, cache = block.attn(x, positions, valid, cache, page_table)
    chosen = None
    if block.attn.indexer is not None:
        latent = block.attn.q_norm(block.attn.wq_a(x))
        queries = block.attn.indexer.queries(x, latent, positions)
        num_complete = jnp.array([tokens.shape[1] // 4])
        scores = queries.scores(gather_rows(cache.keys.pages, page_table, num_complete))
        entry = jnp.arange(scores.shape[-1])[None, None]
        visible = entry < ((positions + 1) // 4)[..., None]
        chosen = keep_best(scores, visible, block.attn.config.index_topk)[0]
    streams = block.hc_attn.spread(y, streams, mix)
    mix = block.hc_ffn.coefficients(streams)
    x = block.ffn_norm(block.hc_ffn.gather(streams, mix))
    experts, _ = block.ffn.gate(x[0], tokens[0])
    return block.hc_ffn.spread(block.ffn(x, tokens, valid), streams, mix), experts, chosen


@pytest.mark.parametrize(
    "case, variant",
    [
        ("v4_bf16", "f32"),
        ("v4_quant", "f32_full"),
        pytest.param("v4_bf16", "f32_sim", marks=pytest.mark.exhaustive),
        pytest.param("v4_quant", "f32", marks=pytest.mark.exhaustive),
    ],
)
def test_layers_experts_and_entries(case, variant):
    """Layer by layer: where the first of these fails, the fault is."""
    keys, model = golden.expected(case), load(case, variant)
    tokens = jnp.asarray(keys["input_ids"])[None, : int(keys["prefill_len"])]
    cache = models.Session.start(model, tokens.shape[1], fill=np.nan).target_cache
    streams = jnp.repeat(model.target.embed(tokens)[:, :, None], 4, axis=2)
    for index, block in enumerate(model.target.layers):
        table = cache.page_table(block.ratio)
        streams, experts, chosen = run_block(block, streams, tokens, cache.layers[index], table)
        if variant == "f32":
            rows = np.asarray(streams[0, keys["debug_positions"]])
            golden.assert_within(rows, keys["f32/debug_layer_out"][index], 1e-4)
        name = f"{variant}/router_idx/layer{index}"
        assert (name in keys) == (block.ffn.gate.bias is not None)
        if name in keys:
            np.testing.assert_array_equal(np.sort(experts, -1), keys[name])
        name = f"{variant}/index_topk/layer{index}"
        assert (name in keys) == (chosen is not None)
        if name in keys:
            got = [np.flatnonzero(row).tolist() for row in np.asarray(chosen)]
            assert got == [[i for i in row if i >= 0] for row in keys[name].tolist()]


@pytest.mark.parametrize(
    "case, variant",
    [
        pytest.param("v4_quant", "f32_full", marks=pytest.mark.slow),
        pytest.param("v4_quant", "f32", marks=pytest.mark.exhaustive),
        pytest.param("v4_bf16", "f32", marks=pytest.mark.exhaustive),
        pytest.param("v4_bf16", "f32_sim", marks=pytest.mark.exhaustive),
    ],
)
def test_blocks_alone(case, variant):
    keys, model = golden.expected(case), load(case, variant)
    streams, ids = golden.v4_block_input(case)
    rows, atol = keys["block_rows"], 1e-4 if variant == "f32" else 3e-4
    session = models.Session.start(model, len(ids), fill=np.nan)
    cache, h, tokens = session.target_cache, jnp.asarray(streams)[None], jnp.asarray(ids)[None]
    for index, block in enumerate(model.target.layers):
        table = cache.page_table(block.ratio)
        out = run_block(block, h, tokens, cache.layers[index], table)[0]
        golden.assert_within(out[0, rows], keys[f"{variant}/block/layer{index}"], atol)
    hidden = model.target.hc_head(h[0, rows])
    golden.assert_within(hidden, keys[f"{variant}/block/hc_head"], 1e-4)
    logits = model.target.logits(h[:, rows[::4]])
    golden.assert_within(logits[0], keys[f"{variant}/block/head_logits"], 2e-4)
    logits, hidden = session.draft(np.roll(ids, -1), streams, 0)
    golden.assert_within(hidden[rows], keys[f"{variant}/block/mtp_hidden"], atol)
    golden.assert_within(logits[rows[::4]], keys[f"{variant}/block/mtp_logits"], 2 * atol)


@pytest.mark.parametrize(
    "variant, part, atol", [("f32", "dequant", 5e-5), ("f32_full", "w8a8", 2e-5)]
)
def test_linears_alone(variant, part, atol):
    """FP8, and FP4 experts taken out of their stack."""
    keys, model = golden.expected("v4_quant"), load("v4_quant", variant)
    names = sorted({key.split("/")[1] for key in keys if key.startswith("linear/")})
    assert any(".experts." in name for name in names)
    for name in names:
        first, index, *path = name.split(".")
        module: Any = model.target.layers if first == "layers" else model.draft.layers
        linear: Any = functools.reduce(
            lambda m, key: m if key.isdigit() else getattr(m, key), path, module[int(index)]
        )
        weight = linear.weight.get_value()
        x = jnp.asarray(golden.linear_input("v4_quant", weight.shape[-1]))
        if ".experts." in name:
            got = expert_product(x, weight[int(path[-2])], quantize=part == "w8a8")
        else:
            got = linear(x)
        golden.assert_within(got, keys[f"linear/{name}/{part}"], atol)


def expert_product(x: jax.Array, weight: QuantizedTensor, *, quantize: bool) -> jax.Array:
    assert weight.is_fp4
    if quantize:
        x = simulate_fp8(x, group_size=128)
    return x @ dequantize(weight).T
