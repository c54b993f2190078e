"""DeepSeek-V4 and MTP through `convert`: every stored type, every name form, every draft."""

import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest

from convert import table_v4
from convert.orbax_in import Checkpoint
from jaxspec.config import read_config
from jaxspec.model import parameter_specs
from tests import fixtures_v4, golden_case
from tests.convert.trees import assert_same, assert_same_files, stored
from tests.convert.trees_v4 import (
    TINY,
    call_fp4,
    dequantized,
    expected,
    of_transformers,
    prefixed,
    renamed,
    saved_by_transformers,
)
from tests.fixtures import HFModel

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
EXPERT = "layers.1.ffn.experts.2.w1"
EXPERT_PATH = "target/layers/1/ffn/experts/w1/weight"


def tiny(**options) -> HFModel:
    return fixtures_v4.v4(**{**TINY, **options})


def without_draft(model: HFModel) -> HFModel:
    kept = {name: array for name, array in model.tensors.items() if not name.startswith("mtp.")}
    return HFModel(model.config, kept)


@pytest.mark.parametrize("case", ["v4_bf16", "v4_quant"])
def test_a_golden_case_keeps_every_byte(case, tmp_path, done):
    folder = golden_case.FOLDER / case
    done("convert", folder, tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), expected(golden_case.checkpoint(case)))
    assert Checkpoint(tmp_path / "dst").metadata.draft == "mtp"
    done("verify", folder, tmp_path / "dst")
    done("verify", tmp_path / "dst")
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(folder, tmp_path / "out")


def test_every_parameter_can_be_found_from_its_tensors_and_back():
    config = read_config(fixtures_v4.v4_config(compress_ratios=(0, 4, 128, 0, 4)))
    names = table_v4.table(config, ["mtp.2.enorm.weight"])
    for path in parameter_specs(config, "mtp"):
        ways = list(names.sources(path))
        assert ways, path
        for match in (match for way in ways for match in way):
            found = names.find(match.tensor)
            assert found is not None and (found.rule, found.tensor) == (match.rule, match.tensor)
            assert path in {part.path for part in match.parts}
    assert names.find("mtp.2.enorm.weight") and not names.find("mtp.3.enorm.weight")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("form", [prefixed, of_transformers, saved_by_transformers])
def test_every_name_form_gives_the_same_tree(form, quantized, tmp_path, done):
    model = tiny(quantized=quantized, compress_ratios=(0, 4, 128, 0))
    source = form(model).write(tmp_path / "src", num_shards=2)
    has_draft = form is prefixed
    done("convert", source, tmp_path / "dst", "--draft", "auto" if has_draft else "none")
    assert_same(stored(tmp_path / "dst"), expected(model if has_draft else without_draft(model)))
    done("verify", source, tmp_path / "dst")
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")


def test_several_draft_layers_keep_their_numbers(tmp_path, done):
    model = tiny(compress_ratios=(0, 4, 0, 4, 128), num_nextn_predict_layers=3)
    for name, form in {"official": model, "prefixed": prefixed(model)}.items():
        done("convert", form.write(tmp_path / name), tmp_path / f"{name}.dst")
        assert_same(stored(tmp_path / f"{name}.dst"), expected(model))
        report = json.loads(done("inspect", tmp_path / name, "--json").out)
        assert (report["drafts"], report["stages"]) == (["mtp"], 3)
        report = json.loads(done("inspect", tmp_path / f"{name}.dst", "--json").out)
        assert (report["drafts"], report["stages"]) == (["mtp"], 3)


@pytest.mark.parametrize("ending", [".scale", ".weight_scale_inv", ".weight_scale"])
def test_scales_are_found_under_each_of_their_names(ending, tmp_path, done):
    """D06: values would be 512 times too large if the scales were not found."""
    model = tiny(quantized=True, expert_dtype="fp8")
    for name, array in model.tensors.items():
        if array.dtype == E8M0:
            model.tensors[name] = np.full_like(array, 2.0**-9)
    scales = {name for name, array in model.tensors.items() if array.dtype == E8M0}
    other = renamed(
        model, lambda name: re.sub(r"\.scale$", ending, name) if name in scales else name
    )
    done("convert", other.write(tmp_path / "src"), tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), expected(model))
    done("convert", tmp_path / "src", tmp_path / "wide", "--weights", "bf16")
    want = model.tensors["layers.0.attn.wkv.weight"].astype(np.float32) * 2.0**-9
    got = stored(tmp_path / "wide")["target/layers/0/attn/wkv/weight"]
    np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", ["layers.0.attn.wkv", EXPERT, "mtp.0.e_proj"])
