"""`convert`: a Hugging Face folder to an Orbax checkpoint, a few hundred megabytes at a time."""

import os
import pathlib
import re
import shutil
from collections.abc import Sequence

import numpy as np

from convert import plan as planning
from convert import record
from convert.expert_ids import check_expert_ids
from convert.orbax_out import Session
from convert.plan import DraftOption, Leaf, Parameter, Plan, Weights
from convert.progress import progress
from convert.source import Source, open_source
from jaxspec import checkpoint
from jaxspec.checkpoint import Metadata
from jaxspec.errors import CheckpointError, JaxspecError

# Beside the arrays: headers, side files, Orbax's own metadata.
OVERHEAD_BYTES = 16 << 20


def convert(
    source_name: str,
    destination: pathlib.Path,
    *,
    weights: Weights = "keep",
    draft: DraftOption = "auto",
    resume: bool = False,
) -> str:
    """Converts a folder, or a Hub repository, to a checkpoint that `jaxspec.load` reads.

    Everything about the source that can be refused is refused before anything is written.

    Returns:
        A line for the user.

    Raises:
        CheckpointError: the source cannot be converted, or the destination cannot be written.
        ConfigError: the config cannot be honoured.
    """
    if destination.exists() and not resume:
        raise CheckpointError(f"{destination}: exists already; remove it or choose another name")
    source = open_source(source_name)
    if destination.absolute().is_relative_to(source.folder.absolute()):
        raise CheckpointError(f"{destination}: lies inside the source; choose another place")
    config = source.model_config()
    kind = planning.choose_draft(draft, config, source.tensors)
    plan = planning.make(source.tensors, config, kind, weights, source.have_equal_bytes)
    check_expert_ids(source, plan, config)
    metadata = Metadata(config.family, kind, weights, source.config, source.generation_config)
    session = Session(destination, metadata)
    if destination.exists():
        _refuse_other_source(destination, source, plan)
        session.discard()
        return f"{destination}: complete already"
    started_here = not session.exists
    try:
        num_done = _begin(session, source, plan, destination, resume)
        _save_groups(session, source, plan, num_done)
        record.seal(session.folder, metadata)
        session.finalize()
    except Exception as error:
        if started_here:
            session.abandon()
        if isinstance(error, JaxspecError) or not isinstance(error, OSError | ValueError):
            raise
        raise CheckpointError(f"{destination}: cannot be written: {_reason(error)}") from error
    return _summary(destination, source, plan)


def _begin(
    session: Session, source: Source, plan: Plan, destination: pathlib.Path, resume: bool
) -> int:
    """Prepares the session's folder; returns the number of groups that are saved already."""
    if not session.exists:
        _refuse_full(destination, plan)
        session.start()
        record.write(session.folder, source, plan)
        return 0
    if not resume:
        raise CheckpointError(
            f"{session.folder}: an unfinished conversion; continue it with --resume, or remove it"
        )
    session.start()
    if not (session.folder / record.FOLDER / "record.json").is_file():
        # Killed before the first save.
        session.discard()
        return _begin(session, source, plan, destination, resume)
    _refuse_other_source(session.folder, source, plan)
    num_saved = session.num_saved
    record.Checksums.read(session.folder, num_saved).rewrite()
    return num_saved


def _reason(error: Exception) -> str:
    """What the operating system said; TensorStore puts its number into a long message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(found[1])) if found else checkpoint.first_line(error)


def _refuse_full(destination: pathlib.Path, plan: Plan) -> None:
    parent = destination.absolute().parent
    if not parent.is_dir():
        raise CheckpointError(f"{destination}: its parent is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{destination}: its parent is not writable")
    needed, free = plan.num_bytes + OVERHEAD_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(f"{destination}: {needed} bytes are needed there and {free} are free")


def _refuse_other_source(folder: pathlib.Path, source: Source, plan: Plan) -> None:
    if record.read(folder).fingerprint != record.fingerprint(source, plan):
        raise CheckpointError(
            f"{folder}: made from another source, or with other options; remove it to start over"
        )


def _save_groups(session: Session, source: Source, plan: Plan, num_done: int) -> None:
    """Reads the next group while Orbax writes the one before."""
    checksums = record.Checksums.read(session.folder, num_done)
    sizes = [plan.group_bytes(group) for group in plan.groups]
    with progress("Converting", sum(sizes), sum(sizes[:num_done])) as advance:
        for group, size in list(zip(plan.groups, sizes, strict=True))[num_done:]:
            arrays = read_group(source, plan, group)
            checksums.append(arrays)
            session.save(arrays)
            advance(size)
        session.wait()


def read_group(source: Source, plan: Plan, group: Sequence[Parameter]) -> dict[str, np.ndarray]:
    """The arrays to store for these parameters."""
    stored: dict[str, np.ndarray] = {}
    for parameter in group:
        arrays = {leaf.path: _read_leaf(source, leaf) for leaf in parameter.leaves}
        stored |= plan.stored_arrays(parameter, arrays)
    return stored


def _read_leaf(source: Source, leaf: Leaf) -> np.ndarray:
    array = np.empty(leaf.shape, leaf.dtype)
    for part in leaf.parts:
        target = part.of_parameter(array)
        for where, slab in source.file(part.tensor).slabs(part.tensor):
            target[where] = part.of_tensor(slab)  # I8 keeps its bits in uint8, I64 fits in int32
    return array


def _summary(destination: pathlib.Path, source: Source, plan: Plan) -> str:
    kinds = [f"{len(source.tensors)} tensors", f"{plan.num_bytes} bytes"]
    kinds.append(f"draft {plan.draft or 'none'}")
    if plan.copies:
        kinds.append(f"{len(plan.copies)} copies stored once")
    if plan.skipped:
        kinds.append(f"{len(plan.skipped)} skipped")
    if plan.dropped:
        kinds.append(f"{len(plan.dropped)} of the draft left out")
    return f"{destination}: {', '.join(kinds)}"
