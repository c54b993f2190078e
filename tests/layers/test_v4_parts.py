"""Each part of a V4 layer alone, against its golden arrays or its formula in float64 NumPy."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxspec.cache.compressed import Compressed
from jaxspec.cache.ring import read_at, read_ring, write_ring
from jaxspec.config import DeepseekV4Config
from jaxspec.execution import Execution
from jaxspec.layers import moe_v4
from jaxspec.layers.compressor import Compressor, IndexQueries, keep_best
from jaxspec.layers.hyper_connections import HyperHead, split_mixes
from jaxspec.layers.rope import Rope, rotate
from pallas_kernels.quantize import hadamard, quantize_activations, simulate_fp4, simulate_fp8
from pallas_kernels.quantized import QuantizedTensor, dequantize
from pallas_kernels.sparse_attention import sparse_attention
from tests import fixtures_v4, models
from tests import golden_case as golden
from tests import numpy_v4_parts as parts

RNG = np.random.default_rng(0)
HF_CONFIG = fixtures_v4.v4_config()
CONFIG = DeepseekV4Config.from_hf(HF_CONFIG)
EXECUTION = Execution(dtype=jnp.dtype("float32"), quantize_activations=False)
CASES = pytest.mark.parametrize("case", ["v4_bf16", "v4_quant"])


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# Rounding


def test_rounding_follows_the_golden_data():
    keys = golden.expected("v4_bf16")
    x = jnp.asarray(keys["unit/quant_in"])
    np.testing.assert_array_equal(simulate_fp8(x), keys["unit/fp8_g64_out"])
    np.testing.assert_array_equal(simulate_fp4(x), keys["unit/fp4_g32_out"])
    codes, scales = quantize_activations(x, group_size=128, scale_format="ue8m0")
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), keys["unit/fp8_g128_codes"])
    scales = np.asarray(scales).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    np.testing.assert_array_equal(scales, keys["unit/fp8_g128_scale_e8m0"])
    largest = np.abs(keys["unit/hadamard_out"]).max(-1, keepdims=True)
    error = np.abs(np.asarray(hadamard(x)) - keys["unit/hadamard_out"])
    assert (error <= 2e-6 * largest).all()


@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([1e-38, 1e-6, 0.3, 1.0, 1e4, 1e30]))
@hypothesis.settings(max_examples=25, deadline=None)
def test_rounding_is_the_definition(seed, scale):
    x = (np.random.default_rng(seed).standard_normal((3, 64)) * scale).astype(np.float32)
    x[0], x[1, ::3], x[2, ::5] = 0, np.float32(6 * scale), np.float32(2.5 * scale)
    np.testing.assert_array_equal(simulate_fp8(jnp.asarray(x)), parts.simulate_fp8(x))
    if scale > 1e-30:  # The steps below are no normal floats.
        np.testing.assert_array_equal(simulate_fp4(jnp.asarray(x)), parts.simulate_fp4(x))


def test_rounding_of_the_edges_gives_no_nan():
    """D37: zeros stay zeros, and nothing finite becomes NaN."""
    x = np.zeros((4, 64), np.float32)
    x[1], x[2, 5], x[3] = 1e4, 1e38, 1e-38
    for simulate in (simulate_fp8, simulate_fp4):
        out = np.asarray(jax.jit(simulate)(jnp.asarray(x)))
        assert np.isfinite(out).all() and (out[0] == 0).all()


def test_every_byte_of_fp4():
    """D09: the low half is the even column, the sign stays in its half, code 8 is negative zero."""
    values = np.arange(256, dtype=np.uint8).reshape(8, 32)
    scales = np.full((8, 2), 2.0**-7).astype(ml_dtypes.float8_e8m0fnu)
    packed = QuantizedTensor(values, scales, (1, 32))
    code = np.stack([values & 15, values >> 4], -1).reshape(8, 64)
    want = np.where(code & 8, -1, 1) * parts.E2M1[code & 7] / 128
    for q in (packed, jax.tree.map(jnp.asarray, packed)):
        got = np.asarray(dequantize(q))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), code >= 8)
    row = np.asarray(dequantize(packed)).reshape(-1)[2 * 0xF3 : 2 * 0xF3 + 2] * 128
    assert row.tolist() == [1.5, -6.0]


# Rotary embedding


@CASES
def test_rotation_by_either_table(case):
    keys, config = golden.expected(case), golden.checkpoint(case).config
    model = DeepseekV4Config.from_hf(config)
    x = jnp.asarray(keys["unit/rope_in"])[None]
    positions = jnp.asarray(keys["unit/rope_positions"])[None]
    ropes = {
        "window": (0, Rope(model.rope_theta, None)),
        "compress": (4, Rope(model.compress_rope_theta, model.rope)),
    }
    for name, (ratio, rope) in ropes.items():
        turned = rotate(x, positions, rope)
        np.testing.assert_allclose(turned[0], keys[f"unit/rope_{name}_out"], atol=1e-4)
        table = parts.frequencies(config, ratio)
        want = parts.rotate_last(np.asarray(x[0], np.float64), keys["unit/rope_positions"], table)
        np.testing.assert_allclose(turned[0], want, atol=1e-4)
        back = rotate(turned, positions, rope, inverse=True)
        np.testing.assert_allclose(back, x, atol=1e-5)


def test_each_layer_takes_the_table_of_its_ratio():
    """D18: the plain base without YaRN at ratio 0 and in the draft, else the other with it."""
    model = models.load("v4")
    for block in [*model.target.layers, model.draft.layers[0].block]:
        plain, stretched = Rope(10000, None), Rope(160000, model.config.rope)
        assert block.attn.rope == (stretched if block.ratio else plain)
        if block.attn.compressor:
            assert block.attn.compressor.rope == stretched


# Hyper-connections


@CASES
def test_hyper_connection_mixes(case):
    keys, source = golden.expected(case), golden.checkpoint(case)
    base, scale = (source.tensors[f"layers.0.hc_attn_{part}"] for part in ("base", "scale"))
    mixes = keys["unit/hc_mixes"]
    config = DeepseekV4Config.from_hf(source.config)
    got = split_mixes(jnp.asarray(mixes), jnp.asarray(base), jnp.asarray(scale), config)
    want = parts.split_mixes(mixes.astype(np.float64), base, scale, source.config)
    for name in ("pre", "post", "comb"):
        np.testing.assert_allclose(getattr(got, name), keys[f"unit/hc_{name}"], atol=1e-5)
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-5)


def test_hyper_connection_gathers_and_spreads():
    """Rows of the mixing matrix are where a stream comes from, columns where it goes."""
    block = models.load("v4").target.layers[1]
    tensors, h, y = models.source("v4").tensors, normal(5, 4, 128), normal(5, 128)
    fn, base, scale = (tensors[f"layers.1.hc_ffn_{part}"] for part in ("fn", "base", "scale"))
    want = parts.hyper_mix(h.astype(np.float64), fn, base, scale, HF_CONFIG)
    mix = block.hc_ffn.coefficients(jnp.asarray(h))
    gathered = block.hc_ffn.gather(jnp.asarray(h), mix)
    np.testing.assert_allclose(gathered, np.einsum("tj,tjd->td", want.pre, h), atol=1e-5)
    spread = block.hc_ffn.spread(jnp.asarray(y), jnp.asarray(h), mix)
    kept = np.einsum("tij,tid->tjd", want.comb, h)
    np.testing.assert_allclose(spread, kept + want.post[..., None] * y[:, None], atol=1e-5)


def test_hyper_head():
    head = HyperHead(config=CONFIG, rngs=nnx.Rngs(0))
    h, fn, base, scale = normal(5, 4, 128), normal(4, 512), normal(4), normal(1)
    for name, value in {"fn": fn, "base": base, "scale": scale}.items():
        getattr(head, name).set_value(jnp.asarray(value))
    want = parts.hyper_head(h.astype(np.float64), fn, base, scale, HF_CONFIG)
    np.testing.assert_allclose(head(jnp.asarray(h)), want, atol=1e-5)


# Experts


@CASES
@pytest.mark.parametrize("kind", ["hash", "score"])
def test_router(case, kind):
    keys, source = golden.expected(case), golden.checkpoint(case)
    layer, ids = int(keys[f"unit/router_{kind}_layer"]), keys["input_ids"][:32]
    gate = models.load(case).target.layers[layer].ffn.gate
    x = source.tensors["embed.weight"].astype(np.float32)[ids]
    experts, weights = gate(jnp.asarray(x), jnp.asarray(ids))
    order = np.argsort(experts, -1)
    experts, weights = (np.take_along_axis(np.asarray(a), order, -1) for a in (experts, weights))
    np.testing.assert_array_equal(experts, keys[f"unit/router_{kind}_idx"])
    np.testing.assert_allclose(weights, keys[f"unit/router_{kind}_weights"], atol=1e-5)


def test_router_at_ties_and_far_below_zero():
    """Ties go to the lowest index; the score of -17 is small, not 0; the bias does not weigh."""
    config = dataclasses.replace(CONFIG, hidden_size=12)
    gate = moe_v4.Gate(is_hash=False, config=config, execution=EXECUTION, rngs=nnx.Rngs(0))
    logits = np.stack([np.zeros(12), np.full(12, -17.0), np.linspace(-3, 3, 12)])
    bias = np.where(np.arange(12) == 4, 5.0, 0.0).astype(np.float32)
    gate.weight.set_value(jnp.eye(12))
    assert gate.bias is not None
    gate.bias.set_value(jnp.asarray(bias))
    ids, weights = gate(jnp.asarray(logits, jnp.float32), jnp.zeros(3, jnp.int32))
    hf_config = HF_CONFIG | {"num_experts_per_tok": 3}
    for row, got_ids, got_weights in zip(logits, ids.tolist(), weights, strict=True):
        want_ids, want_weights = parts.route(row, bias, None, hf_config)
        assert got_ids == want_ids
        np.testing.assert_allclose(got_weights, want_weights, rtol=1e-4)
    assert ids[0].tolist() == [4, 0, 1]


def test_experts_are_clamped():
    """D16: at +-30 and limit 10 the gate is cut above only; shared, routed, and the draft's."""
    limit = 10.0
    config = dataclasses.replace(CONFIG, swiglu_limit=limit, n_routed_experts=2)
    shared = {"config": config, "execution": EXECUTION, "rngs": nnx.Rngs(0)}
    mlp = moe_v4.ClampedMLP(128, **shared)
    experts = moe_v4.ClampedExperts(**shared)
    w1, w2, w3 = (normal(128, 128) / 2 for _ in range(3))
    for name, value in {"w1": w1, "w2": w2, "w3": w3}.items():
        getattr(mlp, name).weight.set_value(jnp.asarray(value))
        getattr(experts, name).weight.set_value(jnp.stack([jnp.zeros_like(value), value]))
    x = normal(6, 128) * 4
    gate, up = x @ w1.T, x @ w3.T
    assert all(side.min() < -30 and side.max() > 30 for side in (gate, up))
    want = parts.expert(x.astype(np.float64), w1, w2, w3, limit)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), want, rtol=1e-4, atol=2e-3)
    got = experts(jnp.asarray(x), jnp.ones((6, 1), jnp.int32), jnp.full((6, 1), 0.5))
    np.testing.assert_allclose(got, want / 2, rtol=1e-4, atol=2e-3)
    model = models.load("v4")
    for block in [*model.target.layers, model.draft.layers[0].block]:
        assert block.ffn.shared_experts.limit == block.ffn.experts.config.swiglu_limit == 2.0


