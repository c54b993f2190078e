"""Hugging Face checkpoint folders written by hand, byte by byte: any defect can be put in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPE_NAMES = {
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "U8",
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor as a safetensors file holds it; nothing ties `shape` to the number of bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Entry:
        return cls(name, DTYPE_NAMES[array.dtype], array.shape, array.tobytes())


def safetensors_bytes(
    entries: Sequence[Entry],
    *,
    metadata: Mapping[str, str] | None = None,
    header_padding: int = 0,
    header_length: int | None = None,
) -> bytes:
    """Returns 8 bytes of header length, the JSON header, and the tensors in the given order.

    Args:
        header_padding: spaces behind the JSON, which some writers add to align the data.
        header_length: a wrong length to write in place of the true one.
    """
    header: dict[str, object] = {}
    if metadata is not None:
        header["__metadata__"] = dict(metadata)
    end = 0
    for entry in entries:
        start, end = end, end + len(entry.data)
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode() + b" " * header_padding
    length = len(text) if header_length is None else header_length
    return length.to_bytes(8, "little") + text + b"".join(entry.data for entry in entries)


def write_folder(
    folder: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, np.ndarray],
    *,
    num_shards: int = 1,
    shard_of: Callable[[str], int] | None = None,
    file_names: Sequence[str] | None = None,
    order: Callable[[str], Any] | None = None,
    side_files: Mapping[str, object] | None = None,
) -> Path:
    """Writes `config.json`, the safetensors files and, for more than one file, the index.

    Args:
        num_shards: files to write; tensors go to them in equal runs unless `shard_of` is given.
        shard_of: the shard (from 0) of each tensor name.
        file_names: names of the shards, in place of the published pattern.
        order: sort key of the names inside a shard, in place of the mapping's own order.
        side_files: further files by name; JSON unless the value is bytes.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True)
    names = list(tensors)
    if shard_of is None:
        position = {name: i * num_shards // len(names) for i, name in enumerate(names)}
        shard_of = position.__getitem__
    if file_names is None:
        file_names = (
            ["model.safetensors"]
            if num_shards == 1
            else [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
        )
    for shard, file_name in enumerate(file_names):
        inside = [name for name in names if shard_of(name) == shard]
        if order is not None:
            inside.sort(key=order)
        entries = [Entry.of(name, tensors[name]) for name in inside]
        (folder / file_name).write_bytes(safetensors_bytes(entries, metadata={"format": "pt"}))
    if num_shards > 1:
        write_json(
            folder / "model.safetensors.index.json",
            {
                "metadata": {"total_size": sum(array.nbytes for array in tensors.values())},
                "weight_map": {name: file_names[shard_of(name)] for name in sorted(names)},
            },
        )
    for name, content in {"config.json": dict(config), **(side_files or {})}.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            write_json(folder / name, content)
    return folder


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2))
