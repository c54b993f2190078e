"""The golden cases as the tests read them: the checkpoint, the expected arrays, the tolerances."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.fixtures import HFModel

FOLDER = Path(__file__).parent / "golden"
DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I8": np.int8,
    "I64": np.int64,
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one file, by name."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        array = np.frombuffer(content[begin:end], DTYPES[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return tensors


@functools.cache
def checkpoint(case: str) -> HFModel:
    """The case's config and tensors; not to be changed."""
    config = json.loads((FOLDER / case / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for path in sorted((FOLDER / case).glob("*.safetensors")):
        tensors |= read_safetensors(path)
    return HFModel(config, tensors)


@functools.cache
def expected(case: str) -> dict[str, np.ndarray]:
    """`expected.npz`, by key."""
    with np.load(FOLDER / case / "expected.npz") as arrays:
        return dict(arrays)


def block_input(case: str, *, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """The input rows x [s, hidden] of the block tests, and NextN's tokens [s] (section 4.4)."""
    keys = expected(case)
    size, shift = int(keys["block_len"]), int(keys["block_shift"])
    ids = keys["input_ids"][:size]
    embedding = checkpoint(case).tensors["model.embed_tokens.weight"].astype(dtype)
    return embedding[ids] + dtype(0.25) * embedding[np.roll(ids, -shift)], np.roll(ids, -1)


def v4_block_input(case: str) -> tuple[np.ndarray, np.ndarray]:
    """The streams [s, j, hidden] of V4's block tests, float32, and their tokens [s]."""
    keys, source = expected(case), checkpoint(case)
    size, shift = int(keys["block_len"]), int(keys["block_shift"])
    ids, j = keys["input_ids"][:size], np.arange(source.config["hc_mult"])
    embedding = source.tensors["embed.weight"].astype(np.float32)
    at = np.arange(size)[:, None] + 7 * j
    shifted = embedding[ids[(at + shift) % size]]
    return embedding[ids[at % size]] + np.float32(0.25) * shifted, ids


def linear_input(case: str, columns: int) -> np.ndarray:
    """The input rows [16, columns] of the linear tests, float32 (section 4.5)."""
    ids = expected(case)["input_ids"]
    tensors = checkpoint(case).tensors
    name = "embed.weight" if case.startswith("v4") else "model.embed_tokens.weight"
    embedding = tensors[name].astype(np.float32)
    n, d = len(ids), embedding.shape[1]
    t, k = np.arange(16)[:, None], np.arange(columns)[None, :]
    first, second = (
        embedding[ids[(t + k // d) % n], k % d],
        embedding[ids[(t + k // d + 11) % n], k % d],
    )
    return first + np.float32(0.25) * second


def assert_within(got: Any, want: np.ndarray, atol: float) -> None:
    """Every element within `atol`; says where the largest difference is."""
    difference = row_errors(got, want)
    worst = int(np.argmax(difference))
    assert difference[worst] <= atol, f"row {worst}: {difference[worst]:.2e} > {atol:.0e}"


def assert_rows_within(got: Any, want: np.ndarray, *, share: float, atol: float, limit: float):
    """At least `share` of the rows within `atol`, and every row within `limit`."""
    difference = row_errors(got, want)
    assert difference.max() <= limit, f"a row differs by {difference.max():.2e} > {limit}"
    near = np.mean(difference <= atol)
    assert near >= share, f"{near:.1%} of the rows are within {atol}, {share:.0%} are needed"


def row_errors(got: Any, want: np.ndarray) -> np.ndarray:
    """The largest difference of each row, [rows]."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{got.shape} for {want.shape}"
    assert np.isfinite(got).all()
    return np.abs(got - want).reshape(-1, want.shape[-1]).max(-1)
