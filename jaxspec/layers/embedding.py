"""The token embedding, its vocabulary spread over the devices."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxspec.config import ModelConfig
from jaxspec.execution import Execution
from jaxspec.layers.linear import matrix


class Embedding(nnx.Module):
    """Rows of a table `[w, d]`; each device looks up the ids it holds, and the parts are summed."""

    def __init__(self, *, config: ModelConfig, execution: Execution, rngs: nnx.Rngs):
        self.execution = execution
        shape = (config.vocab_size, config.hidden_size)
        self.weight = matrix(shape, ("vocab", None), rngs, quantizable=False)

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        """The embeddings in the compute dtype; ids are 0 to w - 1."""
        execution = self.execution
        table = self.weight.get_value()
        if execution.mesh is None:
            return table[tokens].astype(execution.dtype)

        def look_up(table, tokens):
            local = tokens - jax.lax.axis_index("model") * table.shape[0]
            held = (local >= 0) & (local < table.shape[0])
            rows = jnp.where(held[..., None], table[jnp.where(held, local, 0)], 0)
            return jax.lax.psum(rows.astype(execution.dtype), "model")

        rows = PartitionSpec("data")
        return execution.per_device(look_up, (PartitionSpec("model"), rows), rows)(table, tokens)
