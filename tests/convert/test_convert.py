"""`convert` against trees worked out by hand: layouts, forms, drafts, block shapes, types."""

import random
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

from convert import cli
from convert.dequantize import to_bf16
from convert.orbax_in import Checkpoint
from pallas_kernels.quantized import dequantize, quantize_blocks
from tests import fixtures, golden_case
from tests.convert.trees import (
    TINY,
    assert_same,
    assert_same_files,
    dequantized,
    expected,
    fuse_experts,
    stored,
)


@pytest.mark.parametrize("case", ["v3_bf16", "v3_fp8"])
def test_a_golden_case_keeps_every_byte(case, tmp_path, done):
    folder = golden_case.FOLDER / case
    done("convert", folder, tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), expected(golden_case.checkpoint(case)))
    done("verify", folder, tmp_path / "dst")
    done("verify", tmp_path / "dst")
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(folder, tmp_path / "out")


DEEP = {"num_hidden_layers": 63, "hidden_size": 16, "kv_lora_rank": 16, "n_routed_experts": 4}


@pytest.mark.parametrize("draft", ["auto", "none"])
@pytest.mark.parametrize("options", [{"quantized": True}, DEEP], ids=["layer 4", "layer 63"])
def test_the_draft_is_the_layer_behind_the_last(options, draft, tmp_path, done):
    """D01: the draft's layer number comes from the config; 61 means nothing."""
    model = fixtures.v3(**options)
    source = model.write(tmp_path / "src")
    done("convert", source, tmp_path / "dst", "--draft", draft)
    tree, want = stored(tmp_path / "dst"), expected(model)
    layers = {int(path.split("/")[2]) for path in tree if path.startswith("target/layers/")}
    assert layers == set(range(model.config["num_hidden_layers"]))
    if draft == "none":
        want = {path: array for path, array in want.items() if path.startswith("target/")}
    assert_same(tree, want)
    assert Checkpoint(tmp_path / "dst").metadata.draft == (None if draft == "none" else "nextn")
    done("verify", source, tmp_path / "dst")


def test_a_weight_and_its_scales_may_lie_in_different_files(tmp_path, done):
    """D02: the scales of layer 2 and one half of its attention apart, file names backwards."""
    model = fixtures.v3(quantized=True)

    def shard_of(name: str) -> int:
        if "layers.2." in name and name.endswith("_scale_inv"):
            return 0
        return 1 if "kv_a_proj" in name else 2

    names = [f"model-{letter}.safetensors" for letter in "cba"]
    source = model.write(tmp_path / "src", num_shards=3, shard_of=shard_of, file_names=names)
    done("convert", source, tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), expected(model))
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")


@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(num_shards=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_any_split_and_order_gives_the_same_tree_and_comes_back(num_shards, seed, tmp_path_factory):
    model = fixtures.v3(quantized=True, **TINY)
    folder = tmp_path_factory.mktemp("any")
    rng = random.Random(seed)
    place = {name: (rng.randrange(num_shards), rng.random()) for name in model.tensors}
    source = model.write(
        folder / "src",
        num_shards=num_shards,
        shard_of=lambda name: place[name][0],
        order=lambda name: place[name][1],
    )
    assert cli.main(["convert", str(source), str(folder / "dst")]) == 0
    assert_same(stored(folder / "dst"), expected(model))
    assert cli.main(["export", str(folder / "dst"), str(folder / "out")]) == 0
    assert_same_files(source, folder / "out")


def test_no_float_loses_its_bits(tmp_path, done):
    """D05: FP8 NaN (0x7F, 0xFF), negative zero (0x80) and every other byte arrive."""
    model = fixtures.v3(quantized=True, **TINY)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    every_byte = np.resize(np.arange(256, dtype=np.uint8), model.tensors[name].shape)
    model.tensors[name] = every_byte.view(ml_dtypes.float8_e4m3fn)
    norm = model.tensors["model.norm.weight"].view(np.uint16).copy()
    norm[:4] = 0x7FC1, 0x8000, 0xFF80, 0x0001  # a NaN with payload, -0, -inf, the least positive
    model.tensors["model.norm.weight"] = norm.view(ml_dtypes.bfloat16)
    done("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), expected(model))
    done("verify", tmp_path / "src", tmp_path / "dst")


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (48, 80)])
def test_ragged_blocks_keep_their_own_scale(block, tmp_path, done):
    """D10: 192 rows are a block and a half of 128; other sizes leave ragged columns, too."""
    model = fixtures.v3(quantized=True, weight_block_size=block, **TINY)
    source = model.write(tmp_path / "src")
    done("convert", source, tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), expected(model))
    done("convert", source, tmp_path / "wide", "--weights", "bf16")
    tree = stored(tmp_path / "wide")
    assert_same(tree, dequantized(expected(model), block))
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    values, scales = model.tensors[name], model.tensors[f"{name}_scale_inv"]
    row = (values[191].astype(np.float32) * np.repeat(scales[-1], block[1])[:128]).astype(
        ml_dtypes.bfloat16
    )
    np.testing.assert_array_equal(
        tree["target/layers/1/self_attn/kv_a_proj_with_mqa/weight"][191], row
    )
    done("verify", source, tmp_path / "wide")
    done("verify", tmp_path / "wide")


