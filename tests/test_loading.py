"""Saving and loading: every byte on any mesh, and what is no checkpoint of ours is refused."""

import dataclasses
import json
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx

import jaxspec
from jaxspec import checkpoint, loading
from tests import fixtures, models

MODEL: dict[str, Any] = {"num_hidden_layers": 2, "quantized": True}


def leaves(model) -> dict[str, np.ndarray]:
    """Every array of a model by its path, on the host."""
    flat = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in flat
    }


def assert_same_bytes(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, array in got.items():
        assert array.dtype == want[name].dtype, name
        assert array.tobytes() == want[name].tobytes(), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint that was saved on 8 devices (data 4, model 2)."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    model = jaxspec.load(models.checkpoint("v3", **MODEL), mesh=models.mesh(4, 2))
    jaxspec.save(path, model)
    return path


@pytest.mark.parametrize("mesh_shape", [None, (1, 1), (2, 1), (8, 1), (2, 4)])
def test_what_one_mesh_saved_another_restores(saved, mesh_shape):
    """D39: FP8, BF16 and float32 alike; the source's own bytes are what is compared with."""
    mesh = models.mesh(*mesh_shape) if mesh_shape else None
    model = jaxspec.load(saved, mesh=mesh)
    got, source = leaves(model), models.source("v3", **MODEL).tensors
    assert_same_bytes(got, leaves(jaxspec.load(models.checkpoint("v3", **MODEL))))
    assert {array.dtype for array in got.values()} == {
        np.dtype(ml_dtypes.float8_e4m3fn),
        np.dtype(ml_dtypes.bfloat16),
        np.dtype(np.float32),
    }
    values = got["target/layers/0/self_attn/kv_a_proj_with_mqa/weight/values"]
    prefix = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert values.tobytes() == source[prefix].tobytes()
    scales = got["target/layers/0/self_attn/kv_a_proj_with_mqa/weight/scales"]
    assert scales.tobytes() == source[f"{prefix}_scale_inv"].tobytes()
    expert = got["draft/decoder/mlp/experts/down_proj/weight/values"][5]
    assert expert.tobytes() == source["model.layers.2.mlp.experts.5.down_proj.weight"].tobytes()


def test_saved_metadata_and_side_files_are_the_sources(saved):
    source = models.checkpoint("v3", **MODEL)
    assert checkpoint.read(saved) == checkpoint.read(source)
    names = {path.name for path in (source / checkpoint.HF_FILES).iterdir()}
    assert {path.name for path in (saved / checkpoint.HF_FILES).iterdir()} == names


def test_a_model_without_its_draft_saves_without_it(tmp_path):
    jaxspec.save(tmp_path / "plain", models.load("v3", use_draft=None, **MODEL))
    model = jaxspec.load(tmp_path / "plain")
    assert model.draft is None
    with pytest.raises(jaxspec.CheckpointError, match="no nextn draft"):
        jaxspec.load(tmp_path / "plain", draft="nextn")


def test_nothing_is_overwritten(saved):
    with pytest.raises(jaxspec.CheckpointError, match="exists already"):
        jaxspec.save(saved, models.load("v3", **MODEL))


def tree(path) -> dict[str, Any]:
    """The stored arrays as nested dicts."""
    _, names = checkpoint.read(path)
    abstract: dict[str, Any] = {}
    for name, leaf in names.items():
        *parents, last = name.split("/")
        node = abstract
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
    return ocp.load(path, abstract)


def change_dtype(node):
    node["weight"]["values"] = np.asarray(node["weight"]["values"]).view(np.int8)


def widen(node):
    node["weight"]["scales"] = np.asarray(node["weight"]["scales"]).astype(np.float16)


def cut(node):
    node["weight"]["scales"] = node["weight"]["scales"][:1]


def drop(node):
    del node["weight"]["scales"]


def add(node):
    node["bias"] = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    "defect, message",
    [
        (change_dtype, "kv_a_proj_with_mqa/weight/values is stored as int8"),
        (widen, "kv_a_proj_with_mqa/weight/scales is stored as float16"),
        (cut, r"kv_a_proj_with_mqa/weight/scales has shape \(1, 1\); \(2, 1\) is needed"),
        (drop, "kv_a_proj_with_mqa/weight/scales is missing"),
        (add, "kv_a_proj_with_mqa/bias is not one of this model"),
    ],
)
def test_a_tree_that_is_not_the_models_is_refused(defect, message, tmp_path):
    """D39: Orbax would cast another dtype without a word."""
    source = models.checkpoint("v3", **MODEL)
    arrays, metadata = tree(source), checkpoint.read_metadata(source)
    defect(arrays["target"]["layers"]["1"]["self_attn"]["kv_a_proj_with_mqa"])
    path = tmp_path / "changed"
    ocp.save(path, arrays, custom_metadata={checkpoint.METADATA_KEY: metadata.to_json()})
    with pytest.raises(jaxspec.CheckpointError, match=message):
        jaxspec.load(path)