def test_a_weight_without_its_scale_is_refused(name, tmp_path, refused):
    """D06: the third of its cases."""
    model = tiny(quantized=True)
    del model.tensors[f"{name}.scale"]
    line = refused("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert f"{name}.weight is" in line and f"{name}.scale is missing" in line


@pytest.mark.parametrize("scale_type", ["e8m0", "float32"])
@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_a_scale_byte_is_an_exponent(expert_dtype, scale_type, tmp_path, done):
    """D07: 120 stands for 2^-7 on FP8 and on FP4 experts; a float32 2^-7 says the same."""
    model = tiny(quantized=True, expert_dtype=expert_dtype)
    for name, array in model.tensors.items():
        if array.dtype == E8M0:
            byte = np.full(array.shape, 120, np.uint8).view(E8M0)
            model.tensors[name] = byte if scale_type == "e8m0" else byte.astype(np.float32)
    source = model.write(tmp_path / "src")
    done("convert", source, tmp_path / "dst")
    tree = stored(tmp_path / "dst")
    assert_same(tree, expected(model))
    done("convert", source, tmp_path / "wide", "--weights", "bf16")
    wide = stored(tmp_path / "wide")
    assert_same(wide, dequantized(tree))
    values = tree[f"{EXPERT_PATH}/values"]
    largest = 6.0 if expert_dtype == "fp4" else np.abs(values.astype(np.float32)).max()
    assert np.abs(wide[EXPERT_PATH].astype(np.float32)).max() == largest * 2.0**-7


def test_fp8_experts_need_no_word_in_the_config(tmp_path, done):
    """D08 (a): the tensor's type decides."""
    model = tiny(quantized=True, expert_dtype="fp8")
    del model.config["expert_dtype"]
    done("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert stored(tmp_path / "dst")[f"{EXPERT_PATH}/values"].dtype == ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(("said", "is_fp4"), [("fp8", True), ("fp4", False), ("bf16", True)])
def test_a_config_that_contradicts_the_experts_is_refused(said, is_fp4, tmp_path, refused):
    """D08 (b)."""
    model = tiny(quantized=True, expert_dtype="fp4" if is_fp4 else "fp8")
    model.config["expert_dtype"] = said
    line = refused("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert f"expert_dtype='{said}'" in line and "ffn.experts.0.w" in line
    assert ("I8" if is_fp4 else "F8_E4M3") in line


@pytest.mark.parametrize(
    "name", ["mtp.0.e_proj", "layers.0.attn.wo_a", "layers.1.attn.indexer.wq_b"]
)
def test_one_bf16_matrix_in_a_quantized_model_passes_through(name, tmp_path, done):
    """D08 (c): it has no scale, and needs none."""
    model = tiny(quantized=True)
    del model.tensors[f"{name}.scale"]
    model.tensors[f"{name}.weight"] = model.tensors[f"{name}.weight"].astype(ml_dtypes.bfloat16)
    source = model.write(tmp_path / "src")
    done("convert", source, tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), expected(model))
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")


@pytest.mark.parametrize("stored_type", ["I8", "U8", "F4"])
def test_packed_fp4_is_unpacked_low_half_first(stored_type, tmp_path, done):
    """D09: all 256 bytes; 0xF3 is 1.5 and then -6; 8 is negative zero."""
    model = tiny(quantized=True)
    packed = model.tensors[f"{EXPERT}.weight"]
    every_byte = np.resize(np.arange(256, dtype=np.uint8), packed.shape)
    model.tensors[f"{EXPERT}.weight"] = every_byte.view(np.int8)
    model.tensors[f"{EXPERT}.scale"] = np.ones_like(model.tensors[f"{EXPERT}.scale"])
    want = expected(model)
    if stored_type == "U8":
        model.tensors |= {
            name: array.view(np.uint8)
            for name, array in model.tensors.items()
            if array.dtype == np.int8
        }
    source = model.write(tmp_path / "src")
    if stored_type == "F4":
        call_fp4(source / "model.safetensors")
    done("convert", source, tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), want)
    done("verify", source, tmp_path / "dst")
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")
    done("convert", source, tmp_path / "wide", "--weights", "bf16")
    wide = stored(tmp_path / "wide")
    assert_same(wide, dequantized(want))
    row, column = np.argwhere(every_byte == 0xF3)[0]
    assert wide[EXPERT_PATH][2, row, 2 * column : 2 * column + 2].tolist() == [1.5, -6.0]
    row, column = np.argwhere(every_byte == 0x08)[0]
    assert np.signbit(wide[EXPERT_PATH][2, row, 2 * column])
    done("verify", source, tmp_path / "wide")


def test_only_experts_may_be_packed(tmp_path, refused):
    model = tiny(quantized=True)
    name = "layers.0.attn.wkv.weight"
    model.tensors[name] = model.tensors[name].view(np.int8)
    line = refused("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert f"{name} has type I8; BF16 or F16 or F32 or F8_E4M3 is needed" in line


@pytest.mark.parametrize(
    "names",
    [
        ("mtp.0.emb.tok_emb", "mtp.0.head"),
        ("model.layers.2.embed_tokens", "model.layers.2.shared_head.head"),
    ],
)
def test_copies_in_the_draft_are_stored_once(names, tmp_path, done):
    """D11: with copies or without, the tree is the same; with them, both come back."""
    model = tiny(quantized=True)
    want = expected(model)
    for name, owner in zip(names, ("embed", "head"), strict=True):
        model.tensors[f"{name}.weight"] = model.tensors[f"{owner}.weight"]
    source = model.write(tmp_path / "src", num_shards=2)
    assert "2 copies stored once" in done("convert", source, tmp_path / "dst").out
    assert_same(stored(tmp_path / "dst"), want)
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")


def test_a_head_of_the_draft_alone_is_kept(tmp_path, done):
    model = tiny()
    own = -model.tensors["head.weight"]
    want = expected(model) | {"draft/head/weight": own}
    model.tensors["mtp.0.head.weight"] = own
    done("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert_same(stored(tmp_path / "dst"), want)


@pytest.mark.parametrize(
    "name",
    [
        "enorm.weight",
        "hnorm.weight",
        "e_proj.weight",
        "h_proj.weight",
        "norm.weight",
        "hc_head_fn",
        "hc_head_base",
        "hc_head_scale",
        "hc_attn_fn",
        "attn.attn_sink",
        "attn.wkv.weight",
        "attn.kv_norm.weight",
        "ffn_norm.weight",
        "ffn.gate.bias",
        "ffn.gate.weight",
        "ffn.experts.2.w3.weight",
        "ffn.shared_experts.w1.weight",
    ],
)
def test_each_tensor_of_the_draft_is_needed(name, tmp_path, refused):
    """D12 (a)."""
    model = tiny()
    del model.tensors[f"mtp.0.{name}"]
    line = refused("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert f"tensor mtp.0.{name} is missing" in line and "--draft none" in line


@pytest.mark.parametrize("draft", ["auto", "none"])
@pytest.mark.parametrize(
    "name", ["mtp.0.extra.weight", "mtp.0.ffn.gate.tid2eid", "mtp.1.enorm.weight"]
)
def test_an_unknown_tensor_of_the_draft_is_refused(name, draft, tmp_path, command, refused):
    """D12 (b); without the draft, what a draft may have is left out with it."""
    model = tiny()
    model.tensors[name] = np.zeros(3, np.float32)
    source = model.write(tmp_path / "src")
    if draft == "auto" or "extra" in name:
        line = refused("convert", source, tmp_path / "dst", "--draft", draft)
        assert f"unknown tensor {name}" in line
    else:
        assert command("convert", source, tmp_path / "dst", "--draft", draft).code == 0


@pytest.mark.parametrize("form", [lambda model: model, prefixed])
def test_a_file_without_the_announced_draft_says_which_layers(form, tmp_path, done, refused):
    model = tiny(compress_ratios=(0, 4, 0, 0), num_nextn_predict_layers=2)
    source = form(without_draft(model)).write(tmp_path / "src")
    line = refused("convert", source, tmp_path / "dst")
    assert "no tensor of mtp.0, mtp.1 (or model.layers.2, model.layers.3)" in line
    assert "--draft none" in line and "inspect lists all" not in line
    report = json.loads(done("inspect", source, "--json").out)
    assert (report["drafts"], report["stages"], report["missing"]) == ([], 0, ["mtp.0, mtp.1"])
    done("convert", source, tmp_path / "dst", "--draft", "none")
    assert_same(stored(tmp_path / "dst"), expected(without_draft(model)))


@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_dequantizing_leaves_integers_and_float32_alone(integer, tmp_path, done):
    """D14: the table of ids is exact, and what is float32 stays float32."""
    model = tiny(quantized=True, n_routed_experts=16)
    name = "layers.0.ffn.gate.tid2eid"
    model.tensors[name] = model.tensors[name].astype(integer)
    bias = (6.9 + 0.001 * np.arange(16)).astype(np.float32)  # one value in BF16
    model.tensors["layers.1.ffn.gate.bias"] = model.tensors["mtp.0.ffn.gate.bias"] = bias
    source = model.write(tmp_path / "src")
    done("convert", source, tmp_path / "wide", "--weights", "bf16")
    tree = stored(tmp_path / "wide")
    table = tree["target/layers/0/ffn/gate/tid2eid"]
    assert table.dtype == np.int32 and np.array_equal(table, model.tensors[name])
    for path in ("target/layers/1", "draft/layers/0/block"):
        assert tree[f"{path}/ffn/gate/bias"].tobytes() == bias.tobytes()
    for path, array in tree.items():
        is_float32 = path.endswith(("/fn", "/base", "/scale", "/attn_sink", "/ape", "/bias"))
        assert is_float32 == (array.dtype == np.float32), path
    done("convert", source, tmp_path / "dst")
    done("export", tmp_path / "dst", tmp_path / "out")
    assert_same_files(source, tmp_path / "out")


@pytest.mark.parametrize("number", [-1, 4, 2**32])
def test_an_id_of_no_expert_is_refused(number, tmp_path, refused):
    model = tiny()
    name = "layers.0.ffn.gate.tid2eid"
    table = model.tensors[name].astype(np.int64)
    table[5, 1] = number
    model.tensors[name] = table
    line = refused("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert f"{name} holds the id {number}; there are 4 experts" in line
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_a_table_of_ids_must_be_integers(dtype, tmp_path, refused):
    model = tiny()
    name = "layers.0.ffn.gate.tid2eid"
    model.tensors[name] = model.tensors[name].astype(dtype)
    line = refused("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert name in line and "I32 or I64 is needed" in line


@pytest.mark.parametrize("scale_type", ["e8m0", "float32"])
def test_one_stack_has_one_type(scale_type, tmp_path, refused):
    model = tiny(quantized=True)
    if scale_type == "e8m0":
        model.tensors[f"{EXPERT}.weight"] = model.tensors[f"{EXPERT}.weight"].view(np.uint8)
    else:
        model.tensors[f"{EXPERT}.scale"] = model.tensors[f"{EXPERT}.scale"].astype(np.float32)
    line = refused("convert", model.write(tmp_path / "src"), tmp_path / "dst")
    assert EXPERT in line and "is needed" in line


def as_dspark(model: HFModel) -> HFModel:
    """The draft's names as a DSpark checkpoint with three stages has them."""
    d, w = model.config["hidden_size"], model.config["vocab_size"]
    joins = ("mtp.0.enorm", "mtp.0.hnorm", "mtp.0.e_proj", "mtp.0.h_proj")
    tensors = {name: a for name, a in model.tensors.items() if not name.startswith(joins)}
    tensors |= {
        name.replace("mtp.0.", f"mtp.{stage}."): array
        for name, array in tensors.items()
        if name.startswith("mtp.0.")
        for stage in (1, 2)
    }
    shapes = {
        "mtp.0.main_proj.weight": (d, 2 * d),
        "mtp.0.main_norm.weight": (d,),
        "mtp.2.markov_head.markov_w1.weight": (w, 8),
        "mtp.2.markov_head.markov_w2.weight": (w, 8),
        "mtp.2.confidence_head.proj.weight": (1, d + 8),
    }
    tensors |= {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in shapes.items()}
    return HFModel({**model.config, "dspark_block_size": 5}, tensors)


def test_dspark_is_recognized_and_only_its_target_converts(tmp_path, done, refused):
    """The config announces one layer, as the released one does; the tensors say what it is."""
    model = tiny()
    source = as_dspark(model).write(tmp_path / "src")
    report = json.loads(done("inspect", source, "--json").out)
    assert (report["drafts"], report["stages"], report["faults"]) == (["dspark"], 3, [])
    for draft in ("auto", "mtp"):
        line = refused("convert", source, tmp_path / "dst", "--draft", draft)
        assert "DSpark is not supported yet" in line and "3 stages" in line
        assert "convert with --draft none to take the target alone" in line
    done("convert", source, tmp_path / "dst", "--draft", "none")
    assert_same(stored(tmp_path / "dst"), expected(without_draft(model)))


def test_a_draft_of_another_family_is_refused(tmp_path, refused):
    source = tiny().write(tmp_path / "src")
    assert "no NextN" in refused("convert", source, tmp_path / "dst", "--draft", "nextn")


def test_what_was_changed_in_a_packed_matrix_is_noticed(tmp_path, done, refused):
    model = tiny(quantized=True)
    source = model.write(tmp_path / "src")
    done("convert", source, tmp_path / "dst")
    shutil.rmtree(source)
    packed = model.tensors[f"{EXPERT}.weight"].copy()
    packed[3, 5] ^= 1
    model.tensors[f"{EXPERT}.weight"] = packed
    line = refused("verify", model.write(tmp_path / "src"), tmp_path / "dst")
    assert f"{EXPERT_PATH}/values" in line
