"""The package against the golden data, after conversion by the command and loading from Orbax."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.layers.linear import Linear
from jaxspec.layers.moe import MoE
from tests import golden_case as golden
from tests import models

CASES = ["v3_bf16", "v3_fp8"]
MESHES = pytest.mark.parametrize("mesh_shape", [None, (4, 2)], ids=["1 device", "8 devices"])


def prefilled(case: str, **options) -> tuple[models.Session, np.ndarray, np.ndarray]:
    """A session of its own after the prompt in one call, and what that call gave."""
    session, logits, captured = _prefill(case, **options)
    return dataclasses.replace(session), logits, captured


@functools.cache
def _prefill(case: str, **options):
    keys = golden.expected(case)
    model = models.load(case, **options)
    prompt = keys["input_ids"][: int(keys["prefill_len"])]
    session = models.Session.start(model, len(keys["input_ids"]) + 4)
    return session, *session.target(prompt, 0)


@MESHES
@pytest.mark.parametrize("case", CASES)
def test_prefill_and_single_steps(case, mesh_shape):
    keys = golden.expected(case)
    session, logits, captured = prefilled(case, mesh_shape=mesh_shape)
    golden.assert_within(logits, keys["f32/prefill_logits"], 2e-4)
    golden.assert_within(captured, keys["f32/prefill_hidden_post_norm"], 1e-4)
    steps = decode(session, keys)
    golden.assert_within(np.stack([s[0] for s in steps]), keys["f32/decode_logits"], 2e-4)
    golden.assert_within(np.stack([s[1] for s in steps]), keys["f32/decode_hidden_post_norm"], 1e-4)


def decode(session: models.Session, keys) -> list[tuple[np.ndarray, np.ndarray]]:
    """Logits and states of the tokens behind the prompt, one call each."""
    start, count = int(keys["prefill_len"]), int(keys["decode_len"])
    out = []
    for position in range(start, start + count):
        logits, captured = session.target(keys["input_ids"][position : position + 1], position)
        out.append((logits[0], captured[0]))
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [1, 16])
def test_prefill_in_chunks_is_the_prefill(case, chunk):
    keys = golden.expected(case)
    session = models.Session.start(models.load(case), len(keys["input_ids"]) + 4)
    prompt = keys["input_ids"][: int(keys["prefill_len"])]
    parts = [session.target(prompt[i : i + chunk], i) for i in range(0, len(prompt), chunk)]
    logits, captured = (np.concatenate(part) for part in zip(*parts, strict=True))
    golden.assert_within(logits, keys["f32/prefill_logits"], 2e-4)
    golden.assert_within(captured, keys["f32/prefill_hidden_post_norm"], 1e-4)


@MESHES
@pytest.mark.parametrize("case", CASES)
def test_public_logits(case, mesh_shape):
    keys = golden.expected(case)
    model = models.load(case, mesh_shape=mesh_shape)
    tokens = jnp.asarray(keys["input_ids"])[None]
    target = jaxspec.target_logits(model, tokens)[0]
    golden.assert_within(target[:-1], joined(keys, "f32", "prefill_", "decode_"), 2e-4)
    draft = jaxspec.draft_logits(model, tokens)[0]
    golden.assert_within(draft, joined(keys, "f32", "nextn_", "nextn_decode_"), 2e-4)


def joined(keys, variant: str, *parts: str) -> np.ndarray:
    return np.concatenate([keys[f"{variant}/{part}logits"] for part in parts])


@MESHES
@pytest.mark.parametrize("case", CASES)
def test_draft_teacher_forced_with_its_cache_and_chained(case, mesh_shape):
    keys = golden.expected(case)
    session, _, captured = prefilled(case, mesh_shape=mesh_shape)
    ids, end = keys["input_ids"], int(keys["prefill_len"])
    logits, hidden = session.draft(ids[1 : end + 1], captured, 0)
    golden.assert_within(logits, keys["f32/nextn_logits"], 2e-4)
    golden.assert_within(hidden, keys["f32/nextn_hidden_post_norm"], 1e-4)

    chain, state = [logits[-1]], hidden[-1:]
    for step in range(1, 4):
        fed = keys["chain_input_ids"][0][step : step + 1]
        logits, state = session.draft(fed, state, end - 1 + step)
        chain.append(logits[0])
    golden.assert_within(np.stack(chain), keys["f32/nextn_chain_logits"], 2e-4)
    np.testing.assert_array_equal(np.argmax(chain, -1), keys["f32/nextn_chain_tokens"])

    # What the chain wrote is overwritten by the committed rows.
    forced = [
        session.draft(ids[end + i + 1 : end + i + 2], state[None], end + i)[0][0]
        for i, state in enumerate(keys["f32/decode_hidden_post_norm"])
    ]
    golden.assert_within(np.stack(forced), keys["f32/nextn_decode_logits"], 2e-4)


@pytest.mark.parametrize("case", CASES)
def test_propose_chains(case):
    keys = golden.expected(case)
    prompt = keys["input_ids"][: int(keys["prefill_len"]) + 1]
    proposal = jaxspec.propose(models.load(case), [prompt.tolist()], num_draft_tokens=4)
    golden.assert_within(proposal.logits[0], keys["f32/nextn_chain_logits"], 2e-4)
    np.testing.assert_array_equal(proposal.tokens[0], keys["f32/nextn_chain_tokens"])
    assert proposal.confidence is None


@pytest.mark.parametrize("case", CASES)
def test_a_zeroed_first_embedding_is_an_option(case):
    keys = golden.expected(case)
    model = jaxspec.load(
        models.checkpoint(case),
        dtype="float32",
        quantize_activations=False,
        zero_first_embedding=True,
    )
    logits = jaxspec.draft_logits(model, jnp.asarray(keys["input_ids"])[None, :33])[0]
    golden.assert_within(logits, keys["f32/nextn_logits_mask0"], 2e-4)


@pytest.mark.parametrize(
    "mesh_shape",
    [None, pytest.param((4, 2), marks=pytest.mark.slow)],
    ids=["1 device", "8 devices"],
)
def test_quantized_activations(mesh_shape):
    keys = golden.expected("v3_fp8")
    model = models.load("v3_fp8", quantize_activations=True, mesh_shape=mesh_shape)
    tokens = jnp.asarray(keys["input_ids"])[None]
    target, draft = jaxspec.target_logits(model, tokens), jaxspec.draft_logits(model, tokens)
    bounds = {"share": 0.97, "atol": 1e-3, "limit": 0.5}
    want = joined(keys, "f32_w8a8", "prefill_", "decode_")
    golden.assert_rows_within(target[0, :-1], want, **bounds)
    golden.assert_rows_within(
        draft[0], joined(keys, "f32_w8a8", "nextn_", "nextn_decode_"), **bounds
    )


# rms, median of the rows' largest difference, and top-1 agreement of DeepSeek's own bf16 run.
BF16_NOISE = {
    ("v3_bf16", False): {"prefill_": (0.032, 0.10, 0.98), "nextn_": (0.031, 0.10, 0.98)},
    ("v3_fp8", False): {"prefill_": (0.042, 0.12, 0.97), "nextn_": (0.045, 0.13, 0.97)},
    ("v3_fp8", True): {"prefill_": (0.27, 0.83, 0.89), "nextn_": (0.30, 0.90, 0.85)},
}


@pytest.mark.parametrize("case, quantize", BF16_NOISE)
def test_bfloat16_is_as_near_as_deepseeks_own(case, quantize):
    keys = golden.expected(case)
    model = models.load(case, dtype="bfloat16", quantize_activations=quantize)
    end = int(keys["prefill_len"])
    tokens = jnp.asarray(keys["input_ids"])[None, : end + 1]
    got = {
        "prefill_": jaxspec.target_logits(model, tokens)[0, :-1],
        "nextn_": jaxspec.draft_logits(model, tokens)[0],
    }
    for part, (rms, median, top1) in BF16_NOISE[case, quantize].items():
        want = keys[f"{'f32_w8a8' if quantize else 'f32'}/{part}logits"]
        logits = np.asarray(got[part])
        assert logits.dtype == np.float32
        assert np.sqrt(np.mean((logits - want) ** 2)) <= 1.5 * rms
        assert np.median(golden.row_errors(logits, want)) <= 1.5 * median
        assert np.mean(logits.argmax(-1) == want.argmax(-1)) >= top1 - 0.07


@pytest.mark.parametrize(
    "case, variant", [("v3_bf16", "f32"), ("v3_fp8", "f32"), ("v3_fp8", "f32_w8a8")]
)
def test_blocks_alone(case, variant):
    keys = golden.expected(case)
    model = models.load(case, quantize_activations=variant == "f32_w8a8")
    x, next_tokens = golden.block_input(case, dtype=np.float32)
    session = models.Session.start(model, len(x))
    atol = 1e-4 if variant == "f32" else 3e-4
    cache = session.draft_cache
    layers = {f"layer{i}": layer for i, layer in enumerate(model.target.layers)}
    assert model.draft is not None
    for name, layer in (layers | {"nextn_layer": model.draft.decoder}).items():
        out = run_layer(layer, jnp.asarray(x)[None], cache.pages[0], cache.page_table)
        golden.assert_within(out[0, ::4], keys[f"{variant}/block/{name}"], atol)
    logits, _ = session.draft(next_tokens, x, 0)
    golden.assert_within(logits[::8], keys[f"{variant}/block/nextn_logits"], 3e-4)


@jax.jit
def run_layer(layer, x, pages, page_table):
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    return layer(x, positions, jnp.ones_like(positions, bool), pages, page_table)[0]


@pytest.mark.parametrize("case", CASES)
def test_router_chooses_the_same_experts(case):
    keys = golden.expected(case)
    model = models.load(case)
    tokens = jnp.asarray(keys["input_ids"])[None, : int(keys["prefill_len"])]
    chosen = routing(model, tokens)
    assert len(chosen) == sum(key.startswith("f32/router_idx/") for key in keys)
    for layer, ids in chosen.items():
        np.testing.assert_array_equal(np.sort(ids, -1), keys[f"f32/router_idx/layer{layer}"])


def routing(model, tokens) -> dict[int, np.ndarray]:
    """The experts that each MoE layer of the target picks, by running the layers one by one."""
    session = models.Session.start(model, tokens.shape[1])
    cache = session.draft_cache
    x, chosen = model.target.embed_tokens(tokens), {}
    for index, layer in enumerate(model.target.layers):
        before_mlp = run_attention(layer, x, cache.pages[0], cache.page_table)
        if isinstance(layer.mlp, MoE):
            normed = layer.post_attention_layernorm(before_mlp)
            chosen[index] = np.asarray(layer.mlp.gate(normed[0])[0])
        x = run_layer(layer, x, cache.pages[0], cache.page_table)
    return chosen


@jax.jit
def run_attention(layer, x, pages, page_table):
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    normed = layer.input_layernorm(x)
    pages = layer.self_attn.write(normed, positions, positions >= 0, pages, page_table)
    return x + layer.self_attn.attend(normed, positions, pages, page_table)


def test_linears_alone():
    keys = golden.expected("v3_fp8")
    names = sorted({key.split("/")[1] for key in keys if key.startswith("linear/")})
    for quantize, variant, atol in ((False, "dequant", 5e-5), (True, "w8a8", 2e-5)):
        model = models.load("v3_fp8", quantize_activations=quantize)
        for name in names:
            if ".experts." in name:
                continue  # stacked; the block tests cover them
            layer, *path = name.removeprefix("model.layers.").split(".")
            linear: Any = functools.reduce(getattr, path, model.target.layers[int(layer)])
            assert isinstance(linear, Linear)
            x = golden.linear_input("v3_fp8", linear.weight.get_value().shape[1])
            golden.assert_within(linear(jnp.asarray(x)), keys[f"linear/{name}/{variant}"], atol)