def test_checkpoints_of_others_and_of_the_future_are_refused(tmp_path):
    arrays = {"x": np.zeros(2, np.float32)}
    ocp.save(tmp_path / "others", arrays)
    with pytest.raises(jaxspec.CheckpointError, match="not one that jaxspec wrote"):
        jaxspec.load(tmp_path / "others")
    metadata = checkpoint.read_metadata(models.checkpoint("v3", **MODEL)).to_json()
    newer: dict[str, Any] = {checkpoint.METADATA_KEY: metadata | {"format_version": 99}}
    ocp.save(tmp_path / "newer", arrays, custom_metadata=newer)
    with pytest.raises(jaxspec.CheckpointError, match="99 is newer than 1"):
        jaxspec.load(tmp_path / "newer")


def test_folders_that_are_no_checkpoint_are_refused(tmp_path):
    with pytest.raises(jaxspec.CheckpointError, match="no such folder"):
        jaxspec.load(tmp_path / "nowhere")
    with pytest.raises(jaxspec.CheckpointError, match="not a finished jaxspec checkpoint"):
        jaxspec.load(tmp_path)
    hf = fixtures.v3(**MODEL).write(tmp_path / "hf")
    with pytest.raises(jaxspec.CheckpointError, match="jaxspec-convert convert"):
        jaxspec.load(hf)
    assert json.loads((hf / "config.json").read_text())["model_type"] == "deepseek_v3"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"draft": "eagle"}, jaxspec.RequestError, "draft='eagle'"),
        ({"dtype": "int8"}, jaxspec.RequestError, "dtype=.int8."),
        ({"kernels": "mosaic_gpu"}, NotImplementedError, "mosaic_gpu"),
    ],
    ids=["draft", "dtype", "kernels"],
)
def test_options_that_cannot_be_honoured(options, error, message):
    with pytest.raises(error, match=message):
        jaxspec.load(models.checkpoint("v3", **MODEL), **options)


def test_weights_that_do_not_fit_are_refused_with_the_bytes(monkeypatch):
    """A device's share counts: half of the mesh's memory is enough for what is cut in two."""
    _, stored = checkpoint.read(models.checkpoint("v3", **MODEL))
    sizes = [np.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in stored.values()]
    whole = int(sum(sizes))
    monkeypatch.setattr(loading, "available_bytes", lambda device: whole - 1)
    with pytest.raises(jaxspec.CapacityError, match=f"need {whole} bytes .* {whole - 1} are free"):
        jaxspec.load(models.checkpoint("v3", **MODEL))
    jaxspec.load(models.checkpoint("v3", **MODEL), mesh=models.mesh(1, 2))


def test_a_model_that_was_not_loaded_is_not_saved(tmp_path):
    loaded = models.load("v3", **MODEL)
    graph, state = nnx.split(loaded)
    model = nnx.merge(graph, state)
    model.provenance = None
    with pytest.raises(jaxspec.CheckpointError, match="only a model that was loaded"):
        jaxspec.save(tmp_path / "unloaded", model)
    assert not list(tmp_path.iterdir())
    assert dataclasses.is_dataclass(loaded.provenance)
