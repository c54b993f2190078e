"""`load` and `save`: a checkpoint to a model on a mesh, and back."""

import dataclasses
import math
import pathlib
import shutil
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxspec import checkpoint
from jaxspec.checkpoint import Leaf, Metadata
from jaxspec.config import ModelConfig, read_config
from jaxspec.errors import CapacityError, CheckpointError, RequestError
from jaxspec.execution import Execution, Kernels
from jaxspec.model import (
    DraftKind,
    ParameterSpec,
    Provenance,
    SpeculativeModel,
    abstract_model,
    parameter_specs,
)
from jaxspec.sharding import check_divides, parameter_sharding, rebuild_mesh
from pallas_kernels.quantized import FP4_BLOCK_SHAPE, QuantizedTensor, scales_shape

DTYPES = ("bfloat16", "float16", "float32")


def load(
    path: str | pathlib.Path,
    mesh: Mesh | None = None,
    draft: Literal["auto", "nextn", "mtp"] | None = "auto",
    dtype: Any = None,
    quantize_activations: bool = True,
    zero_first_embedding: bool | None = None,
    kernels: Kernels = "auto",
) -> SpeculativeModel:
    """Loads a checkpoint that `jaxspec-convert` or `save` wrote.

    Args:
        mesh: devices with axes `data` (rows of a batch) and `model` (heads, experts, vocabulary,
            width of the dense layers); None is one device.
        draft: "auto" is the one that the checkpoint holds, None is plain decoding.
        dtype: compute dtype, default the checkpoint's; stored weights keep theirs.
        quantize_activations: False dequantizes weights instead of quantizing activations.
        zero_first_embedding: whether the draft's embedding at position 0 is zeroed; None is each
            draft's own way: MTP zeroes it, NextN does not.
        kernels: implementation of the operations.

    Raises:
        CheckpointError: not a finished checkpoint, a newer format, a missing draft, parameters that
            are missing, unknown, or of another shape or dtype than the config says.
        MeshError: the mesh does not divide the model, or has another axis.
        CapacityError: the weights do not fit in the memory of a device.
    """
    path = checkpoint.absolute(path)
    metadata, leaves = checkpoint.read(path)
    config = read_config(metadata.hf_config, metadata.generation_config)
    kind = _choose_draft(draft, metadata, path)
    execution = Execution(
        dtype=_compute_dtype(dtype, config),
        quantize_activations=quantize_activations,
        kernels=_available(kernels),
        mesh=rebuild_mesh(mesh),
    )
    specs = parameter_specs(config, kind)
    leaves = {name: leaf for name, leaf in leaves.items() if kind or not name.startswith("draft/")}
    check_parameters(specs, leaves, config.weight_block_size, path)
    stored = {_parameter(name) for name in leaves}
    owned = tuple(name for name, spec in specs.items() if spec.optional and name in stored)
    for name, spec in specs.items():
        sizes = {axis: size for axis, size in zip(spec.axes, spec.shape, strict=True) if axis}
        check_divides(name, sizes, execution.mesh)
    for name, size in config.head_counts.items():
        check_divides(name, {"heads": size}, execution.mesh)
    shardings = _shardings(specs, leaves, execution.mesh)
    _check_memory(leaves, shardings, path)
    tree = _read_arrays(path, leaves, shardings)
    model = abstract_model(config, execution, kind, owned, zero_first_embedding)
    model.provenance = Provenance(metadata, path, (path / checkpoint.HF_FILES).is_dir())
    return _fill(model, tree, config.weight_block_size)