# Compressor and indexer


def make_compressor(ratio: int) -> Compressor:
    rope = Rope(CONFIG.compress_rope_theta, CONFIG.rope)
    compressor = Compressor(
        ratio, 128, rope, is_indexer=False, config=CONFIG, execution=EXECUTION, rngs=nnx.Rngs(0)
    )
    rng = np.random.default_rng(3)
    compressor.ape.set_value(jnp.asarray(rng.normal(size=compressor.ape.shape), jnp.float32))
    compressor.norm.weight.set_value(jnp.asarray(rng.normal(size=128), jnp.float32))
    return compressor


@functools.partial(jax.jit, static_argnums=0)
def append(ratio, state, x, positions, valid, cache, table):
    compressor = nnx.merge(nnx.graphdef(make_compressor(ratio)), state)
    return compressor(x, positions, valid, cache, table)


@pytest.mark.parametrize("ratio, cuts", [(4, (1, 2, 3, 5, 8)), (128, (1, 120, 128, 200))])
def test_compressor_pools_whatever_the_cuts(ratio, cuts):
    """A text in pieces, each with rejected tokens behind it; whatever is unused is NaN."""
    compressor = make_compressor(ratio)
    total = 24 if ratio == 4 else 260
    x = normal(total, 128)
    weights = [
        np.asarray(m.weight.get_value(), np.float64) for m in (compressor.wkv, compressor.wgate)
    ]
    kv, gate = (x.astype(np.float64) @ weight.T for weight in weights)
    want = np.stack(parts.pool(kv, gate, np.asarray(compressor.ape.get_value(), np.float64), ratio))
    want = parts.rms(want, 1e-6) * np.asarray(compressor.norm.weight.get_value(), np.float64)
    starts, table = np.arange(len(want)) * ratio, parts.frequencies(HF_CONFIG, ratio)
    want = parts.rotate_last(want, starts, table)
    halves = 2 if ratio == 4 else 1
    raw = jnp.full((1, 2 * ratio + 4, 2 * halves * 128), jnp.nan)
    for cut in cuts:
        cache = Compressed(raw, jnp.full((8, 1, 128), jnp.nan))
        page_table, end = jnp.arange(8)[None], 0
        while end < total:
            size = min(cut, total - end)
            # The block has 3 more tokens of another text, which are rejected.
            rows = np.concatenate([x[end : end + size], normal(3, 128)])
            rows = np.concatenate([rows, np.full((cut - size, 128), np.nan, np.float32)])
            positions = end + jnp.arange(cut + 3)[None]
            valid = jnp.arange(cut + 3)[None] < size + 3
            state = nnx.state(compressor)
            cache = append(
                ratio, state, jnp.asarray(rows)[None], positions, valid, cache, page_table
            )
            end += size
        np.testing.assert_allclose(cache.pages[: len(want), 0], want, atol=2e-5)


