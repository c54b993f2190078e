"""Rules as data: where each tensor of a checkpoint goes in the tree, readable in both directions.

A pattern and a path hold placeholders, `{layer}`, whose allowed numbers the config gives. A weight
and its block scales are one tensor to the rules, so none can move without the other.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

Transform = Literal["copy", "stack", "split", "shared", "skip"]
Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor, and where it lies in one parameter of the tree.

    Attributes:
        tensor: its name in the files.
        path: the parameter.
        index: the tensor is this entry of the parameter's first axis; None is all of it.
        part: (i, n): only part i of n equal ones of the tensor's second axis; None is all of it.
    """

    tensor: str
    path: str
    index: int | None = None
    part: tuple[int, int] | None = None

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's shape, for a parameter of this shape."""
        if self.index is not None:
            return shape[1:]
        if self.part is not None:
            return (shape[0], self.part[1] * shape[1], *shape[2:])
        return shape

    def of_parameter(self, array: np.ndarray) -> np.ndarray:
        """The view of the parameter that is this tensor's."""
        return array if self.index is None else array[self.index]

    def of_tensor(self, array: np.ndarray) -> np.ndarray:
        """The view of the tensor, or of some of its first axis, that is this parameter's."""
        if self.part is None:
            return array
        i, n = self.part
        size = array.shape[1] // n
        return array[:, i * size : (i + 1) * size]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of tensor.

    Attributes:
        pattern: its name in the files.
        paths: parameters that it fills: one, several for "split", none for "skip".
        transform: "copy" as it is; "stack" many tensors along a new first axis; "split" one tensor
            cut along its second axis; "shared" a copy of `detail` that is stored only where it
            differs; "skip" not stored.
        detail: "stack": the placeholder stacked over; "shared": the parameter it is a copy of;
            "skip": why.
    """

    pattern: str
    paths: tuple[str, ...]
    transform: Transform
    detail: str = ""

    def under(self, prefix: str, folder: str) -> "Rule":
        """The same rule one level deeper."""
        paths = tuple(folder + path for path in self.paths)
        return dataclasses.replace(self, pattern=prefix + self.pattern, paths=paths)


def copy(pattern: str, path: str) -> Rule:
    return Rule(pattern, (path,), "copy")


def stack(pattern: str, path: str, over: str) -> Rule:
    return Rule(pattern, (path,), "stack", over)


def split(pattern: str, *paths: str) -> Rule:
    return Rule(pattern, paths, "split")


def shared(pattern: str, path: str, owner: str) -> Rule:
    return Rule(pattern, (path,), "shared", owner)


def skip(pattern: str, reason: str) -> Rule:
    return Rule(pattern, (), "skip", reason)


@dataclasses.dataclass(frozen=True)
class Match:
    """A rule and the numbers of its placeholders."""

    rule: Rule
    numbers: Mapping[str, int]

    @property
    def tensor(self) -> str:
        return self.rule.pattern.format(**self.numbers)

    @property
    def parts(self) -> list[Part]:
        """Where the tensor goes."""
        rule = self.rule
        paths = [path.format(**self.numbers) for path in rule.paths]
        if rule.transform == "stack":
            return [Part(self.tensor, path, self.numbers[rule.detail]) for path in paths]
        if rule.transform == "split":
            n = len(paths)
            return [Part(self.tensor, path, part=(i, n)) for i, path in enumerate(paths)]
        return [Part(self.tensor, path) for path in paths]


class Table:
    """The rules of one checkpoint.

    Args:
        rules: where several fill one parameter, the first is the published form.
        ranges: the numbers that each placeholder may take.
        scale_endings: a weight's ending, and what the name of its scales has instead; the published
            form first.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        ranges: Mapping[str, range],
        scale_endings: Sequence[tuple[str, str]] = (("", "_scale_inv"),),
    ):
        self._scale_endings = scale_endings
        self._ranges = ranges
        self._only = {name: allowed[0] for name, allowed in ranges.items() if len(allowed) == 1}
        self._by_pattern: dict[Key, list[Rule]] = {}
        self._by_path: dict[Key, list[tuple[Rule, str]]] = {}
        for rule in rules:
            self._by_pattern.setdefault(_key(rule.pattern, "."), []).append(rule)
            for path in rule.paths:
                self._by_path.setdefault(_key(path, "/"), []).append((rule, path))

    def find(self, name: str) -> Match | None:
        """The rule for a tensor's name, or None."""
        for rule in self._by_pattern.get(_key(name, "."), ()):
            numbers = self._numbers(rule.pattern, name, ".")
            if numbers is not None:
                return Match(rule, numbers)
        return None

    def scale_names(self, weight: str) -> list[str]:
        """Names that the scales of a weight may have, the published one first."""
        return [
            weight.removesuffix(ending) + scale
            for ending, scale in self._scale_endings
            if weight.endswith(ending)
        ]

    def is_scale_name(self, name: str) -> bool:
        """Whether a tensor of this name could be scales, had it a weight."""
        return name.endswith(tuple(scale for _, scale in self._scale_endings))

    def sources(self, path: str) -> Iterator[list[Match]]:
        """For each way to store a parameter, the tensors that fill it."""
        for rule, pattern in self._by_path.get(_key(path, "/"), ()):
            numbers = self._numbers(pattern, path, "/")
            if numbers is None:
                continue
            numbers = self._only | numbers  # a path may leave out what can be one number only
            if rule.transform == "stack":
                stacked = self._ranges[rule.detail]
                yield [Match(rule, {**numbers, rule.detail: i}) for i in stacked]
            else:
                yield [Match(rule, numbers)]

    def _numbers(self, pattern: str, text: str, separator: str) -> dict[str, int] | None:
        numbers = {}
        for expected, part in zip(pattern.split(separator), text.split(separator), strict=True):
            if expected.startswith("{"):
                placeholder, number = expected.strip("{}"), int(part)
                if number not in self._ranges[placeholder]:
                    return None
                numbers[placeholder] = number
            elif expected != part:
                return None
        return numbers


def _key(text: str, separator: str) -> Key:
    """The text with every number and placeholder replaced by `#`."""
    return tuple("#" if _is_number(part) else part for part in text.split(separator))


def _is_number(part: str) -> bool:
    return part.startswith("{") or (part.isdecimal() and str(int(part)) == part)
