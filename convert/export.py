"""`export`: the Hugging Face folder that a checkpoint was made from, byte for byte."""

import pathlib
import shutil
from collections.abc import Mapping

import numpy as np

from convert import plan as planning
from convert import record
from convert.orbax_in import Checkpoint
from convert.orbax_out import beside
from convert.plan import Leaf, Plan
from convert.progress import progress
from convert.record import Record
from convert.rules import Part
from convert.safetensors_file import MappedTensors, TensorInfo, create
from convert.source import INDEX
from convert.verify import changed_arrays
from jaxspec.checkpoint import HF_FILES, first_line
from jaxspec.config import read_config
from jaxspec.errors import CheckpointError


def export(path: pathlib.Path, output: pathlib.Path) -> str:
    """Writes every safetensors file, the index and the side files as they were.

    Returns:
        A line for the user.

    Raises:
        CheckpointError: the conversion was not exact, the data changed since, or `output` exists or
            cannot be written.
    """
    if output.exists():
        raise CheckpointError(f"{output}: exists already; remove it or choose another name")
    checkpoint = Checkpoint(path)
    recorded = record.read(checkpoint.path)
    record.check_seal(checkpoint.path, checkpoint.metadata)
    _refuse_inexact(checkpoint, recorded)
    tensors = record.tensors(checkpoint.path, recorded)
    plan = _plan(checkpoint, recorded, tensors)
    staging = beside(output.absolute(), ".partial_export")
    try:
        _refuse_full(output, recorded)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        _write(checkpoint, recorded, plan, tensors, staging)
        staging.rename(output)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise CheckpointError(f"{output}: cannot be written: {reason}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return f"{output}: {len(recorded.file_bytes)} files, {len(tensors)} tensors"


def _refuse_inexact(checkpoint: Checkpoint, recorded: Record) -> None:
    if checkpoint.metadata.weights != "keep":
        raise CheckpointError(
            f"{checkpoint.path}: converted with --weights {checkpoint.metadata.weights}, "
            "so the original bytes are not in it"
        )
    if recorded.num_dropped:
        raise CheckpointError(
            f"{checkpoint.path}: converted with --draft none, so {recorded.num_dropped} tensors "
            "of the draft are not in it"
        )


def _refuse_full(output: pathlib.Path, recorded: Record) -> None:
    needed, free = (
        sum(recorded.file_bytes.values()),
        shutil.disk_usage(output.absolute().parent).free,
    )
    if needed > free:
        raise CheckpointError(f"{output}: {needed} bytes are needed there and {free} are free")


def _plan(checkpoint: Checkpoint, recorded: Record, tensors: Mapping[str, TensorInfo]) -> Plan:
    """The conversion's plan, made again."""
    metadata = checkpoint.metadata
    config = read_config(metadata.hf_config, metadata.generation_config)

    table = planning.table(config, tensors)
    of_copies = {scale for name in recorded.copies for scale in table.scale_names(name)}

    def was_equal(name: str, _: str) -> bool:
        return name in of_copies or name in recorded.copies

    draft = planning.recorded_draft(metadata)
    return planning.make(tensors, config, draft, metadata.weights, was_equal)


def _write(
    checkpoint: Checkpoint,
    recorded: Record,
    plan: Plan,
    tensors: Mapping[str, TensorInfo],
    folder: pathlib.Path,
) -> None:
    source = checkpoint.path / record.FOLDER
    if (checkpoint.path / HF_FILES).is_dir():
        shutil.copytree(checkpoint.path / HF_FILES, folder, dirs_exist_ok=True)
    if (source / "index.json").is_file():
        shutil.copyfile(source / "index.json", folder / INDEX)
    files = {
        name: create(folder / name, record.header_path(checkpoint.path, name).read_bytes(), size)
        for name, size in recorded.file_bytes.items()
    }
    for name in recorded.skipped:
        content = record.skipped_bytes(checkpoint.path, recorded, name)
        info = tensors[name]
        array = np.frombuffer(content, info.array_dtype).reshape(info.array_shape)
        _fill(files[info.file], Part(name, ""), array)
    checksums = record.Checksums.read(checkpoint.path).by_path
    with progress("Exporting", plan.num_bytes) as advance:
        for group in plan.groups:
            leaves = {leaf.path: leaf for parameter in group for leaf in parameter.leaves}
            arrays = checkpoint.load(leaves)
            changed = changed_arrays(arrays, checksums)
            if changed:
                raise CheckpointError(
                    f"{checkpoint.path}: {changed[0]} changed since it was converted"
                )
            for name, leaf in leaves.items():
                _write_leaf(files, tensors, leaf, arrays[name])
            advance(plan.group_bytes(group))


def _write_leaf(
    files: Mapping[str, MappedTensors],
    tensors: Mapping[str, TensorInfo],
    leaf: Leaf,
    array: np.ndarray,
) -> None:
    for part in (*leaf.parts, *leaf.copies):
        _fill(files[tensors[part.tensor].file], part, array)


def _fill(file: MappedTensors, part: Part, array: np.ndarray) -> None:
    source = part.of_parameter(array)
    for where, slab in file.slabs(part.tensor):
        part.of_tensor(slab)[...] = source[where]
