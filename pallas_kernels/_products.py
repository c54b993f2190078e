"""The product that every reference and module makes: float32 sums, rounded once."""

import jax
import jax.numpy as jnp


def einsum(equation: str, x: jax.Array, y: jax.Array, out_dtype=jnp.float32) -> jax.Array:
    """`jnp.einsum` of two operands, accumulated in float32.

    HIGHEST matters for float32 alone: a GPU would use TF32 otherwise. The operand whose axes lie in
    the output's order goes second, since XLA's CPU backend lacks the other form in bfloat16.
    """
    product = jnp.einsum(
        equation, x, y, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
    )
    return product.astype(out_dtype)
