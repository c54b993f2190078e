"""A Hugging Face checkpoint folder: its config, its index, and the tensors of all its files."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from convert.safetensors_file import SafetensorsFile, TensorInfo, same_bits
from jaxspec.checkpoint import parse_json
from jaxspec.config import ModelConfig, read_config
from jaxspec.errors import CheckpointError

INDEX = "model.safetensors.index.json"
# What other frameworks call weights; never a side file.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_PATTERNS = (
    "*.safetensors",
    "*.json",
    "*.txt",
    "*.model",
    "*.py",
    "*.jinja",
    "*.md",
    "LICENSE*",
)


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened folder.

    Attributes:
        files: the safetensors files by name.
        tensors: every tensor by name.
        index: the bytes of the index, None where there is none.
        config: the contents of `config.json`.
        generation_config: those of `generation_config.json`, None where there is none.
    """

    folder: pathlib.Path
    files: Mapping[str, SafetensorsFile]
    tensors: Mapping[str, TensorInfo]
    index: bytes | None
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None

    def model_config(self) -> ModelConfig:
        return read_config(self.config, self.generation_config)

    def file(self, name: str) -> SafetensorsFile:
        """The file that holds a tensor."""
        return self.files[self.tensors[name].file]

    def have_equal_bytes(self, first: str, second: str) -> bool:
        """Whether two tensors are the same, type and shape included; read a slab at a time."""
        a, b = self.tensors[first], self.tensors[second]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        slabs = zip(self.file(first).slabs(first), self.file(second).slabs(second), strict=True)
        return all(same_bits(x, y) for (_, x), (_, y) in slabs)

    def side_files(self) -> Iterator[pathlib.PurePath]:
        """Relative paths of everything that is not weights: configs, tokenizer, code, notes."""
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            is_weights = path.suffix in WEIGHT_SUFFIXES or path.name == INDEX
            if path.is_file() and not hidden and not is_weights:
                yield relative


def open_source(source: str) -> Source:
    """Opens a folder, or a repository of the Hugging Face Hub by its id.

    Raises:
        CheckpointError: not such a folder, or a file in it is missing or damaged.
        ConfigError: a model that is not supported.
    """
    folder = _folder(source)
    config = parse_json(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder}: no config.json; not a Hugging Face checkpoint folder")
    generation = parse_json(folder / "generation_config.json")
    read_config(config, generation)  # another model type is said before anything else
    index, locations = _read_index(folder)
    names = sorted(set(locations.values())) if locations else _all_files(folder)
    files = {name: SafetensorsFile(folder / name) for name in names}
    tensors = _collect(folder, files, locations)
    return Source(folder, files, tensors, index, config, generation)


def _folder(source: str) -> pathlib.Path:
    folder = pathlib.Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{source}: not a folder")
    if not HUB_ID.fullmatch(source):
        raise CheckpointError(f"{source}: no such folder")
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(
            f"{source}: no such folder; to read a Hugging Face Hub repository of this name, "
            "install jaxspec[hub]"
        ) from None
    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(source, allow_patterns=list(HUB_PATTERNS))
        )
    except Exception as error:  # the client's own errors, and those of what it downloads with
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{source}: no such folder, and the Hub does not give it: {reason}"
        ) from error


def _read_index(folder: pathlib.Path) -> tuple[bytes | None, dict[str, str]]:
    """The index as it is, and the file of each tensor."""
    path = folder / INDEX
    values = parse_json(path)
    if values is None:
        return None, {}
    locations = values.get("weight_map")
    if not isinstance(locations, dict) or not locations:
        raise CheckpointError(f"{path}: no weight_map")
    for name in set(map(json.dumps, locations.values())):
        file = json.loads(name)
        if not isinstance(file, str) or pathlib.PurePath(file).name != file:
            raise CheckpointError(f"{path}: {name} is not the name of a file in this folder")
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder}: {file} is missing; the index lists it")
    unlisted = sorted(set(_all_files(folder)) - set(locations.values()))
    if unlisted:
        raise CheckpointError(f"{folder}: {unlisted[0]} is not in the index")
    return path.read_bytes(), locations


def _all_files(folder: pathlib.Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"{folder}: no safetensors file")
    return names


def _collect(
    folder: pathlib.Path, files: Mapping[str, SafetensorsFile], locations: Mapping[str, str]
) -> dict[str, TensorInfo]:
    """All tensors, checked against the index in both directions."""
    tensors: dict[str, TensorInfo] = {}
    for file_name, file in files.items():
        for name, info in file.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {name} is in {tensors[name].file} and in {file_name}"
                )
            if locations and locations.get(name) != file_name:
                raise CheckpointError(f"{folder / file_name}: tensor {name} is not in the index")
            tensors[name] = info
    for name, file_name in locations.items():
        if name not in tensors:
            raise CheckpointError(
                f"{folder / file_name}: tensor {name} is missing; the index lists it"
            )
    return tensors
