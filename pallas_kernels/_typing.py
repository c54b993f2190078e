"""Checked types: `@typechecked` holds a call to its jaxtyping annotations, at trace time only."""

from typing import Literal

import beartype
import jaxtyping

typechecked = jaxtyping.jaxtyped(typechecker=beartype.beartype)

Implementation = Literal["auto", "reference", "mosaic_gpu"]
ScaleFormat = Literal["float32", "ue8m0"]


def require_reference(op: str, implementation: Implementation) -> None:
    """Refuses a kernel where only the reference exists, so that nothing falls back in silence.

    Raises:
        NotImplementedError: `implementation` asks for a kernel that `op` does not have.
    """
    if implementation == "mosaic_gpu":
        raise NotImplementedError(
            f"{op}: implementation='mosaic_gpu' has no kernel yet; use 'auto' or 'reference'"
        )
