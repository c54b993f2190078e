"""Usage, exit codes, and `inspect`."""

import json

import numpy as np
import pytest

from convert import cli
from tests import fixtures
from tests.convert.trees import TINY, fuse_experts


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["convert"],
        ["convert", "src"],
        ["convert", "src", "dst", "--weights", "fp4"],
        ["convert", "src", "dst", "--draft", "eagle"],
        ["frobnicate"],
        ["verify"],
        ["verify", "a", "b", "c"],
        ["export", "dst"],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("convert", "inspect", "verify", "export"))


def test_inspect_describes_a_folder(tmp_path, done):
    model = fixtures.v3(quantized=True, **TINY)
    source = model.write(tmp_path / "src", num_shards=2)
    text = done("inspect", source).out
    assert "deepseek_v3" in text and "nextn" in text and "F8_E4M3" in text
    report = json.loads(done("inspect", source, "--json").out)
    assert report["family"] == "deepseek_v3" and report["drafts"] == ["nextn"]
    assert report["tensors"] == len(model.tensors)
    assert report["bytes"] == sum(array.nbytes for array in model.tensors.values())
    assert sum(report["dtypes"].values()) == len(model.tensors)
    assert report["missing"] == report["unknown"] == report["wrong"] == report["faults"] == []


def test_inspect_lists_every_fault_at_once(tmp_path, done):
    model = fixtures.v3(**TINY)
    del model.tensors["model.norm.weight"]
    del model.tensors[f"{model.draft_prefix}hnorm.weight"]
    model.tensors["model.extra"] = np.zeros(3, np.float32)
    model.tensors["lm_head.weight"] = model.tensors["lm_head.weight"][:5]
    model.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, np.float32)
    model.config["some_new_key"] = 1
    source = model.write(tmp_path / "src")
    report = json.loads(done("inspect", source, "--json").out)
    assert report["missing"] == [f"{model.draft_prefix}hnorm.weight", "model.norm.weight"]
    assert report["unknown"] == ["model.extra"]
    assert report["wrong"] == ["lm_head.weight"]
    assert report["drafts"] == []
    assert list(report["skipped"]) == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert report["unknown_config_keys"] == ["some_new_key"]
    text = done("inspect", source).out
    assert all(line in text for line in report["faults"]) and "some_new_key" in text


def test_inspect_knows_transformers_form_and_models_without_a_draft(tmp_path, done):
    model = fuse_experts(fixtures.v3(num_nextn_predict_layers=0, **TINY))
    report = json.loads(done("inspect", model.write(tmp_path / "src"), "--json").out)
    assert report["drafts"] == report["faults"] == []


def test_inspect_describes_a_checkpoint(tmp_path, done):
    source = fixtures.v3(quantized=True, **TINY).write(tmp_path / "src")
    done("convert", source, tmp_path / "dst")
    report = json.loads(done("inspect", tmp_path / "dst", "--json").out)
    assert report["family"] == "deepseek_v3" and report["drafts"] == ["nextn"]
    assert set(report["dtypes"]) == {"bfloat16", "float32", "float8_e4m3fn"}


def test_inspect_refuses_what_is_neither(tmp_path, refused):
    assert "no such folder" in refused("inspect", tmp_path / "nothing")
    assert "no config.json" in refused("inspect", tmp_path)
