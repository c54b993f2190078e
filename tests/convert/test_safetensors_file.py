"""The reader: every type, any order, an independent reader's opinion, and files that lie."""

import json
import resource
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from convert.safetensors_file import SafetensorsFile, create
from jaxspec.errors import CheckpointError
from tests.hf_folder import Entry, safetensors_bytes

BITS = {
    "BF16": 16, "F16": 16, "F32": 32, "F8_E4M3": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "I32": 32,
    "I64": 64, "F4": 4,
}  # fmt: skip


def entry(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> Entry:
    """A tensor of random bytes."""
    num_bytes = int(np.prod(shape, dtype=int)) * BITS[dtype] // 8
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8).tobytes()
    return Entry(name, dtype, shape, data)


def write(path: Path, *entries: Entry, **options) -> Path:
    path.write_bytes(safetensors_bytes(entries, **options))
    return path


@hypothesis.given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(BITS)),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=6,
    ),
    st.integers(0, 9),
)
@hypothesis.settings(deadline=None, max_examples=50)
def test_every_byte_of_every_type_arrives(tmp_path_factory, kinds, padding):
    entries = [
        entry(f"t{i}", dtype, (*shape, 2) if dtype == "F4" else tuple(shape), seed=i)
        for i, (dtype, shape) in enumerate(kinds)
    ]
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    file = SafetensorsFile(write(path, *entries, header_padding=padding))
    assert list(file.tensors) == [e.name for e in entries]
    for e in entries:
        array = file.read(e.name)
        assert array.tobytes() == e.data
        want = (*e.shape[:-1], e.shape[-1] // 2) if e.dtype == "F4" else e.shape
        assert array.shape == want


def test_eight_bit_floats_keep_their_meaning(tmp_path):
    """D05: 0x7F and 0xFF are NaN, 0x80 is negative zero; E8M0's 0 is 2^-127 and 255 NaN."""
    fp8 = Entry("fp8", "F8_E4M3", (4,), bytes([0x7F, 0xFF, 0x80, 0x38]))
    e8m0 = Entry("e8m0", "F8_E8M0", (3,), bytes([0, 127, 255]))
    file = SafetensorsFile(write(tmp_path / "x.safetensors", fp8, e8m0))
    values = file.read("fp8").astype(np.float32)
    assert np.isnan(values[:2]).all() and np.signbit(values[2]) and values[2] == 0
    assert values[3] == 1
    scales = file.read("e8m0").astype(np.float32)
    assert scales[0] == np.float32(2.0**-127) and scales[1] == 1 and np.isnan(scales[2])


def test_the_reference_library_reads_the_same(tmp_path):
    entries = [
        entry(dtype, dtype, (3, 4), i) for i, dtype in enumerate(("F16", "F32", "I32", "I8"))
    ]
    path = write(tmp_path / "x.safetensors", *entries, metadata={"format": "pt"})
    file, reference = SafetensorsFile(path), safetensors.numpy.load_file(path)
    for name, array in reference.items():
        np.testing.assert_array_equal(file.read(name).view(np.uint8), array.view(np.uint8))


def test_the_reference_library_s_own_files_are_read(tmp_path):
    arrays = {"b": np.arange(6, dtype=np.int64), "a": np.ones((2, 3), ml_dtypes.bfloat16)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"a": "b"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        assert file.read(name).tobytes() == array.tobytes()


def test_a_large_tensor_is_read_a_slab_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("convert.safetensors_file.SLAB_BYTES", 4096)
    e = entry("x", "F32", (100, 77))
    file = SafetensorsFile(write(tmp_path / "x.safetensors", entry("y", "I8", (5,)), e))
    slabs = list(file.slabs("x"))
    assert len(slabs) == 8
    assert b"".join(slab.tobytes() for _, slab in slabs) == e.data


def test_a_file_is_written_through_the_same_slabs(tmp_path):
    entries = [entry("x", "F8_E4M3", (3, 4)), entry("y", "F32", (2,))]
    source = SafetensorsFile(write(tmp_path / "x.safetensors", *entries))
    target = create(tmp_path / "y.safetensors", source.header, source.num_bytes)
    for e in entries:
        for where, slab in target.slabs(e.name):
            slab[...] = source.read(e.name)[where]
    assert (tmp_path / "y.safetensors").read_bytes() == (tmp_path / "x.safetensors").read_bytes()


GOOD = [entry("a", "F32", (2, 3)), entry("b", "BF16", (4,))]
DAMAGED = {
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "not downloaded"),
    "empty": (b"", "0 bytes"),
    "last byte cut": (safetensors_bytes(GOOD)[:-1], "cut short"),
    "one byte added": (safetensors_bytes(GOOD) + b"\0", "1 bytes follow"),
    "header length 2^63": (safetensors_bytes(GOOD, header_length=2**63), str(2**63)),
    "header longer than the file": (safetensors_bytes(GOOD, header_length=5000), "5000"),
    "header cut": (safetensors_bytes(GOOD, header_length=20), "header is not valid"),
    "header is a list": ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
    "not a safetensors file": (b"PK\x03\x04" + bytes(range(200)), "not a safetensors file"),
    "name twice": (safetensors_bytes(GOOD).replace(b'"b"', b'"a"'), "'a' appears twice"),
    "unknown type": (safetensors_bytes(GOOD).replace(b'"F32"', b'"F99"'), "F99"),
    "negative size": (safetensors_bytes(GOOD).replace(b"[2,3]", b"[-2,3]"), "not valid"),
    "too few bytes": (safetensors_bytes(GOOD).replace(b"[2,3]", b"[2,4]"), "does not take 24"),
    "overlap": (safetensors_bytes(GOOD).replace(b"[24,32]", b"[16,24]"), "overlaps"),
    "gap": (safetensors_bytes(GOOD).replace(b"[24,32]", b"[25,33]"), "follows a gap"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named_and_refused_at_once(kind, tmp_path):
    """D04: and its header's claims cost no memory."""
    content, reason = DAMAGED[kind]
    path = tmp_path / "model-00002-of-00003.safetensors"
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors") as caught:
        SafetensorsFile(path)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"x\.safetensors: cannot be read: No such file"):
        SafetensorsFile(tmp_path / "x.safetensors")


@hypothesis.given(st.binary(max_size=80))
@hypothesis.settings(deadline=None)
def test_no_bytes_crash_the_reader(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    try:
        tensors = SafetensorsFile(path).tensors
    except CheckpointError:
        return
    assert not tensors and isinstance(json.loads(content), dict)
