"""The bytes that a pass of the target cannot avoid reading."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxspec


@dataclasses.dataclass(frozen=True)
class PassBytes:
    """What one pass of the target reads at least.

    Attributes:
        dense: matrices and norms that every pass reads, and the embedding rows of its tokens.
        experts: routed experts that the tokens touch.
        cache: cached rows of every layer.
    """

    dense: float
    experts: float
    cache: float

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.cache


def pass_bytes(
    model: jaxspec.SpeculativeModel, *, num_rows: int, tokens_per_row: int, context: float
) -> PassBytes:
    """Counts the weights as they are stored, and the cache in the compute dtype.

    Tokens choose their experts independently and evenly: `T` tokens touch `e (1 - (1 - k/e)^T)` of
    them. The embedding is a look-up, one row a token.

    Args:
        context: cached positions of a row, on average.
    """
    config: Any = model.config
    num_tokens = num_rows * tokens_per_row
    touched = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** num_tokens
    dense = experts = 0.0
    for keys, variable in nnx.to_flat_state(nnx.state(model.target, nnx.Param)):
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(variable.get_value()))
        if "experts" in keys:
            experts += size * touched
        elif "embed_tokens" in keys:
            dense += size * num_tokens / config.vocab_size
        else:
            dense += size
    row = config.latent_dim * jnp.dtype(model.execution.dtype).itemsize
    cache = num_rows * context * row * config.num_hidden_layers
    return PassBytes(dense, experts, cache)
