"""What a conversion will do: every tensor used or skipped once, every parameter filled once.

The plan is made from names, shapes and types alone. `convert` makes it from a folder, `verify` and
`export` make the same one again from the record that the checkpoint keeps.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

import ml_dtypes
import numpy as np

from convert import stored_types, table_v3, table_v4
from convert.dequantize import to_bf16
from convert.matching import WITHOUT_DRAFT, Matching
from convert.rules import Part, Table
from convert.safetensors_file import TensorInfo
from jaxspec.checkpoint import Leaf as StoredLeaf
from jaxspec.checkpoint import Metadata
from jaxspec.config import DeepseekV4Config, ModelConfig
from jaxspec.errors import CheckpointError
from jaxspec.model import DraftKind, announced_draft, parameter_specs
from pallas_kernels.quantized import FP4_BLOCK_SHAPE, QuantizedTensor

DraftOption = Literal["auto", "nextn", "mtp", "none"]
Weights = Literal["keep", "bf16"]

# Parameters are saved together up to about this size: Orbax slows down with the number of saves,
# and two groups are in memory at a time.
GROUP_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array, of the bytes that the source stores.

    Attributes:
        path: in the tree; a quantized parameter has two leaves, `values` and `scales`.
        parts: the tensors that it is made of.
        copies: tensors equal to the whole of it, byte for byte.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[Part, ...]
    copies: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter: an array, or FP8 or FP4 values and their scales."""

    path: str
    leaves: tuple[Leaf, ...]

    @property
    def is_quantized(self) -> bool:
        return len(self.leaves) == 2

    @property
    def is_fp4(self) -> bool:
        return self.is_quantized and self.leaves[0].dtype == np.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix it stands for."""
        *lead, columns = self.leaves[0].shape
        return (*lead, 2 * columns) if self.is_fp4 else (*lead, columns)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A whole conversion.

    Attributes:
        groups: what is saved together, in order.
        skipped: tensors that are not stored, and why; their bytes are kept in the record.
        dropped: tensors of a draft that was not asked for; nothing of them is kept.
        copies: tensors that are not stored because they equal the target's.
    """

    draft: DraftKind | None
    weights: Weights
    block_shape: tuple[int, int]
    groups: Sequence[Sequence[Parameter]]
    skipped: Mapping[str, str]
    dropped: Sequence[str]
    copies: frozenset[str]

    @property
    def parameters(self) -> Iterator[Parameter]:
        return (parameter for group in self.groups for parameter in group)

    @property
    def num_bytes(self) -> int:
        """What the tree will hold."""
        return sum(map(self.group_bytes, self.groups))

    def group_bytes(self, group: Sequence[Parameter]) -> int:
        return sum(
            _num_bytes(leaf)
            for parameter in group
            for leaf in self.stored_leaves(parameter).values()
        )

    def stored_leaves(self, parameter: Parameter) -> dict[str, StoredLeaf]:
        """Shape and type of the arrays stored for a parameter, by path."""
        if self.weights == "bf16" and parameter.is_quantized:
            return {parameter.path: StoredLeaf(parameter.shape, np.dtype(ml_dtypes.bfloat16))}
        return {leaf.path: StoredLeaf(leaf.shape, leaf.dtype) for leaf in parameter.leaves}

    def stored_arrays(
        self, parameter: Parameter, arrays: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The arrays stored for a parameter, from its leaves as the source has them."""
        if self.weights == "keep" or not parameter.is_quantized:
            return {leaf.path: arrays[leaf.path] for leaf in parameter.leaves}
        values, scales = (arrays[leaf.path] for leaf in parameter.leaves)
        block = FP4_BLOCK_SHAPE if parameter.is_fp4 else self.block_shape
        return {parameter.path: to_bf16(QuantizedTensor(values, scales, block))}


def choose_draft(
    option: DraftOption, config: ModelConfig, tensors: Collection[str]
) -> DraftKind | None:
    """The draft to convert.

    Raises:
        CheckpointError: the one asked for is not announced by the config, or the one that is there
            is not supported.
    """
    announced = announced_draft(config)
    if option == "none":
        return None
    if has_dspark(config, tensors):
        raise CheckpointError(
            f"the draft is DSpark, with {count_stages(config, tensors)} stages: "
            f"DSpark is not supported yet; {WITHOUT_DRAFT}"
        )
    if option not in ("auto", announced):
        name = {"nextn": "NextN", "mtp": "MTP"}[option]
        raise CheckpointError(f"config.json announces no {name} layer; convert with --draft none")
    return announced


def has_dspark(config: ModelConfig, tensors: Collection[str]) -> bool:
    """Whether the draft that is stored is DSpark, which the config does not say."""
    return isinstance(config, DeepseekV4Config) and table_v4.has_dspark(tensors)


def count_stages(config: ModelConfig, tensors: Collection[str]) -> int:
    """Draft layers of which there is any tensor, whatever the config says."""
    family = table_v4 if isinstance(config, DeepseekV4Config) else table_v3
    return len(family.stages(config, tensors))


def recorded_draft(metadata: Metadata) -> DraftKind | None:
    """The draft that a checkpoint holds.

    Raises:
        CheckpointError: one that this version does not know.
    """
    held = metadata.draft
    if held not in ("nextn", "mtp", None):
        raise CheckpointError(f"the checkpoint holds a {held} draft; update jaxspec")
    return held


def table(config: ModelConfig, tensors: Collection[str]) -> Table:
    """The rules of the config's family."""
    if isinstance(config, DeepseekV4Config):
        return table_v4.table(config, tensors)
    return table_v3.table(config)


def match(
    tensors: Mapping[str, TensorInfo], config: ModelConfig, draft: DraftKind | None
) -> Matching:
    """Matches tensors with the model's parameters; faults are listed in it, not raised.

    Raises:
        CheckpointError: a kind of quantization that cannot be converted at all.
    """
    if config.quantization and config.quantization.method == "nvfp4":
        raise CheckpointError(
            "config.json: quantization_config names NVFP4, which cannot be converted; "
            "use the FP8 or BF16 checkpoint"
        )
    specs = parameter_specs(config, draft)
    return Matching(tensors, table(config, tensors), specs, config, draft is not None)


def make(
    tensors: Mapping[str, TensorInfo],
    config: ModelConfig,
    draft: DraftKind | None,
    weights: Weights,
    are_equal: Callable[[str, str], bool],
) -> Plan:
    """Plans a conversion.

    Args:
        are_equal: whether two tensors have the same type, shape and bytes.

    Raises:
        CheckpointError: a tensor is unknown, missing, of the wrong shape or type, or given twice.
    """
    matching = match(tensors, config, draft)
    matching.raise_first_fault()
    copies: dict[str, list[Part]] = {}
    for name, owner in matching.shared.items():
        if _is_copy(name, owner, matching, are_equal):
            copies.setdefault(owner, []).append(Part(name, owner))
    copied = {part.tensor for parts in copies.values() for part in parts}
    parameters = [
        _parameter(path, matching, copies.get(path, []))
        for path, parts in matching.parts.items()
        if not any(part.tensor in copied for part in parts.values())
    ]
    return Plan(
        draft=draft,
        weights=weights,
        block_shape=config.weight_block_size,
        groups=_group(parameters, weights),
        skipped=matching.skipped,
        dropped=matching.dropped,
        copies=frozenset(copied),
    )


def _is_copy(
    name: str, owner: str, matching: Matching, are_equal: Callable[[str, str], bool]
) -> bool:
    original, scale_of = matching.parts[owner][None].tensor, matching.scale_of
    if (name in scale_of) != (original in scale_of) or not are_equal(name, original):
        return False
    return name not in scale_of or are_equal(scale_of[name], scale_of[original])


def _parameter(path: str, matching: Matching, copies: Sequence[Part]) -> Parameter:
    by_index, scale_of, tensors = matching.parts[path], matching.scale_of, matching.tensors
    parts = [by_index[index] for index in sorted(by_index, key=lambda index: index or 0)]
    info = tensors[parts[0].tensor]
    shape = stored_types.values_shape(info.dtype, matching.specs[path].shape)
    dtype = stored_types.kept_as(info)
    if info.name not in scale_of:
        return Parameter(path, (Leaf(path, shape, dtype, tuple(parts), tuple(copies)),))

    def of_scales(parts: Sequence[Part]) -> tuple[Part, ...]:
        return tuple(dataclasses.replace(part, tensor=scale_of[part.tensor]) for part in parts)

    values = Leaf(f"{path}/values", shape, dtype, tuple(parts), tuple(copies))
    scales = Leaf(
        f"{path}/scales",
        matching.scales_shape(info, matching.specs[path]),
        tensors[scale_of[info.name]].array_dtype,
        of_scales(parts),
        of_scales(copies),
    )
    return Parameter(path, (values, scales))


def _group(parameters: Sequence[Parameter], weights: Weights) -> list[list[Parameter]]:
    """Cuts the parameters, in the tree's order, where a group has reached `GROUP_BYTES`."""
    groups: list[list[Parameter]] = []
    size = GROUP_BYTES
    for parameter in sorted(parameters, key=lambda parameter: _order(parameter.path)):
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += _grown(parameter, weights) * sum(map(_num_bytes, parameter.leaves))
    return groups


def _grown(parameter: Parameter, weights: Weights) -> int:
    """How many times the source's bytes are stored."""
    if weights == "keep" or not parameter.is_quantized:
        return 1
    return 4 if parameter.is_fp4 else 2


def _num_bytes(leaf: Leaf | StoredLeaf) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _order(path: str) -> list[tuple[int, int | str]]:
    """A sort key: the target before the draft, its layers by number."""
    root, *rest = path.split("/")
    numbered = [(0, int(part)) if part.isdecimal() else (1, part) for part in rest]
    return [(int(root == "draft"), ""), *numbered]
