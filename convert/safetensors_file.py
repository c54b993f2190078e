"""Safetensors files by memory map: a header that is believed only after it was checked.

The format: 8 bytes with the length of a JSON header, the header, then the tensors back to back.
NumPy's own types do not cover FP8, so `ml_dtypes` gives the missing ones. Packed FP4 is read as
bytes, two values each, with half the columns that the header says.
"""

import dataclasses
import json
import math
import mmap
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from jaxspec.errors import CheckpointError

# Name in a header: the type read, and bits a value.
DTYPES: Mapping[str, tuple[np.dtype, int]] = {
    "BF16": (np.dtype(ml_dtypes.bfloat16), 16),
    "F16": (np.dtype(np.float16), 16),
    "F32": (np.dtype(np.float32), 32),
    "F8_E4M3": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "F8_E8M0": (np.dtype(ml_dtypes.float8_e8m0fnu), 8),
    "F4": (np.dtype(np.uint8), 4),
    "I8": (np.dtype(np.int8), 8),
    "U8": (np.dtype(np.uint8), 8),
    "I32": (np.dtype(np.int32), 32),
    "I64": (np.dtype(np.int64), 64),
}
MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
LFS_POINTER = b"version https://git-lfs"
SLAB_BYTES = 32 << 20  # of a tensor that is resident at a time


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor as a header describes it.

    Attributes:
        file: name of the file that holds it.
        dtype: the header's name of the type.
        shape: the header's; FP4 counts values, not bytes.
        start, end: bytes from the start of the file.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the array that is read."""
        if self.dtype == "F4":
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    @property
    def array_dtype(self) -> np.dtype:
        return DTYPES[self.dtype][0]


class MappedTensors:
    """Tensors in a mapped file.

    What was touched is released again: resident pages of a map count as this process's memory.

    Attributes:
        tensors: where each lies.
    """

    def __init__(self, mapped: mmap.mmap, tensors: Mapping[str, TensorInfo]):
        self._map = mapped
        self.tensors = tensors

    def slabs(self, name: str) -> Iterator[tuple[Any, np.ndarray]]:
        """Runs of the first axis: where each lies, and a view that is valid until the next."""
        info = self.tensors[name]
        count = math.prod(info.array_shape)
        array = np.frombuffer(self._map, info.array_dtype, count, info.start)
        array = array.reshape(info.array_shape)
        if not info.array_shape or not count:
            yield ..., array
            return
        row_bytes = info.num_bytes // len(array)
        step = max(1, SLAB_BYTES // row_bytes)
        for row in range(0, len(array), step):
            yield slice(row, row + step), array[row : row + step]
            self._release(info.start + row * row_bytes, info.start + (row + step) * row_bytes)

    def _release(self, start: int, end: int) -> None:
        start -= start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, min(end, len(self._map)) - start)


class SafetensorsFile(MappedTensors):
    """A file that is read.

    Attributes:
        header: the file up to the first tensor, as it is.
        num_bytes: size of the whole file.

    Raises:
        CheckpointError: the file is missing, unreadable or not what its header says.
    """

    def __init__(self, path: pathlib.Path):
        try:
            with open(path, "rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                self.header = _read_header(file, path, self.num_bytes)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        super().__init__(mapped, parse_header(self.header, path, self.num_bytes))

    def read(self, name: str) -> np.ndarray:
        """A copy of the tensor."""
        info = self.tensors[name]
        array = np.empty(info.array_shape, info.array_dtype)
        for where, slab in self.slabs(name):
            array[where] = slab
        return array


def create(path: pathlib.Path, header: bytes, num_bytes: int) -> MappedTensors:
    """Makes a file of that header, whose tensors are to be filled through `slabs`.

    Raises:
        OSError: it does not fit; the space is taken now, so that no later write can fail.
        CheckpointError: the header is not valid.
    """
    tensors = parse_header(header, path, num_bytes)
    with open(path, "xb+") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        file.write(header)
        file.flush()
        return MappedTensors(mmap.mmap(file.fileno(), num_bytes), tensors)


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two arrays of one type hold the same bytes; NaN equals itself, and 0 is not -0."""
    return np.array_equal(as_bytes(first), as_bytes(second))


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The array's bytes, uint8 `[num_bytes]`."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def parse_header(header: bytes, path: pathlib.Path, file_size: int) -> dict[str, TensorInfo]:
    """Reads and checks a header: known types, sizes that fit, tensors back to back up to the end.

    Raises:
        CheckpointError: names the file and what is wrong.
    """
    try:
        entries = json.loads(header[8:], object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = {
        name: _parse_entry(name, entry, len(header), path) for name, entry in entries.items()
    }
    _check_layout(tensors.values(), len(header), file_size, path)
    return tensors


def _read_header(file: Any, path: pathlib.Path, size: int) -> bytes:
    start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise CheckpointError(
            f"{path}: a Git LFS pointer; the real file was not downloaded (git lfs pull)"
        )
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes long; not a safetensors file")
    length = int.from_bytes(start[:8], "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path}: claims a header of {length} bytes in a file of {size}; "
            "not a safetensors file, or one cut short"
        )
    file.seek(0)
    return file.read(8 + length)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} appears twice")
    return values


def _parse_entry(name: str, entry: Any, data_start: int, path: pathlib.Path) -> TensorInfo:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: the header has no description of it")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: type {dtype!r}; one of {', '.join(DTYPES)} is needed")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: shape {shape!r} or data_offsets {offsets!r} is not valid")
    if math.prod(shape) * DTYPES[dtype][1] != 8 * (offsets[1] - offsets[0]):
        raise CheckpointError(
            f"{where}: {dtype} of shape {shape} does not take {offsets[1] - offsets[0]} bytes"
        )
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise CheckpointError(f"{where}: F4 of shape {shape} has rows that end inside a byte")
    start, end = (data_start + offset for offset in offsets)
    return TensorInfo(name, path.name, dtype, tuple(shape), start, end)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(
    tensors: Iterable[TensorInfo], data_start: int, file_size: int, path: pathlib.Path
) -> None:
    """Refuses tensors that overlap, bytes that belong to none, and a file cut or padded."""
    ordered = sorted(tensors, key=lambda info: (info.start, info.end))
    position = data_start
    for info in ordered:
        if info.start != position:
            problem = "overlaps the one before" if info.start < position else "follows a gap"
            raise CheckpointError(f"{path}: tensor {info.name} {problem}; the file is damaged")
        position = info.end
    if position > file_size:
        raise CheckpointError(
            f"{path}: cut short: {position} bytes are described and {file_size} are there; "
            "download it again"
        )
    if position < file_size:
        raise CheckpointError(
            f"{path}: {file_size - position} bytes follow the last tensor; the file is damaged"
        )
