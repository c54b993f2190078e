"""The exactly-once engine: matches tensors with parameters by the rules, and lists every fault."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from convert import stored_types
from convert.rules import Part, Table
from convert.safetensors_file import TensorInfo
from jaxspec.config import DeepseekV4Config, ModelConfig
from jaxspec.errors import CheckpointError
from jaxspec.model import ParameterSpec
from pallas_kernels.quantized import scales_shape

WITHOUT_DRAFT = "convert with --draft none to take the target alone"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What makes a checkpoint unusable, in one line."""

    kind: Literal["unknown", "missing", "wrong"]
    tensor: str
    text: str
    parameter: str = ""
    remedy: str = ""


class Matching:
    """What goes where, by names, shapes and types alone.

    Attributes:
        tensors: all of the source, by name.
        parts: those of each parameter's values, by path and by index (None: the whole).
        scale_of: the scale tensor of each quantized one.
        shared: tensors that may be a copy of another parameter, and that one's path.
        skipped: tensors that are not stored, and why.
        dropped: tensors of a draft that is not converted.
        faults: empty where the source can be converted.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        table: Table,
        specs: Mapping[str, ParameterSpec],
        config: ModelConfig,
        has_draft: bool,
    ):
        self.tensors = tensors
        self.specs = specs
        self._table = table
        self._fp8_block = config.weight_block_size
        self.parts: dict[str, dict[int | None, Part]] = {}
        self.scale_of: dict[str, str] = {}
        self.shared: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.dropped: list[str] = []
        self.faults: list[Fault] = []
        for name in self._weights():
            self._place(name, has_draft)
        absent = self._absent_stages(config)
        for path, spec in specs.items():
            if not path.startswith(absent):
                self._check_filled(path, spec)
        self._check_expert_dtype(config)
        if config.quantization is not None and not self.scale_of and not self.faults:
            self._fault(
                "wrong",
                "config.json",
                "config.json: quantization_config names fp8, but no weight is stored so",
                remedy="remove quantization_config",
            )

    def raise_first_fault(self) -> None:
        """Refuses a source with faults.

        Raises:
            CheckpointError: the first one, and how many more there are.
        """
        if self.faults:
            fault, more = self.faults[0], len(self.faults) - 1
            count = f" (and {more} more; inspect lists all)" if more else ""
            remedy = f"; {fault.remedy}" if fault.remedy else ""
            raise CheckpointError(fault.text + count + remedy)

    def _fault(
        self,
        kind: Literal["unknown", "missing", "wrong"],
        tensor: str,
        text: str,
        parameter: str = "",
        remedy: str = "",
    ) -> None:
        self.faults.append(Fault(kind, tensor, text, parameter, remedy))

    def _weights(self) -> list[str]:
        """All tensors but the scales; those are paired with their weights, wherever they lie."""
        for name in self.tensors:
            stored = [scale for scale in self._table.scale_names(name) if scale in self.tensors]
            if stored:
                self.scale_of[name] = stored[0]
        scales = set(self.scale_of.values())
        return [name for name in self.tensors if name not in scales]

    def _place(self, name: str, has_draft: bool) -> None:
        found = self._table.find(name)
        if found is None:
            is_scale = self._table.is_scale_name(name)
            reason = "a scale without its weight" if is_scale else "not one of this model"
            self._fault("unknown", name, f"unknown tensor {name}: {reason}")
            return
        rule, parts = found.rule, found.parts
        if rule.transform == "skip":
            self.skipped[name] = rule.detail
            return
        if not has_draft and parts[0].path.startswith("draft/"):
            scale = self.scale_of.pop(name, None)
            self.dropped += [name] if scale is None else [name, scale]
            return
        if any(part.path not in self.specs for part in parts):
            self._fault("unknown", name, f"unknown tensor {name}: not one of this config's model")
            return
        if rule.transform == "shared":
            self.shared[name] = rule.detail
        for part in parts:
            self._check(part, self.specs[part.path])
            filled = self.parts.setdefault(part.path, {})
            clashing = filled.keys() if part.index is None else filled.keys() & {part.index, None}
            for index in clashing:
                other = filled[index].tensor
                self._fault("wrong", name, f"{name} and {other} are the same parameter")
            filled[part.index] = part

    def _check(self, part: Part, spec: ParameterSpec) -> None:
        """Compares shape and type with what the parameter needs, those of the scales too."""
        info = self.tensors[part.tensor]
        scale = self.tensors.get(self.scale_of.get(part.tensor, ""))
        allowed = stored_types.allowed(spec)
        is_quantized = info.dtype in allowed and stored_types.needs_scales(info.dtype)
        if info.dtype not in allowed:
            self._wrong(info, f"type {info.dtype}", " or ".join(allowed))
        shape = stored_types.values_shape(info.dtype, part.tensor_shape(spec.shape))
        if info.array_shape != shape:
            self._wrong(info, f"shape {info.array_shape}", str(shape))
        if scale is None:
            if is_quantized:
                name = self._table.scale_names(part.tensor)[0]
                self._fault(
                    "missing", name, f"{part.tensor} is {info.dtype}, but {name} is missing"
                )
            return
        if not is_quantized:
            self._wrong(scale, f"a scale for a weight stored as {info.dtype}", stored_types.FP8)
            return
        shape = part.tensor_shape(self.scales_shape(info, spec))
        if scale.dtype not in stored_types.SCALES:
            self._wrong(scale, f"type {scale.dtype}", " or ".join(stored_types.SCALES))
        if scale.shape != shape:
            block = "x".join(map(str, stored_types.block_shape(info.dtype, self._fp8_block)))
            self._wrong(scale, f"shape {scale.shape}", f"{shape} for blocks of {block}")

    def scales_shape(self, info: TensorInfo, spec: ParameterSpec) -> tuple[int, ...]:
        """The shape of a parameter's scales, where its values are stored like this tensor."""
        block = stored_types.block_shape(info.dtype, self._fp8_block)
        return scales_shape(spec.shape, block)

    def _absent_stages(self, config: ModelConfig) -> tuple[str, ...]:
        """Folders of draft layers of which no tensor is there; one fault names them all."""
        wanted, there = ({_stage(path) for path in paths} for paths in (self.specs, self.parts))
        absent = sorted(wanted - there - {None}, key=lambda stage: stage or 0)
        if absent:
            names = ", ".join(f"mtp.{stage}" for stage in absent)
            others = ", ".join(
                f"model.layers.{config.num_hidden_layers + (s or 0)}" for s in absent
            )
            self._fault(
                "missing",
                names,
                f"the weights of the draft are missing: no tensor of {names} (or {others})",
                f"draft/layers/{absent[0]}",
                f"use a checkpoint that has them, or {WITHOUT_DRAFT}",
            )
        return tuple(f"draft/layers/{stage}/" for stage in absent)

    def _check_expert_dtype(self, config: ModelConfig) -> None:
        """Refuses FP4 experts that the config calls FP8, and the other way round."""
        said = config.expert_dtype if isinstance(config, DeepseekV4Config) else None
        for path, parts in self.parts.items():
            info = self.tensors[next(iter(parts.values())).tensor]
            stored = "fp4" if info.dtype in stored_types.FP4 else "fp8"
            is_expert = len(self.specs[path].shape) == 3 and stored_types.needs_scales(info.dtype)
            if said and is_expert and stored != said:
                self._fault(
                    "wrong",
                    "config.json",
                    f"config.json: expert_dtype={said!r}, but {info.name} is stored as "
                    f"{info.dtype}, which is {stored}",
                )
                return

    def _wrong(self, info: TensorInfo, what: str, needed: str) -> None:
        self._fault("wrong", info.name, f"{info.file}: {info.name} has {what}; {needed} is needed")

    def _check_filled(self, path: str, spec: ParameterSpec) -> None:
        filled = self.parts.get(path, {})
        if None in filled or (spec.optional and not filled):
            return
        published = next(self._table.sources(path))
        for match in published:
            if not {part.index for part in match.parts} & filled.keys():
                self._missing(match.tensor, path)
        self._check_one_type(part.tensor for part in filled.values())
        scales = (self.scale_of.get(part.tensor) for part in filled.values())
        self._check_one_type(name for name in scales if name)

    def _missing(self, name: str, path: str) -> None:
        is_draft = path.startswith("draft/")
        text = f"tensor {name} is missing" + (" of the draft layer" if is_draft else "")
        remedy = WITHOUT_DRAFT if is_draft else ""
        self._fault("missing", name, text, path, remedy)

    def _check_one_type(self, names: Iterable[str]) -> None:
        infos = [self.tensors[name] for name in names]
        for info in infos:
            if info.dtype != infos[0].dtype:
                self._wrong(
                    info, f"type {info.dtype}", f"{infos[0].dtype}, as {infos[0].name} has,"
                )


def _stage(path: str) -> int | None:
    """Number of the draft layer that a parameter belongs to, where drafts have several."""
    parts = path.split("/")
    return int(parts[2]) if parts[:2] == ["draft", "layers"] else None
