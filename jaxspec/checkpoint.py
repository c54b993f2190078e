"""The checkpoint format: an Orbax tree of the parameters, and what its metadata says.

A matrix stored in FP8 is a node with two leaves, `values` and `scales`. Hugging Face's side files
(`tokenizer.json` and others) lie in `hf/`. `load` reads this and nothing else.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

import orbax.checkpoint.experimental.v1 as ocp

from jaxspec.errors import CheckpointError

FORMAT_VERSION = 1
METADATA_KEY = "jaxspec"
HF_FILES = "hf"


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a checkpoint says about itself, under `custom_metadata["jaxspec"]`.

    Attributes:
        family: model family, `deepseek_v3`.
        draft: kind of the draft that the tree holds, or None.
        weights: `keep` as the source stored them, or `bf16` where they were dequantized.
        hf_config, generation_config: the contents of the source's files.
    """

    family: str
    draft: str | None
    weights: Literal["keep", "bf16"]
    hf_config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """The value stored in the checkpoint."""
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: pathlib.Path) -> "Metadata":
        """Reads the stored value.

        Raises:
            CheckpointError: it was written by a newer jaxspec, or is incomplete.
        """
        version = values.get("format_version") if isinstance(values, Mapping) else None
        if not isinstance(version, int) or version < 1:
            raise CheckpointError(
                f"{where}: the checkpoint's metadata is damaged; convert it again"
            )
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{where}: checkpoint format {version} is newer than {FORMAT_VERSION}, "
                "the newest that this jaxspec reads; update jaxspec"
            )
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise CheckpointError(
                f"{where}: the checkpoint's metadata lacks {missing[0]!r}; convert it again"
            )
        if not isinstance(values["hf_config"], Mapping) or not isinstance(
            values["generation_config"], Mapping | None
        ):
            raise CheckpointError(
                f"{where}: the checkpoint's metadata is damaged; convert it again"
            )
        return cls(**{name: values[name] for name in names})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Shape and dtype of one stored array."""

    shape: tuple[int, ...]
    dtype: Any


def read(path: str | pathlib.Path) -> tuple[Metadata, dict[str, Leaf]]:
    """The metadata of a checkpoint and its arrays by path, without reading an array.

    Raises:
        CheckpointError: there is no finished jaxspec checkpoint of a known format at `path`.
    """
    path = absolute(path)
    _refuse_what_is_not_a_checkpoint(path)
    try:
        stored = ocp.metadata(str(path))
    except Exception as error:  # Orbax raises many kinds for a damaged folder.
        raise CheckpointError(
            f"{path}: the checkpoint cannot be read: {first_line(error)}"
        ) from error
    custom: Any = stored.custom_metadata
    if not isinstance(custom, dict) or METADATA_KEY not in custom:
        raise CheckpointError(f"{path}: an Orbax checkpoint, but not one that jaxspec wrote")
    leaves: dict[str, Leaf] = {}
    if not isinstance(stored.metadata, Mapping):
        raise CheckpointError(f"{path}: the checkpoint is damaged: it lists no arrays")
    _collect(stored.metadata, "", leaves)
    return Metadata.from_json(custom[METADATA_KEY], path), leaves


def read_metadata(path: str | pathlib.Path) -> Metadata:
    """The metadata of a checkpoint; raises as `read` does."""
    return read(path)[0]


def absolute(path: str | pathlib.Path) -> pathlib.Path:
    """The path as Orbax needs it, `~` expanded."""
    return pathlib.Path(path).expanduser().absolute()


def first_line(error: BaseException) -> str:
    """The first line of another library's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refuse_what_is_not_a_checkpoint(path: pathlib.Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    # Orbax would take any folder of safetensors for one of its own.
    if (path / "_CHECKPOINT_METADATA").is_file():
        return
    if (path / "config.json").is_file():
        raise CheckpointError(
            f"{path}: a Hugging Face folder; convert it first: jaxspec-convert convert {path} DST"
        )
    raise CheckpointError(f"{path}: not a finished jaxspec checkpoint")


def _collect(node: Any, path: str, leaves: dict[str, Leaf]) -> None:
    if isinstance(node, Mapping):
        for name, child in node.items():
            _collect(child, f"{path}/{name}" if path else str(name), leaves)
    else:
        leaves[path] = Leaf(tuple(node.shape), node.dtype)


def parse_json(path: pathlib.Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no such file.

    Raises:
        CheckpointError: the file does not hold a JSON object.
    """
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return values
