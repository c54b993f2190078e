"""`inspect`: what a folder or a checkpoint holds, and what is wrong with it."""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Collection
from typing import Any

import numpy as np

from convert import plan as planning
from convert.orbax_in import Checkpoint
from convert.source import open_source
from jaxspec.model import announced_draft

# Orbax's own test for a checkpoint takes a folder of safetensors files, or an empty one, for one.
INDICATOR = "orbax.checkpoint"


@dataclasses.dataclass(frozen=True)
class Report:
    """What `inspect` says.

    Attributes:
        drafts: the kinds that are there, complete.
        stages: draft layers of which there is any tensor.
        tensors, bytes: how many there are of the weights.
        dtypes: number of tensors by stored type.
        missing, unknown, wrong: tensors at fault; all empty where the source can be converted.
        faults: the same as sentences.
        skipped: tensors that a conversion does not store, and why.
        unknown_config_keys: keys of the config that nothing reads.
    """

    family: str
    drafts: tuple[str, ...]
    stages: int
    tensors: int
    bytes: int
    dtypes: dict[str, int]
    missing: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    unknown_config_keys: tuple[str, ...] = ()


def inspect(name: str, *, as_json: bool) -> str:
    """Describes a Hugging Face folder, a Hub repository, or a converted checkpoint.

    Raises:
        CheckpointError: it is none of these, or a file is damaged.
        ConfigError: the config cannot be honoured.
    """
    path = pathlib.Path(name)
    report = _checkpoint_report(path) if (path / INDICATOR).is_file() else _source_report(name)
    if as_json:
        return json.dumps(dataclasses.asdict(report), indent=2)
    return "\n".join(f"{key + ':':21}{value}" for key, value in _lines(report))


def _source_report(name: str) -> Report:
    source = open_source(name)
    config = source.model_config()
    is_dspark = planning.has_dspark(config, source.tensors)
    draft = None if is_dspark else announced_draft(config)
    matching = planning.match(source.tensors, config, draft)
    at_fault: dict[str, list[str]] = {"missing": [], "unknown": [], "wrong": []}
    for fault in matching.faults:
        at_fault[fault.kind].append(fault.tensor)
    lacks_draft = any(fault.parameter.startswith("draft/") for fault in matching.faults)
    return Report(
        family=config.family,
        drafts=("dspark",) if is_dspark else (draft,) if draft and not lacks_draft else (),
        stages=planning.count_stages(config, source.tensors),
        tensors=len(source.tensors),
        bytes=sum(info.num_bytes for info in source.tensors.values()),
        dtypes=_count(info.dtype for info in source.tensors.values()),
        faults=tuple(fault.text for fault in matching.faults),
        skipped=dict(matching.skipped),
        unknown_config_keys=config.unknown_keys,
        **{kind: tuple(names) for kind, names in at_fault.items()},
    )


def _checkpoint_report(path: pathlib.Path) -> Report:
    checkpoint = Checkpoint(path)
    metadata = checkpoint.metadata
    return Report(
        family=metadata.family,
        drafts=(metadata.draft,) if metadata.draft else (),
        stages=_count_stored_stages(checkpoint.leaves),
        tensors=len(checkpoint.leaves),
        bytes=sum(map(checkpoint.num_bytes, checkpoint.leaves)),
        dtypes=_count(np.dtype(leaf.dtype).name for leaf in checkpoint.leaves.values()),
    )


def _count_stored_stages(paths: Collection[str]) -> int:
    """Draft layers of a checkpoint; NextN, which is always one, does not number it."""
    numbered = {path.split("/")[2] for path in paths if path.startswith("draft/layers/")}
    return len(numbered) or int(any(path.startswith("draft/") for path in paths))


def _count(names: Any) -> dict[str, int]:
    return dict(sorted(collections.Counter(names).items()))


def _lines(report: Report) -> list[tuple[str, object]]:
    counts = ", ".join(f"{count} {dtype}" for dtype, count in report.dtypes.items())
    lines: list[tuple[str, object]] = [
        ("family", report.family),
        ("drafts", ", ".join(report.drafts) or "none"),
        ("draft stages", report.stages),
        ("tensors", report.tensors),
        ("bytes", report.bytes),
        ("types", counts),
    ]
    lines += [("skipped", f"{name}: {reason}") for name, reason in report.skipped.items()]
    if report.unknown_config_keys:
        lines.append(("unknown config keys", ", ".join(report.unknown_config_keys)))
    return lines + [("fault", text) for text in report.faults]
