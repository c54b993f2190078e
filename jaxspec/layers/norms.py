"""Root-mean-square normalization."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """y = weight * x / sqrt(mean(x^2) + eps), computed in float32, returned in x's dtype."""

    def __init__(self, width: int, *, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones(width, jnp.bfloat16), axes=(None,))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + self.eps)
        weight = self.weight.get_value().astype(jnp.float32)
        return (jax.lax.broadcast_in_dim(weight, wide.shape, (wide.ndim - 1,)) * wide).astype(
            x.dtype
        )