def test_index_scores():
    q, keys, weights = normal(6, 4, 16), normal(9, 16), normal(6, 4)
    queries = IndexQueries(jnp.asarray(q)[None], jnp.asarray(weights)[None])
    got = queries.scores(jnp.asarray(keys)[None])
    wide = (a.astype(np.float64) for a in (q, keys, weights))
    np.testing.assert_allclose(got[0], parts.index_scores(*wide), atol=1e-4)


@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(1, 12))
@hypothesis.settings(max_examples=25, deadline=None)
def test_best_entries_at_ties(seed, count):
    """Ties to the lowest index, negative scores too; what is not complete is never chosen."""
    scores = np.random.default_rng(seed).integers(-2, 2, (40, 10)).astype(np.float32)
    visible = np.arange(10) < ((np.arange(40) + 1) // 4)[:, None]
    chosen = np.asarray(keep_best(jnp.asarray(scores)[None], jnp.asarray(visible)[None], count))
    want = parts.best_visible(scores, 4, count)
    assert [np.flatnonzero(row).tolist() for row in chosen[0]] == want


# Attention


def test_sparse_attention():
    """The sink takes part in the sum and has no value; a row that sees nothing gives zeros."""
    b, t, h, x, s = 2, 5, 3, 8, 11
    q, keys, sink = normal(b, t, h, x), normal(b, s, x), normal(h)
    visible = RNG.random((b, t, s)) < 0.5
    visible[1, 3] = False
    want = np.zeros((b, t, h, x))
    for row, i in np.ndindex(b, t):
        seen = keys[row, visible[row, i]].astype(np.float64)
        want[row, i] = parts.attend(q[row, i].astype(np.float64), seen, sink, 0.3)
    args = (jnp.asarray(a) for a in (q, keys, visible, sink))
    got = np.asarray(sparse_attention(*args, softmax_scale=0.3))
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert (got[1, 3] == 0).all()


# Rings


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=30, deadline=None)
def test_ring_after_rejections_is_the_text(data):
    """Calls of up to `block` tokens of which some are rejected: reads give committed rows alone."""
    window, block = data.draw(st.sampled_from([(1, 5), (4, 2), (6, 4)]))
    size, position, text = window + block, 0, []
    ring = jnp.full((1, size, 1), jnp.nan)
    for call in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(1, block))
        kept = data.draw(st.integers(1, count))
        rows = [100.0 * (call + 1) + i for i in range(count)]
        padded = jnp.asarray(rows + [jnp.nan] * (block - count), jnp.float32)[None, :, None]
        positions = position + jnp.arange(block)[None]
        start = jnp.asarray([position])
        old, old_positions = jax.jit(read_ring)(ring, start)
        # Every position that a query of this call may see and that the ring must still hold.
        for slot, held in enumerate(old_positions[0].tolist()):
            if held >= max(position - window, 0):
                assert float(old[0, slot, 0]) == text[held]
            if held < 0:
                assert float(old[0, slot, 0]) == 0
        held = set(old_positions[0].tolist())
        assert held >= set(range(max(position - window, 0), position))
        wanted = jnp.arange(position - window, position + block)[None]
        found = np.asarray(jax.jit(read_at)(ring, padded, start, wanted))[0, :, 0]
        before = [0.0 if p < 0 else text[p] for p in range(position - window, position)]
        assert found[: window + count].tolist() == before + rows
        valid = jnp.arange(block)[None] < count
        ring = jax.jit(write_ring)(ring, padded, positions, valid)
        text[position:] = rows[:kept]
        position += kept


def test_ring_of_a_prompt_longer_than_itself_holds_its_end():
    rows = jnp.arange(10.0)[None, :, None]
    valid = jnp.arange(10)[None] < 9
    ring = write_ring(jnp.full((1, 4, 1), jnp.nan), rows, jnp.arange(10)[None], valid)
    assert ring[0, :, 0].tolist() == [8.0, 5.0, 6.0, 7.0]
