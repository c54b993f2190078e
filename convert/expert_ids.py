"""Tables of expert ids: the only integers of a checkpoint, and the only values that are checked."""

import numpy as np

from convert.plan import Plan
from convert.source import Source
from jaxspec.config import ModelConfig
from jaxspec.errors import CheckpointError


def check_expert_ids(source: Source, plan: Plan, config: ModelConfig) -> None:
    """Refuses ids that are not those of an expert; so all fit in int32.

    Raises:
        CheckpointError: names the tensor and the id.
    """
    for parameter in plan.parameters:
        leaf = parameter.leaves[0]
        if parameter.is_quantized or not np.issubdtype(leaf.dtype, np.integer):
            continue
        for part in leaf.parts:
            file = source.file(part.tensor)
            for _, slab in file.slabs(part.tensor):
                for found in (slab.min(), slab.max()):
                    if not 0 <= found < config.n_routed_experts:
                        raise CheckpointError(
                            f"{file.tensors[part.tensor].file}: {part.tensor} holds the id "
                            f"{found}; there are {config.n_routed_experts} experts"
                        )