def test_a_large_matrix_is_dequantized_in_parts(monkeypatch):
    rng = np.random.default_rng(0)
    w = quantize_blocks(rng.standard_normal((2, 300, 50), np.float32), (64, 32))
    want = dequantize(w, ml_dtypes.bfloat16)
    for count in (1, 5000, 10**9):
        monkeypatch.setattr("convert.dequantize.VALUES_AT_A_TIME", count)
        np.testing.assert_array_equal(to_bf16(w).view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("quantized", [False, True])
def test_identical_copies_in_the_draft_are_stored_once(quantized, tmp_path, done):
    """D11: with copies or without, the tree is the same; with them, both come back."""
    trees = []
    for own_copies in (True, False):
        model = fixtures.v3(quantized=quantized, own_copies=own_copies, **TINY)
        folder = tmp_path / str(own_copies)
        source = model.write(folder / "src", num_shards=2)
        done("convert", source, folder / "dst")
        trees.append(stored(folder / "dst"))
        assert not any("draft/embed_tokens" in path or "head/head" in path for path in trees[-1])
        done("export", folder / "dst", folder / "out")
        assert_same_files(source, folder / "out")
    assert_same(*trees)


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_a_copy_that_differs_in_one_bit_is_kept(copy, tmp_path, done):
    model = fixtures.v3(**TINY)
    name = f"{model.draft_prefix}{copy}.weight"
    bits = model.tensors[name].view(np.uint16).copy()
    bits[-1, -1] ^= 1
    model.tensors[name] = bits.view(ml_dtypes.bfloat16)
    source = model.write(tmp_path / "src")
    done("convert", source, tmp_path / "dst")
    path = f"draft/{copy.replace('.', '/')}/weight"
    tree = stored(tmp_path / "dst")
    assert {p for p in tree if p.startswith("draft/") and ("embed" in p or "head/head" in p)} == {
        path
    }
    assert tree[path].tobytes() == bits.tobytes()
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")


def test_a_file_that_stops_before_the_draft_gives_its_target(tmp_path, done, refused):
    """D13: the config announces a draft that is not there."""
    model = fixtures.v3()
    model.tensors = {k: v for k, v in model.tensors.items() if model.draft_prefix not in k}
    source = model.write(tmp_path / "src", num_shards=3)
    for draft in ("auto", "nextn"):
        line = refused("convert", source, tmp_path / "dst", "--draft", draft)
        assert "model.layers.4." in line and "missing" in line and "--draft none" in line
        assert not (tmp_path / "dst").exists()
    done("convert", source, tmp_path / "dst", "--draft", "none")
    assert_same(stored(tmp_path / "dst"), expected(model))
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_router_bias_keeps_its_order_and_type(dtype, tmp_path, done):
    """D14: 0.001 apart around 6.9, a bias has 8 values left in BF16; it is never cast."""
    model = fixtures.v3(quantized=True, **{**TINY, "n_routed_experts": 128})
    bias = (6.9 + 0.001 * (np.arange(128) - 64)).astype(dtype)
    for layer in (1, 2):
        model.tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = bias
    done("convert", model.write(tmp_path / "src"), tmp_path / "dst", "--weights", "bf16")
    tree = stored(tmp_path / "dst")
    for path in ("target/layers/1/mlp", "draft/decoder/mlp"):
        array = tree[f"{path}/gate/e_score_correction_bias"]
        assert array.dtype == dtype and array.tobytes() == bias.tobytes()
    if dtype is np.float32:
        assert len(set(array.tolist())) == 128


@pytest.mark.parametrize("quantized", [False, True])
def test_the_fused_experts_of_transformers_give_the_same_tree(quantized, tmp_path, done):
    model = fixtures.v3(quantized=quantized, **TINY)
    source = fuse_experts(model).write(tmp_path / "src", num_shards=2)
    done("convert", source, tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), expected(model))
    done("verify", source, tmp_path / "dst")
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")


