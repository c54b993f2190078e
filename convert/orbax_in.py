"""Reading a converted checkpoint back, a few arrays at a time, as NumPy arrays."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from convert.orbax_out import to_tree
from jaxspec import checkpoint
from jaxspec.errors import CheckpointError, JaxspecError


@dataclasses.dataclass
class AbstractArray:
    """Asks Orbax for a NumPy array, which stays on the host."""

    shape: tuple[int, ...]
    dtype: Any


class Checkpoint:
    """A finished checkpoint.

    Attributes:
        metadata: what it says about itself.
        leaves: shape and dtype of each stored array.

    Raises:
        CheckpointError: there is no finished checkpoint of a known format.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path.absolute()
        try:
            self.metadata, self.leaves = checkpoint.read(self.path)
        except JaxspecError:
            raise
        except Exception as error:  # a damaged description of the tree
            raise CheckpointError(f"{self.path}: the description of the tree is damaged") from error

    def num_bytes(self, path: str) -> int:
        leaf = self.leaves[path]
        return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize

    def load(self, paths: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads these arrays as they are stored: asked for another type, Orbax casts silently.

        Raises:
            CheckpointError: the stored data is damaged.
        """
        paths = list(paths)
        wanted = {path: AbstractArray(**dataclasses.asdict(self.leaves[path])) for path in paths}
        context = ocp.Context()
        context.pytree.loading.partial_load = True
        try:
            with context:
                tree = ocp.load(str(self.path), to_tree(wanted))
        except Exception as error:  # TensorStore and Orbax raise many kinds for damaged data
            reason = checkpoint.first_line(error)
            raise CheckpointError(f"{self.path}: {paths[0]} cannot be read: {reason}") from error
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {"/".join(str(key.key) for key in keys): array for keys, array in flat}
