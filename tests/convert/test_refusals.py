"""Bad input: one clear line each, and nothing half-written."""

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests import fixtures
from tests.convert.trees import TINY, fuse_experts
from tests.fixtures import HFModel

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"


def model(**options) -> HFModel:
    return fixtures.v3(quantized=True, **{**TINY, **options})


def only(folder: Path) -> list[str]:
    """What is in a folder besides the source."""
    return sorted(path.name for path in folder.iterdir() if path.name != "src")


Change = Callable[[HFModel], object]
CHANGED: dict[str, tuple[Change, str]] = {
    "missing tensor": (
        lambda m: m.tensors.pop("model.layers.1.mlp.gate.weight"),
        "model.layers.1.mlp.gate.weight is missing",
    ),
    "missing expert": (lambda m: [m.tensors.pop(EXPERT + s) for s in ("", "_scale_inv")], EXPERT),
    "missing scale": (lambda m: m.tensors.pop(f"{EXPERT}_scale_inv"), "_scale_inv is missing"),
    "missing weight of a scale": (lambda m: m.tensors.pop(EXPERT), f"{EXPERT}_scale_inv"),
    "unknown tensor": (
        lambda m: m.tensors.update({"model.layers.1.mlp.extra.weight": np.zeros(3, np.float32)}),
        "unknown tensor model.layers.1.mlp.extra.weight",
    ),
    "a dense layer's tensor in a routed one": (
        lambda m: m.tensors.update({"model.layers.1.mlp.up_proj.weight": np.zeros(3, np.float32)}),
        "unknown tensor model.layers.1.mlp.up_proj.weight",
    ),
    "wrong shape": (
        lambda m: m.tensors.update({"model.norm.weight": m.tensors["model.norm.weight"][:-1]}),
        "model.norm.weight has shape (127,); (128,) is needed",
    ),
    "transposed": (
        lambda m: m.tensors.update({EXPERT: np.ascontiguousarray(m.tensors[EXPERT].T)}),
        f"{EXPERT} has shape (128, 64); (64, 128) is needed",
    ),
    "scale with one row too few": (
        lambda m: m.tensors.update({f"{KV_A}_scale_inv": m.tensors[f"{KV_A}_scale_inv"][:1]}),
        "shape (1, 1); (2, 1) for blocks of 128x128 is needed",
    ),
    "wrong type": (
        lambda m: m.tensors.update({"model.norm.weight": np.zeros(128, np.int32)}),
        "model.norm.weight has type I32",
    ),
    "FP8 where none is": (
        lambda m: m.tensors.update({"model.norm.weight": np.zeros(128, ml_dtypes.float8_e4m3fn)}),
        "model.norm.weight has type F8_E4M3",
    ),
    "wrong type of a scale": (
        lambda m: m.tensors.update(
            {f"{KV_A}_scale_inv": m.tensors[f"{KV_A}_scale_inv"].astype(ml_dtypes.bfloat16)}
        ),
        f"{KV_A}_scale_inv has type BF16; F32 or F8_E8M0 is needed",
    ),
    "one expert of another type": (
        lambda m: [
            m.tensors.update({EXPERT: m.tensors[EXPERT].astype(ml_dtypes.bfloat16)}),
            m.tensors.pop(f"{EXPERT}_scale_inv"),
        ],
        "has type BF16; F8_E4M3",
    ),
    "given twice": (
        lambda m: m.tensors.update(
            {k: v for k, v in fuse_experts(m).tensors.items() if "1.mlp.experts.down" in k}
        ),
        "the same parameter",
    ),
    "NVFP4": (
        lambda m: m.config.update(quantization_config={"quant_algo": "NVFP4"}),
        "NVFP4",
    ),
    "two draft layers": (
        lambda m: m.config.update(num_nextn_predict_layers=2),
        "num_nextn_predict_layers",
    ),
    "another model": (lambda m: m.config.update(model_type="llama"), "model_type='llama'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGED)
def test_a_changed_checkpoint_is_refused(kind, tmp_path, refused):
    change, reason = CHANGED[kind]
    changed = model()
    change(changed)
    source = changed.write(tmp_path / "src", num_shards=2)
    assert reason in refused("convert", source, tmp_path / "dst")
    assert only(tmp_path) == []


def test_fp8_in_the_config_alone_is_refused(tmp_path, refused):
    changed = fixtures.v3(**TINY)
    changed.config = fixtures.v3_config(quantized=True, **TINY)
    line = refused("convert", changed.write(tmp_path / "src"), tmp_path / "dst")
    assert "quantization_config" in line and "remove" in line


@pytest.mark.parametrize("draft", ["nextn"])
def test_a_draft_that_is_not_announced_is_refused(draft, tmp_path, refused):
    source = model(num_nextn_predict_layers=0).write(tmp_path / "src")
    assert "no NextN layer" in refused("convert", source, tmp_path / "dst", "--draft", draft)
    assert only(tmp_path) == []


def test_a_missing_shard_is_named(tmp_path, refused):
    """D03 (a)."""
    source = model().write(tmp_path / "src", num_shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refused(
        "convert", source, tmp_path / "dst"
    )
    assert only(tmp_path) == []


def test_a_tensor_that_only_the_index_has_is_named(tmp_path, refused):
    """D03 (b)."""
    whole = model()
    source = whole.write(tmp_path / "src", num_shards=3)
    index = (source / "model.safetensors.index.json").read_bytes()
    shutil.rmtree(source)
    name = f"{whole.draft_prefix}hnorm.weight"
    del whole.tensors[name]
    whole.write(source, num_shards=3)
    (source / "model.safetensors.index.json").write_bytes(index)
    line = refused("convert", source, tmp_path / "dst")
    assert ".safetensors: tensor" in line and "index" in line
    assert only(tmp_path) == []


def test_the_index_is_checked_in_both_directions(tmp_path, refused):
    source = model().write(tmp_path / "src", num_shards=2)
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    assert "model.norm.weight is not in the index" in refused("convert", source, tmp_path / "dst")
    index["weight_map"]["model.norm.weight"] = "../src/model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    assert "not the name of a file" in refused("convert", source, tmp_path / "dst")
    path.write_text("{")
    assert "not valid JSON" in refused("convert", source, tmp_path / "dst")
    path.write_text("{}")
    assert "no weight_map" in refused("convert", source, tmp_path / "dst")
    assert only(tmp_path) == []


def test_a_file_that_the_index_does_not_know_is_named(tmp_path, refused):
    source = model().write(tmp_path / "src", num_shards=2)
    shutil.copy(source / "model-00001-of-00002.safetensors", source / "extra.safetensors")
    assert "extra.safetensors is not in the index" in refused("convert", source, tmp_path / "dst")
    (source / "model.safetensors.index.json").unlink()
    assert "is in extra.safetensors and in" in refused("convert", source, tmp_path / "dst")


def test_what_is_no_checkpoint_folder_is_refused(tmp_path, refused):
    dst = tmp_path / "dst"
    assert "no such folder" in refused("convert", tmp_path / "nothing", dst)
    (tmp_path / "file").write_text("x")
    assert "not a folder" in refused("convert", tmp_path / "file", dst)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused("convert", tmp_path / "empty", dst)
    source = model().write(tmp_path / "src")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "no safetensors file" in refused("convert", source, dst)
    (source / "model.safetensors").write_bytes(b"not safetensors")
    assert "model.safetensors" in refused("convert", source, dst)
    (source / "config.json").write_text("[]")
    assert "not a JSON object" in refused("convert", source, dst)
    assert not dst.exists()


def test_a_repository_needs_the_hub_extra(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = refused("convert", "deepseek-ai/DeepSeek-V3", tmp_path / "dst")
    assert "deepseek-ai/DeepSeek-V3: no such folder" in line and "jaxspec[hub]" in line


def test_a_repository_is_downloaded_with_the_hub_extra(tmp_path, done, refused, monkeypatch):
    """A stand-in for the client; what it raises is one line as well."""
    source = model().write(tmp_path / "src")

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        if name == "someone/else":
            raise RuntimeError("404:\nnot found")
        assert name == "someone/model" and "*.safetensors" in allow_patterns
        return str(source)

    client = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    monkeypatch.chdir(tmp_path)
    done("convert", "someone/model", tmp_path / "dst")
    done("verify", source, tmp_path / "dst")
    assert "404: not found" in refused("convert", "someone/else", tmp_path / "dst2")


def test_a_destination_that_exists_is_left_alone(tmp_path, refused):
    source = model().write(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    assert "exists already" in refused("convert", source, tmp_path / "dst")
    assert only(tmp_path) == ["dst"] and not list((tmp_path / "dst").iterdir())


def test_a_destination_inside_the_source_is_refused(tmp_path, refused):
    source = model().write(tmp_path / "src")
    assert "inside the source" in refused("convert", source, source / "dst")
    assert not list(source.glob("dst*"))


def test_a_destination_without_a_parent_is_refused(tmp_path, refused):
    source = model().write(tmp_path / "src")
    assert "parent is not a folder" in refused("convert", source, tmp_path / "a" / "dst")
    (tmp_path / "file").write_text("")
    assert "parent is not a folder" in refused("convert", source, tmp_path / "file" / "dst")


def test_an_unwritable_destination_is_refused(tmp_path, refused, monkeypatch):
    """Root may write anywhere, so the question is answered here."""
    source = model().write(tmp_path / "src")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert "not writable" in refused("convert", source, tmp_path / "dst")
    assert only(tmp_path) == []


def test_a_destination_that_cannot_be_made_is_refused(tmp_path, refused):
    """What a read-only file system answers, seen by root as well."""
    source = model().write(tmp_path / "src")
    assert refused("convert", source, Path("/proc/jaxspec-dst"))


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, refused, monkeypatch):
    source = model().write(tmp_path / "src")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    line = refused("convert", source, tmp_path / "dst")
    assert "bytes are needed there and 1000 are free" in line
    assert only(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    """No file may grow beyond 100 kB, so a write fails in the middle of the conversion."""
    source = model().write(tmp_path / "src")
    program = """
import resource, sys
from convert.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.exit(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", program, "convert", str(source), str(tmp_path / "dst")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("jaxspec-convert: ") and result.stderr.count("\n") == 1
    assert "cannot be written" in result.stderr
    assert only(tmp_path) == []
