"""What a checkpoint remembers of the folder it was made from, so that `export` can be exact.

It lies in `source/` inside the checkpoint, small beside the weights:

    record.json            sizes of the files, what was skipped, what was a copy
    headers/NAME.header    each safetensors file up to its first tensor
    skipped.bin            bytes of the skipped tensors, one after the other
    index.json             the index, as it was
    checksums.jsonl        CRC-32 of each stored array, one line a save
    files.sha256           SHA-256 of everything above, of the side files in `hf/` and the metadata
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.plan import Plan
from convert.safetensors_file import TensorInfo, as_bytes, parse_header
from convert.source import Source
from jaxspec.checkpoint import HF_FILES, Metadata
from jaxspec.errors import CheckpointError

FOLDER = "source"


@dataclasses.dataclass(frozen=True)
class Record:
    """The contents of `record.json`.

    Attributes:
        fingerprint: of the source's headers, index and config, and of the options.
        file_bytes: size of each safetensors file, by name.
        skipped: for each skipped tensor: why, and where its bytes are in `skipped.bin`.
        copies: tensors that equal the target's and are not stored.
        num_dropped: tensors of which nothing is kept; such a checkpoint cannot be exported.
    """

    fingerprint: str
    file_bytes: Mapping[str, int]
    skipped: Mapping[str, tuple[str, int, int]]
    copies: tuple[str, ...]
    num_dropped: int


def fingerprint(source: Source, plan: Plan) -> str:
    """What must be the same for `--resume` to continue a conversion."""
    digest = hashlib.sha256()
    options = [plan.draft, plan.weights, source.config, source.generation_config]
    digest.update(json.dumps(options, sort_keys=True).encode())
    digest.update(source.index or b"")
    for name, file in sorted(source.files.items()):
        digest.update(name.encode() + file.header)
    return digest.hexdigest()


def write(folder: pathlib.Path, source: Source, plan: Plan) -> None:
    """Writes everything but the checksums, the side files in `hf/` included."""
    root = folder / FOLDER
    (root / "headers").mkdir(parents=True)
    for name, file in source.files.items():
        header_path(folder, name).write_bytes(file.header)
    if source.index is not None:
        (root / "index.json").write_bytes(source.index)
    skipped: dict[str, tuple[str, int, int]] = {}
    with open(root / "skipped.bin", "wb") as output:
        for name, reason in plan.skipped.items():
            start = output.tell()
            output.write(source.file(name).read(name).tobytes())
            skipped[name] = (reason, start, output.tell())
    record = Record(
        fingerprint=fingerprint(source, plan),
        file_bytes={name: file.num_bytes for name, file in source.files.items()},
        skipped=skipped,
        copies=tuple(sorted(plan.copies)),
        num_dropped=len(plan.dropped),
    )
    for relative in source.side_files():
        target = folder / HF_FILES / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / relative, target)
    # Last, so that a record that is there is complete.
    (root / "record.json").write_text(json.dumps(dataclasses.asdict(record), indent=1))


def header_path(folder: pathlib.Path, file: str) -> pathlib.Path:
    """Where the header of a safetensors file is kept."""
    return folder / FOLDER / "headers" / f"{file}.header"


def read(folder: pathlib.Path) -> Record:
    """Reads `record.json`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = folder / FOLDER / "record.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no record of its source; only what jaxspec-convert wrote has one"
        )
    try:
        values = json.loads(path.read_bytes())
        skipped = {
            name: (str(reason), int(start), int(end))
            for name, (reason, start, end) in values.pop("skipped").items()
        }
        return Record(skipped=skipped, copies=tuple(values.pop("copies")), **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged") from error


def tensors(folder: pathlib.Path, record: Record) -> dict[str, TensorInfo]:
    """Every tensor of the source, from the recorded headers."""
    found: dict[str, TensorInfo] = {}
    for name, size in record.file_bytes.items():
        path = header_path(folder, name)
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        found |= parse_header(path.read_bytes(), path.with_name(name), size)
    return found


def skipped_bytes(folder: pathlib.Path, record: Record, name: str) -> bytes:
    """The recorded bytes of a skipped tensor; empty where it was not in the source."""
    _, start, end = record.skipped.get(name, ("", 0, 0))
    with open(folder / FOLDER / "skipped.bin", "rb") as file:
        file.seek(start)
        return file.read(end - start)


class Checksums:
    """CRC-32 of each stored array, appended before the array is saved."""

    def __init__(self, folder: pathlib.Path):
        self._path = folder / FOLDER / "checksums.jsonl"
        self.groups: list[dict[str, int]] = []

    @classmethod
    def read(cls, folder: pathlib.Path, num_groups: int | None = None) -> "Checksums":
        """Reads them; a conversion that was killed may have left a torn last line.

        Args:
            num_groups: how many lines to read, which must be whole; None is all.

        Raises:
            CheckpointError: a line is missing or damaged.
        """
        result = cls(folder)
        lines = result._path.read_text().splitlines() if result._path.is_file() else []
        try:
            result.groups = [json.loads(line) for line in lines[:num_groups]]
        except ValueError as error:
            raise CheckpointError(f"{result._path}: damaged") from error
        if num_groups is not None and len(result.groups) < num_groups:
            raise CheckpointError(f"{result._path}: damaged")
        return result

    def rewrite(self) -> None:
        """Leaves only the lines that were read."""
        whole = self._path.with_suffix(".new")
        whole.write_text("".join(json.dumps(group) + "\n" for group in self.groups))
        whole.replace(self._path)

    def append(self, arrays: Mapping[str, np.ndarray]) -> None:
        group = {path: checksum(array) for path, array in arrays.items()}
        self.groups.append(group)
        with open(self._path, "a") as file:
            file.write(json.dumps(group) + "\n")

    @property
    def by_path(self) -> dict[str, int]:
        return {path: value for group in self.groups for path, value in group.items()}


def checksum(array: np.ndarray) -> int:
    """CRC-32 of the array's bytes."""
    return zlib.crc32(as_bytes(array))


def seal(folder: pathlib.Path, metadata: Metadata) -> None:
    """Writes the checksums of the record, the side files and the metadata."""
    lines = [f"{digest}  {name}\n" for name, digest in _digests(folder, metadata).items()]
    (folder / FOLDER / "files.sha256").write_text("".join(lines))


def check_seal(folder: pathlib.Path, metadata: Metadata) -> None:
    """Refuses a checkpoint whose record, side files or metadata are not as they were.

    Raises:
        CheckpointError: names what changed since `seal`, was added or was removed.
    """
    path = folder / FOLDER / "files.sha256"
    text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
    pairs = [line.partition("  ") for line in text.splitlines()]
    sealed = {name: digest for digest, _, name in pairs}
    found = _digests(folder, metadata)
    for name in sorted({*sealed, *found}):
        if sealed.get(name) != found.get(name):
            raise CheckpointError(f"{folder}: changed since it was converted: {name}")


def _digests(folder: pathlib.Path, metadata: Metadata) -> dict[str, str]:
    digests = {"metadata": _canonical_digest(metadata.to_json())}
    for root in (FOLDER, HF_FILES):
        for path in sorted((folder / root).rglob("*")):
            if path.is_file() and path.name != "files.sha256":
                digests[path.relative_to(folder).as_posix()] = _file_digest(path)
    return digests


def _canonical_digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _file_digest(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
