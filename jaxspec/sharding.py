"""Logical axis to mesh axis: one table, and the functions that apply it."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import MeshError
from pallas_kernels.quantized import QuantizedTensor

MESH_AXES = ("data", "model")

# Rows of a batch are cut over `data`; of a parameter, these logical axes are cut over `model`.
LOGICAL_TO_MESH = {
    "rows": "data",
    "vocab": "model",
    "heads": "model",
    "experts": "model",
    "width": "model",
}


def rebuild_mesh(mesh: Mesh | None) -> Mesh | None:
    """The mesh with both axes, in Auto mode (`jax.make_mesh` gives Explicit axes).

    Raises:
        MeshError: the mesh has an axis other than `data` and `model`.
    """
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh: {mesh!r:.60}; a jax.sharding.Mesh of devices is needed")
    unknown = [name for name in mesh.axis_names if name not in MESH_AXES]
    if unknown:
        raise MeshError(
            f"mesh: axis {unknown[0]!r} is not known; use {' and '.join(map(repr, MESH_AXES))}"
        )
    order = [mesh.axis_names.index(name) for name in MESH_AXES if name in mesh.axis_names]
    sizes = [mesh.shape.get(name, 1) for name in MESH_AXES]
    devices = np.transpose(mesh.devices, order).reshape(sizes)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Where each logical axis lies."""
    return PartitionSpec(*(LOGICAL_TO_MESH.get(axis) if axis else None for axis in axes))


def check_divides(name: str, sizes: dict[str, int], mesh: Mesh | None) -> None:
    """Refuses sizes of logical axes that the mesh cannot cut into equal parts.

    Raises:
        MeshError: with the mesh axis, its size, and the size that it does not divide.
    """
    if mesh is None:
        return
    for axis, size in sizes.items():
        mesh_axis = LOGICAL_TO_MESH.get(axis)
        if mesh_axis and size % mesh.shape[mesh_axis]:
            raise MeshError(
                f"mesh: axis {mesh_axis!r} of size {mesh.shape[mesh_axis]} does not divide "
                f"{name} ({size} {axis})"
            )


def parameter_sharding(
    shape: tuple[int, ...], axes: tuple[str | None, ...], mesh: Mesh | None
) -> jax.sharding.Sharding | None:
    """How an array with these logical axes lies on the mesh, or None without one.

    A dimension that the mesh does not divide stays whole. For parameters `check_divides` has
    refused that before; it happens to the scales of a matrix that is cut inside a block.
    """
    if mesh is None:
        return None
    spec = partition_spec(axes)
    cut = [
        name if name and size % mesh.shape[name] == 0 else None
        for name, size in zip(spec, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*cut))


def constrain(x: jax.Array, axes: tuple[str | None, ...], mesh: Mesh | None) -> jax.Array:
    """Pins an activation to where its logical axes lie."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(axes)))


def weight_spec(w: jax.Array | QuantizedTensor, axis: str):
    """`PartitionSpec`s of a weight cut along its first axis, in the weight's own tree structure."""
    return jax.tree.map(lambda _: PartitionSpec(LOGICAL_TO_MESH[axis]), w)
