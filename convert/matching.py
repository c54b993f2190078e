"""The exactly-once engine: matches tensors with parameters by the rules, and lists every fault."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from convert.rules import Part, Table
from convert.safetensors_file import TensorInfo
from jaxspec.config import ModelConfig
from jaxspec.errors import CheckpointError
from jaxspec.model import ParameterSpec
from pallas_kernels.quantized import scales_shape

SCALE_SUFFIX = "_scale_inv"
FLOAT_TYPES = ("BF16", "F16", "F32")
QUANTIZED_TYPE, SCALE_TYPE = "F8_E4M3", "F32"


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
        self.block_shape = config.weight_block_size
        self.parts: dict[str, dict[int | None, Part]] = {}
        self.scale_of: dict[str, str] = {}
        self.shared: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.dropped: list[str] = []
        self.faults: list[Fault] = []
        for name in self._weights():
            self._place(name, table, has_draft)
        for path, spec in specs.items():
            self._check_filled(path, spec, table)
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
        weights = []
        for name in self.tensors:
            base = name.removesuffix(SCALE_SUFFIX)
            if base == name:
                weights.append(name)
            elif base in self.tensors:
                self.scale_of[base] = name
            else:
                self._fault("unknown", name, f"unknown tensor {name}: a scale without its weight")
        return weights

    def _place(self, name: str, table: Table, has_draft: bool) -> None:
        found = table.find(name)
        if found is None:
            self._fault("unknown", name, f"unknown tensor {name}: not one of this model")
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
        is_quantized = spec.quantizable and info.dtype == QUANTIZED_TYPE
        needed = (*FLOAT_TYPES, QUANTIZED_TYPE) if spec.quantizable else FLOAT_TYPES
        if not is_quantized and info.dtype not in FLOAT_TYPES:
            self._wrong(info, f"type {info.dtype}", " or ".join(needed))
        if info.shape != part.tensor_shape(spec.shape):
            self._wrong(info, f"shape {info.shape}", str(part.tensor_shape(spec.shape)))
        if scale is None:
            if is_quantized:
                name = part.tensor + SCALE_SUFFIX
                self._fault(
                    "missing", name, f"{part.tensor} is {info.dtype}, but {name} is missing"
                )
            return
        if not is_quantized:
            self._wrong(scale, f"a scale for a weight stored as {info.dtype}", QUANTIZED_TYPE)
            return
        shape = part.tensor_shape(scales_shape(spec.shape, self.block_shape))
        if scale.dtype != SCALE_TYPE:
            self._wrong(scale, f"type {scale.dtype}", SCALE_TYPE)
        if scale.shape != shape:
            block = "x".join(map(str, self.block_shape))
            self._wrong(scale, f"shape {scale.shape}", f"{shape} for blocks of {block}")

    def _wrong(self, info: TensorInfo, what: str, needed: str) -> None:
        self._fault("wrong", info.name, f"{info.file}: {info.name} has {what}; {needed} is needed")

    def _check_filled(self, path: str, spec: ParameterSpec, table: Table) -> None:
        filled = self.parts.get(path, {})
        if None in filled or (spec.optional and not filled):
            return
        published = next(table.sources(path))
        for match in published:
            if not {part.index for part in match.parts} & filled.keys():
                self._missing(match.tensor, path)
        self._check_one_type(filled.values())

    def _missing(self, name: str, path: str) -> None:
        is_draft = path.startswith("draft/")
        text = f"tensor {name} is missing" + (" of the draft layer" if is_draft else "")
        remedy = "convert with --draft none to take the target alone" if is_draft else ""
        self._fault("missing", name, text, path, remedy)

    def _check_one_type(self, parts: Iterable[Part]) -> None:
        infos = [self.tensors[part.tensor] for part in parts]
        for info in infos:
            if info.dtype != infos[0].dtype:
                self._wrong(
                    info, f"type {info.dtype}", f"{infos[0].dtype}, as {infos[0].name} has,"
                )