def test_frequencies_in_the_file_are_skipped_but_come_back(tmp_path, done):
    model = fixtures.v3(**TINY)
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        model.tensors[name] = np.arange(32, dtype=np.float32) + layer
    source = model.write(tmp_path / "src", num_shards=2)
    assert "3 skipped" in done("convert", source, tmp_path / "dst").out
    assert not any("inv_freq" in path for path in stored(tmp_path / "dst"))
    done("verify", source, tmp_path / "dst")
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_other_float_types_are_kept_as_they_are(dtype, tmp_path, done):
    model = fixtures.v3(**TINY)
    for name, array in model.tensors.items():
        if array.dtype == fixtures.BF16 and "layers.1." in name:
            model.tensors[name] = array.astype(dtype)
    done("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), expected(model))


def test_a_model_without_a_draft_and_with_plain_queries(tmp_path, done):
    """Kimi-K2's kind: no NextN layer; `q_lora_rank` may be null."""
    model = fixtures.v3(
        model_type="kimi_k2", num_nextn_predict_layers=0, q_lora_rank=None, quantized=True, **TINY
    )
    source = model.write(tmp_path / "src")
    done("convert", source, tmp_path / "dst")
    tree = stored(tmp_path / "dst")
    assert "target/layers/0/self_attn/q_proj/weight/values" in tree
    assert_same(tree, expected(model))
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")


def test_side_files_are_kept_and_hidden_ones_and_foreign_weights_are_not(tmp_path, done):
    model = fixtures.v3(**TINY)
    side_files = {"tokenizer.json": b"{ }\r\n", "generation_config.json": {"eos_token_id": [2, 3]}}
    source = model.write(tmp_path / "src", side_files=side_files)
    for name in ("inference/model.py", ".cache/x", "original.bin"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    done("convert", source, tmp_path / "dst")
    kept = {str(p.relative_to(tmp_path / "dst/hf")) for p in (tmp_path / "dst/hf").rglob("*.*")}
    assert kept == {"config.json", "tokenizer.json", "generation_config.json", "inference/model.py"}
    assert (tmp_path / "dst/hf/tokenizer.json").read_bytes() == b"{ }\r\n"
    assert Checkpoint(tmp_path / "dst").metadata.generation_config == {"eos_token_id": [2, 3]}


def test_metadata_says_what_the_checkpoint_is(tmp_path: Path, done):
    model = fixtures.v3(quantized=True, **TINY)
    done("convert", model.write(tmp_path / "src"), tmp_path / "dst", "--weights", "bf16")
    metadata = Checkpoint(tmp_path / "dst").metadata
    assert metadata.to_json() == {
        "format_version": 1,
        "family": "deepseek_v3",
        "draft": "nextn",
        "weights": "bf16",
        "hf_config": model.config,
        "generation_config": None,
    }
