"""`verify` finds one flipped bit, with the source and without; `export` is exact or refused."""

import random
import shutil
from pathlib import Path

import pytest

from tests import fixtures
from tests.convert.trees import TINY, assert_same, assert_same_files, expected, stored

MODEL = fixtures.v3(quantized=True, **TINY)
MOE = "model.layers.1.mlp.experts"
FLIPPED = {  # small arrays lie in nodes that carry a checksum of their own
    "target/layers/1/mlp/experts/up_proj/weight/values": f"{MOE}.2.up_proj.weight",
    "target/layers/1/self_attn/o_proj/weight/values": "model.layers.1.self_attn.o_proj.weight",
    "draft/eh_proj/weight": "model.layers.2.eh_proj.weight",
    "target/embed_tokens/weight": "model.embed_tokens.weight",
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A folder with `src` and `dst`; not to be changed."""
    from convert import cli

    folder = tmp_path_factory.mktemp("verify")
    MODEL.write(folder / "src", num_shards=2, side_files={"tokenizer.json": {}})
    assert cli.main(["convert", str(folder / "src"), str(folder / "dst")]) == 0
    return folder


@pytest.fixture
def folder(converted, tmp_path) -> Path:
    """A copy that may be damaged."""
    return shutil.copytree(converted, tmp_path / "copy")


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def flip_in_checkpoint(checkpoint: Path, content: bytes) -> None:
    """Flips the lowest bit of the first byte of these bytes, wherever Orbax put them."""
    for path in (checkpoint / "state").rglob("*"):
        if path.is_file() and (offset := path.read_bytes().find(content)) >= 0:
            flip(path, offset)
            return
    raise AssertionError("the bytes are not in the checkpoint")


@pytest.mark.parametrize("path", FLIPPED)
def test_one_flipped_bit_in_the_checkpoint_is_named(path, folder, refused):
    flip_in_checkpoint(folder / "dst", MODEL.tensors[FLIPPED[path]].tobytes())
    assert path in refused("verify", folder / "src", folder / "dst")
    assert path in refused("verify", folder / "dst")
    assert path in refused("export", folder / "dst", folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.parametrize("path", FLIPPED)
def test_one_flipped_bit_in_the_source_is_named(path, folder, refused, done):
    changed = MODEL.copy()
    name = FLIPPED[path]
    array = changed.tensors[name].copy()
    array.reshape(-1).view("u1")[-1] ^= 0x40
    changed.tensors[name] = array
    shutil.rmtree(folder / "src")
    changed.write(folder / "src", num_shards=2)
    line = refused("verify", folder / "src", folder / "dst")
    # A changed embedding is no longer equal to the draft's copy, which is then missed.
    assert path in line or "draft/embed_tokens/weight" in line
    done("verify", folder / "dst")


def test_a_bit_flipped_anywhere_is_found_or_harmless(folder, converted, command):
    files = sorted(path for path in (folder / "dst").rglob("*") if path.stat().st_size)
    files = [path for path in files if path.is_file()]
    rng = random.Random(0)
    want = expected(MODEL)
    for path in rng.sample(files, min(len(files), 25)):
        original = path.read_bytes()
        flip(path, rng.randrange(len(original)), rng.randrange(8))
        outcome = command("verify", folder / "dst")
        kind = path.relative_to(folder / "dst")
        if outcome.code == 0:
            assert kind.parts[0] not in ("source", "hf"), kind
            assert_same(stored(folder / "dst"), want)
        else:
            assert outcome.code == 1 and outcome.err.count("\n") == 1, kind
        path.write_bytes(original)
    assert command("verify", folder / "dst").code == 0


KEPT = ("hf/tokenizer.json", "source/index.json", "source/record.json")
HEADER = "source/headers/model-00001-of-00002.safetensors.header"


@pytest.mark.parametrize("name", [*KEPT, HEADER])
def test_a_changed_or_missing_file_is_named(name, folder, refused):
    path = folder / "dst" / name
    flip(path, -1)
    assert name in refused("verify", folder / "dst")
    assert name in refused("export", folder / "dst", folder / "out")
    assert not (folder / "out").exists()
    path.unlink()
    assert refused("verify", folder / "dst")


def test_the_export_of_a_split_is_exact(converted, tmp_path, done):
    done("export", converted / "dst", tmp_path / "out")
    assert_same_files(converted / "src", tmp_path / "out")


@pytest.mark.parametrize("option", [("--weights", "bf16"), ("--draft", "none")])
def test_what_is_not_exact_is_verified_but_not_exported(option, converted, tmp_path, done, refused):
    done("convert", converted / "src", tmp_path / "dst", *option)
    done("verify", converted / "src", tmp_path / "dst")
    done("verify", tmp_path / "dst")
    assert " ".join(option) in refused("export", tmp_path / "dst", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists_or_does_not_fit_is_refused(
    converted, tmp_path, refused, monkeypatch
):
    (tmp_path / "out").mkdir()
    assert "exists already" in refused("export", converted / "dst", tmp_path / "out")
    assert "cannot be written" in refused("export", converted / "dst", tmp_path / "a" / "b")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "1000 are free" in refused("export", converted / "dst", tmp_path / "out2")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_folders_are_refused(converted, tmp_path, refused):
    for command in ("verify", "export"):
        extra = [tmp_path / "out"] if command == "export" else []
        assert "no such folder" in refused(command, tmp_path / "nothing", *extra)
        assert "onvert" in refused(command, converted / "src", *extra)


def test_another_model_is_told_apart(converted, tmp_path, refused):
    other = fixtures.v3(quantized=True, **{**TINY, "num_hidden_layers": 3})
    line = refused("verify", other.write(tmp_path / "src"), converted / "dst")
    assert "target/layers/2/" in line and "not in" in line
    wide = fixtures.v3(**TINY)
    line = refused("verify", wide.write(tmp_path / "src2"), converted / "dst")
    assert "not in" in line