def save(path: str | pathlib.Path, model: SpeculativeModel) -> None:
    """Writes a checkpoint that `load` reads; on several hosts, all call this.

    The folder appears under its name when it is complete, so what an interrupted save leaves behind
    never restores.

    Raises:
        CheckpointError: `path` exists or cannot be written, its parent is not shared by all hosts,
            or the model was not loaded.
    """
    path = checkpoint.absolute(path)
    if not _all_hosts(not path.exists()):
        raise CheckpointError(f"{path}: exists already; remove it or choose another name")
    if model.provenance is None:
        raise CheckpointError(f"{path}: only a model that was loaded can be saved")
    hf_files = model.provenance.path / checkpoint.HF_FILES
    if model.provenance.has_hf_files and not hf_files.is_dir():
        raise CheckpointError(
            f"{hf_files}: gone since the model was loaded; the copy needs its files"
        )
    _check_shared(path)
    described = dataclasses.replace(model.provenance.metadata, draft=model.draft_kind)
    metadata: dict[str, Any] = {checkpoint.METADATA_KEY: described.to_json()}
    staging = path.with_name(f".{path.name}.saving")
    try:
        ocp.save(str(staging), _to_tree(model), custom_metadata=metadata, overwrite=True)
        if jax.process_index() == 0:
            if model.provenance.has_hf_files:
                shutil.copytree(hf_files, staging / checkpoint.HF_FILES)
            staging.rename(path)
        failure = None
    except (OSError, ValueError) as error:  # TensorStore says so of a full disk.
        failure = error
    if failure is not None and jax.process_index() == 0:
        for leftover in path.parent.glob(f"{staging.name}*"):
            shutil.rmtree(leftover, ignore_errors=True)
    if not _all_hosts(failure is None):
        reason = checkpoint.first_line(failure) if failure else "another host failed"
        raise CheckpointError(f"{path}: cannot be written: {reason}") from failure


def check_parameters(
    specs: dict[str, ParameterSpec],
    leaves: dict[str, Leaf],
    block_shape: tuple[int, int],
    path: pathlib.Path,
) -> None:
    """Refuses a tree that is not exactly the model's.

    Raises:
        CheckpointError: names the first parameter at fault, and how.
    """
    expected: set[str] = set()

    def block_of(name: str, leaves: dict[str, Leaf]) -> tuple[int, int]:
        values = leaves.get(f"{name}/values")
        return FP4_BLOCK_SHAPE if values and values.dtype == np.uint8 else block_shape

    for name, spec in specs.items():
        quantized = f"{name}/values" in leaves
        names = [f"{name}/values", f"{name}/scales"] if quantized else [name]
        expected.update(names)
        for leaf_name in names:
            if leaf_name not in leaves:
                if spec.optional:
                    continue
                raise CheckpointError(f"{path}: parameter {leaf_name} is missing")
            _check_leaf(leaf_name, leaves[leaf_name], spec, block_of(name, leaves), path)
    unknown = sorted(leaves.keys() - expected)
    if unknown:
        raise CheckpointError(
            f"{path}: parameter {unknown[0]} is not one of this model ({len(unknown)} unknown)"
        )


