"""One line on stderr for a failure, where the libraries underneath would print hundreds."""

import functools
import logging
import sys


@functools.cache  # once a process
def quiet_libraries() -> None:
    """Silences what Orbax and TensorStore print about an error before, and after, they raise it."""
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    report = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        # TensorStore's other writes finish when Orbax has closed the loop that waited for them.
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = hook
