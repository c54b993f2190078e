"""A bar on stderr, where stderr is a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class Advance(Protocol):
    """Reports that this many more bytes are done."""

    def __call__(self, num_bytes: int) -> None: ...


@contextmanager
def progress(title: str, total_bytes: int, done_bytes: int = 0) -> Iterator[Advance]:
    """Shows bytes done, speed and time left."""
    console = Console(stderr=True)
    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total_bytes, completed=done_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