def _check_leaf(
    name: str, leaf: Leaf, spec: ParameterSpec, block_shape: tuple[int, int], path: pathlib.Path
) -> None:
    shape, dtypes = spec.shape, DTYPES
    if name.endswith("/scales"):
        shape, dtypes = scales_shape(spec.shape, block_shape), ("float32", "float8_e8m0fnu")
    elif name.endswith("/values"):
        dtypes = ("float8_e4m3fn", "uint8") if spec.quantizable else ()
        if block_shape == FP4_BLOCK_SHAPE:
            shape = (*spec.shape[:-1], spec.shape[-1] // 2)
    elif jnp.issubdtype(spec.dtype, jnp.integer):
        dtypes = (jnp.dtype(spec.dtype).name,)
    if leaf.shape != shape:
        raise CheckpointError(f"{path}: parameter {name} has shape {leaf.shape}; {shape} is needed")
    if jnp.dtype(leaf.dtype).name not in dtypes:
        raise CheckpointError(
            f"{path}: parameter {name} is stored as {jnp.dtype(leaf.dtype).name}; "
            f"one of {dtypes} is needed"
        )


def _choose_draft(draft: str | None, metadata: Metadata, path: pathlib.Path) -> DraftKind | None:
    held = metadata.draft
    if held not in ("nextn", "mtp", None):
        raise CheckpointError(f"{path}: holds a {held} draft, which this jaxspec does not know")
    if draft not in ("auto", "nextn", "mtp", None):
        raise RequestError(f"load: draft={draft!r}; 'auto', 'nextn', 'mtp' or None is needed")
    if draft not in ("auto", held, None):
        raise CheckpointError(
            f"{path}: the checkpoint holds no {draft} draft; load it with draft=None"
        )
    return None if draft is None else held


def _compute_dtype(dtype: Any, config: ModelConfig) -> jnp.dtype:
    try:
        chosen = jnp.dtype(dtype or config.dtype)
    except TypeError:
        chosen = None
    if chosen is None or chosen.name not in DTYPES:
        raise RequestError(f"load: dtype={dtype!r}; one of {', '.join(DTYPES)} is needed")
    return chosen


def _available(kernels: Kernels) -> Kernels:
    if kernels not in ("auto", "reference"):
        raise NotImplementedError(
            f"load: kernels={kernels!r} is not available; use 'auto' or 'reference'"
        )
    return kernels


def _shardings(
    specs: dict[str, ParameterSpec], leaves: dict[str, Leaf], mesh: Mesh | None
) -> dict[str, Sharding]:
    """Where each stored array goes; values and scales alike."""
    whole = SingleDeviceSharding(jax.local_devices()[0])
    return {
        name: parameter_sharding(leaf.shape, specs[_parameter(name)].axes, mesh) or whole
        for name, leaf in leaves.items()
    }


def _parameter(leaf_name: str) -> str:
    """The parameter that a stored array belongs to."""
    return leaf_name.removesuffix("/values").removesuffix("/scales")


def _check_memory(
    leaves: dict[str, Leaf], shardings: dict[str, Sharding], path: pathlib.Path
) -> None:
    needed = sum(
        math.prod(shardings[name].shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for name, leaf in leaves.items()
    )
    device = jax.local_devices()[0]
    available = available_bytes(device)
    if available is not None and needed > available:
        raise CapacityError(
            f"{path}: the weights need {needed} bytes on each device and {available} are free "
            f"on {device}; use a mesh with a larger 'model' axis"
        )


def available_bytes(device: Any) -> int | None:
    """Free memory of a device, or None where it cannot be told; CPU devices share the host's."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = pathlib.Path("/proc/meminfo")
    if device.platform != "cpu" or not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 // jax.local_device_count()


def _read_arrays(
    path: pathlib.Path, leaves: dict[str, Leaf], shardings: dict[str, Sharding]
) -> dict[str, jax.Array]:
    """The arrays by path. Orbax casts to the dtype asked for, so each is asked for in its own."""
    abstract: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = abstract
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[name])
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            tree = ocp.load(str(path), abstract)
    except Exception as error:  # Orbax raises a bare Exception for a torn file.
        raise CheckpointError(f"{path}: cannot be read: {checkpoint.first_line(error)}") from error
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(str(key.key) for key in keys): array for keys, array in flat}


def _fill(
    model: SpeculativeModel, arrays: dict[str, jax.Array], block_shape: tuple[int, int]
) -> SpeculativeModel:
    """Puts the arrays into the model's variables, a quantized pair as one `QuantizedTensor`."""
    arrays = dict(arrays)
    for keys, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        path = "/".join(map(str, keys))
        if path in arrays:
            variable.set_value(arrays.pop(path))
        else:
            values, scales = arrays.pop(f"{path}/values"), arrays.pop(f"{path}/scales")
            block = FP4_BLOCK_SHAPE if values.dtype == np.uint8 else block_shape
            variable.set_value(QuantizedTensor(values, scales, block))
    assert not arrays, f"read, but not used: {sorted(arrays)}"
    return model


def _to_tree(model: SpeculativeModel) -> dict[str, Any]:
    """The parameters as nested dicts with string keys, a `QuantizedTensor` as values and scales."""

    def convert(node: Any) -> Any:
        if isinstance(node, QuantizedTensor):
            return {"values": node.values, "scales": node.scales}
        if isinstance(node, dict):
            return {str(name): convert(child) for name, child in node.items()}
        return node

    return convert(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def _all_hosts(condition: bool) -> bool:
    """Whether a condition holds on every host; each learns it, so that all go on or all stop."""
    if jax.process_count() == 1:
        return condition
    return bool(np.all(multihost_utils.process_allgather(np.asarray(condition))))


def _check_shared(path: pathlib.Path) -> None:
    """Refuses a destination whose parent is not one folder for all hosts."""
    if not _all_hosts(path.parent.is_dir()):
        raise CheckpointError(f"{path}: its parent is not a folder that all hosts have")
    if jax.process_count() == 1:
        return
    marker = path.with_name(f".{path.name}.shared")
    if jax.process_index() == 0:
        marker.touch()
    multihost_utils.sync_global_devices("jaxspec.save: marker written")
    is_shared = _all_hosts(marker.exists())
    if jax.process_index() == 0:
        marker.unlink()
    if not is_shared:
        raise CheckpointError(
            f"{path}: its parent is not a folder that all hosts share; save to shared storage"
        )
