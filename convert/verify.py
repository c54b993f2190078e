"""`verify`: every stored array against the source's bytes, or against the stored checksums."""

import pathlib
from collections.abc import Mapping

import numpy as np

from convert import plan as planning
from convert import record
from convert.converter import read_group
from convert.expert_ids import check_expert_ids
from convert.orbax_in import Checkpoint
from convert.plan import Plan
from convert.progress import progress
from convert.safetensors_file import same_bits
from convert.source import Source, open_source
from jaxspec.errors import CheckpointError


def verify(source_name: str, path: pathlib.Path) -> str:
    """Repeats the recorded conversion and compares every array bit for bit.

    Returns:
        A line for the user.

    Raises:
        CheckpointError: names the first array that differs.
    """
    checkpoint = Checkpoint(path)
    source = open_source(source_name)
    plan = planning.make(
        source.tensors,
        source.model_config(),
        planning.recorded_draft(checkpoint.metadata),
        checkpoint.metadata.weights,
        source.have_equal_bytes,
    )
    check_expert_ids(source, plan, source.model_config())
    _refuse_other_arrays(checkpoint, plan, source_name)
    differing = _differing_skipped(path, source, plan)
    with progress("Comparing", plan.num_bytes) as advance:
        for group in plan.groups:
            wanted = read_group(source, plan, group)
            stored = checkpoint.load(wanted)
            differing += [name for name in wanted if not same_bits(stored[name], wanted[name])]
            advance(plan.group_bytes(group))
    _raise_if_any(differing, f"{path}: differs from {source_name}")
    return f"{path}: all {len(checkpoint.leaves)} arrays equal {source_name}, bit for bit"


def verify_stored(path: pathlib.Path) -> str:
    """Compares every array, the record and the side files with the checksums made at conversion.

    Returns:
        A line for the user.

    Raises:
        CheckpointError: names the first array or file that changed.
    """
    checkpoint = Checkpoint(path)
    record.read(checkpoint.path)
    record.check_seal(checkpoint.path, checkpoint.metadata)
    changed: list[str] = []
    checksums = record.Checksums.read(checkpoint.path)
    _refuse_other_names(checkpoint, checksums.by_path, "its checksums")
    sizes = [sum(checkpoint.num_bytes(name) for name in group) for group in checksums.groups]
    with progress("Checking", sum(sizes)) as advance:
        for group, size in zip(checksums.groups, sizes, strict=True):
            changed += changed_arrays(checkpoint.load(group), group)
            advance(size)
    _raise_if_any(changed, f"{path}: changed since it was converted")
    return f"{path}: all {len(checkpoint.leaves)} arrays have the checksums of the conversion"


def changed_arrays(arrays: Mapping[str, np.ndarray], checksums: Mapping[str, int]) -> list[str]:
    """Names of the arrays whose bytes have another checksum."""
    return [name for name, array in arrays.items() if record.checksum(array) != checksums[name]]


def _refuse_other_arrays(checkpoint: Checkpoint, plan: Plan, source_name: str) -> None:
    wanted = {
        name: leaf
        for parameter in plan.parameters
        for name, leaf in plan.stored_leaves(parameter).items()
    }
    _refuse_other_names(checkpoint, wanted, source_name)
    for name, leaf in wanted.items():
        stored = checkpoint.leaves[name]
        if (stored.shape, np.dtype(stored.dtype)) != (leaf.shape, leaf.dtype):
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {np.dtype(stored.dtype)} {stored.shape}; "
                f"{leaf.dtype} {leaf.shape} in {source_name}"
            )


def _refuse_other_names(checkpoint: Checkpoint, wanted: Mapping[str, object], where: str) -> None:
    for name in sorted(wanted.keys() ^ checkpoint.leaves.keys()):
        holder, other = (where, checkpoint.path) if name in wanted else (checkpoint.path, where)
        raise CheckpointError(f"{checkpoint.path}: {name} is in {holder}, but not in {other}")


def _differing_skipped(path: pathlib.Path, source: Source, plan: Plan) -> list[str]:
    """Skipped tensors whose bytes are not the recorded ones."""
    if not plan.skipped:
        return []
    recorded = record.read(path)
    return [
        name
        for name in plan.skipped
        if source.file(name).read(name).tobytes() != record.skipped_bytes(path, recorded, name)
    ]


def _raise_if_any(names: list[str], text: str) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise CheckpointError(f"{text}: {names[0]}{more}")
