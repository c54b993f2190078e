"""A conversion's half of Orbax: saves that survive a kill, and a checkpoint that appears when done.

Orbax keeps each finished partial save in `DST.partial_save`, whatever happens later; a torn one
lies beside it. Saves are made in the plan's order, so their number says where to go on. They are
put away in a folder of their own, because Orbax reads all that it finds before each further one.
It rewrites files in place while it finalizes, so that is done to a copy made of hard links.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

from jaxspec.checkpoint import METADATA_KEY, Metadata
from jaxspec.errors import CheckpointError

StorageOptions = ocp.options.ArrayOptions.Saving.StorageOptions

SAVED = "saved"
SETTLING_CHECKS = 15
CHUNK_BYTES = 64 << 20  # so that a sharded load reads little more than its share


class Session:
    """One destination while it is written.

    Attributes:
        folder: what `DST` will become; side files may be put here.
    """

    def __init__(self, destination: pathlib.Path, metadata: Metadata):
        self._destination = destination.absolute()
        self._metadata = metadata
        self._outstanding: Any = None
        self.folder = beside(self._destination, ".partial_save")
        self._saved = self.folder / SAVED

    @property
    def exists(self) -> bool:
        return self.folder.exists()

    @property
    def num_saved(self) -> int:
        """Saves that are complete on disk."""
        return len(list(self._saved.iterdir()))

    def start(self) -> None:
        """Makes the folder, and removes what a kill tore.

        Raises:
            CheckpointError: another process is writing it.
        """
        self._saved.mkdir(parents=True, exist_ok=True)
        self._lock()
        shutil.rmtree(beside(self.folder, ".orbax-checkpoint-tmp"), ignore_errors=True)
        self._put_away()

    def _lock(self) -> None:
        """Holds the folder until this object goes, or the process ends."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{self.folder}: another process is writing it") from None

    def save(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Saves one group in the background, after the one before has finished.

        The arrays must not change afterwards: Orbax is told not to copy them.
        """
        self.wait()
        with _context():
            self._outstanding = ocp.partial.save_async(
                str(self._destination),
                to_tree(arrays),
                custom_metadata={METADATA_KEY: self._metadata.to_json()},
            )

    def wait(self) -> None:
        """Waits for the save in progress; its failure is raised here."""
        if self._outstanding is not None:
            outstanding, self._outstanding = self._outstanding, None
            outstanding.result()
            self._put_away()

    def _put_away(self) -> None:
        for path in self.folder.glob("*.pending_*"):
            path.rename(self._saved / path.name)

    def finalize(self) -> None:
        """Makes the destination appear, complete."""
        self.wait()
        staging = beside(self._destination, ".finalizing")
        staged_session = beside(staging, ".partial_save")
        for leftover in (staging, staged_session):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(self.folder, staged_session, ignore=_is_saved)
        shutil.copytree(self._saved, staged_session, copy_function=_link_data, dirs_exist_ok=True)
        with _context():
            ocp.partial.finalize(str(staging))
        staging.rename(self._destination)
        self.discard()

    def abandon(self) -> None:
        """Removes all after a failure; other writes under way make folders anew for a while."""
        for _ in range(SETTLING_CHECKS):
            self.discard()
            time.sleep(0.1)

    def discard(self) -> None:
        """Removes everything but the destination itself, when nothing is written any more."""
        with contextlib.suppress(Exception):
            self.wait()
        staging = beside(self._destination, ".finalizing")
        for path in (self.folder, staging):
            for suffix in ("", ".orbax-checkpoint-tmp", ".partial_save"):
                shutil.rmtree(beside(path, suffix), ignore_errors=True)


def beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    """The sibling whose name ends in `suffix`."""
    return path.with_name(path.name + suffix)


def to_tree(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from paths."""
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return tree


def _context() -> ocp.Context:
    """Weights do not compress, need no copy on the host, and lie in chunks."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.array.saving.storage_options.chunk_byte_size = CHUNK_BYTES
    context.array.saving.scoped_storage_options_creator = _storage_options
    context.memory.deepcopy_host_arrays = False
    return context


def _storage_options(key: Any, value: Any) -> StorageOptions | None:
    """Stacked experts lie one a chunk; Orbax would cut across them."""
    is_large_stack = value.ndim == 3 and value.nbytes > CHUNK_BYTES
    return StorageOptions(shard_axes=(0,)) if is_large_stack else None


def _is_saved(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name == SAVED]


def _link_data(source: str, destination: str) -> None:
    """Links an array's data, which never changes again, and copies what Orbax will rewrite."""
    if pathlib.Path(source).parent.name == "d":
        with contextlib.suppress(OSError):  # a file system without links
            os.link(source, destination)
            return
    shutil.copyfile(source, destination)
