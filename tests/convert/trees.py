"""What a conversion must give, worked out name by name and without the rules."""

import filecmp
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convert.orbax_in import Checkpoint
from tests.fixtures import HFModel

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+\.weight(?:_scale_inv)?)")
TINY: Mapping[str, Any] = {"num_hidden_layers": 2, "n_routed_experts": 4}


def stored(path: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint."""
    checkpoint = Checkpoint(path)
    return checkpoint.load(checkpoint.leaves)


def expected(model: HFModel, *, copies: bool = False) -> dict[str, np.ndarray]:
    """The tree of a model whose files have the published names.

    Args:
        copies: whether the draft keeps its own embedding and head.
    """
    tensors = dict(model.tensors)
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name in model.tensors:
        if found := EXPERT.fullmatch(name):
            stem, index, rest = found.groups()
            experts.setdefault(f"{stem}.{rest}", {})[int(index)] = tensors.pop(name)
    for name, by_index in experts.items():
        tensors[name] = np.stack([by_index[index] for index in range(len(by_index))])
    tree = {}
    for name, array in tensors.items():
        is_copy = name.endswith(
            (f"{model.draft_prefix}embed_tokens.weight", "shared_head.head.weight")
        )
        if copies or not is_copy:
            tree[tree_path(name, model, is_quantized=f"{name}_scale_inv" in tensors)] = array
    return tree


def tree_path(name: str, model: HFModel, *, is_quantized: bool) -> str:
    """Where a tensor of that name is kept."""
    if name.endswith("_scale_inv"):
        name = name.removesuffix("_scale_inv") + ".scales"
    elif is_quantized:
        name += ".values"
    if name.startswith(model.draft_prefix):
        rest = name.removeprefix(model.draft_prefix)
        is_own = rest.startswith(("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens"))
        return ("draft/" if is_own else "draft/decoder/") + rest.replace(".", "/")
    return "target/" + name.removeprefix("model.").replace(".", "/")


def assert_same(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> None:
    """The same names, types, shapes and bytes."""
    assert sorted(got) == sorted(want)
    for path, array in want.items():
        assert (got[path].dtype, got[path].shape) == (array.dtype, array.shape), path
        assert got[path].tobytes() == array.tobytes(), path


def assert_same_files(first: Path, second: Path) -> None:
    """The same files, byte for byte."""
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(second) for path in second.rglob("*") if path.is_file())
    for name in names:
        assert filecmp.cmp(first / name, second / name, shallow=False), name


def fuse_experts(model: HFModel) -> HFModel:
    """The form that transformers 5 can save: two tensors for the experts of a layer."""
    by_stem: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    tensors = {}
    for name, array in model.tensors.items():
        if found := EXPERT.fullmatch(name):
            stem, index, rest = found.groups()
            by_stem.setdefault(stem, {}).setdefault(rest, {})[int(index)] = array
        else:
            tensors[name] = array
    for stem, parts in by_stem.items():
        stacks = {rest: np.stack([a[i] for i in range(len(a))]) for rest, a in parts.items()}
        for suffix in ("", "_scale_inv"):
            if f"gate_proj.weight{suffix}" in stacks:
                gate, up = (stacks[f"{kind}_proj.weight{suffix}"] for kind in ("gate", "up"))
                tensors[f"{stem}.gate_up_proj{suffix}"] = np.concatenate([gate, up], axis=1)
                tensors[f"{stem}.down_proj{suffix}"] = stacks[f"down_proj.weight{suffix}"]
    return HFModel(model.config, tensors)


def dequantized(tree: Mapping[str, np.ndarray], block: tuple[int, int]) -> dict[str, np.ndarray]:
    """The same with every pair multiplied out, element by element, and rounded to BF16."""
    result = {}
    for path, array in tree.items():
        if path.endswith("/values"):
            scales = tree[path.removesuffix("values") + "scales"]
            rows, columns = (
                np.arange(size) // edge for size, edge in zip(array.shape[-2:], block, strict=True)
            )
            product = array.astype(np.float32) * scales[..., rows[:, None], columns[None, :]]
            result[path.removesuffix("/values")] = product.astype(ml_dtypes.bfloat16)
        elif not path.endswith("/scales"):
            result[path] = array
    return result
