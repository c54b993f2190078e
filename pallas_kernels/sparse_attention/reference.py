"""What `sparse_attention` means. Every implementation is tested against this file."""

import jax
import jax.numpy as jnp

from pallas_kernels._products import einsum


def sparse_attention(q, keys, visible, sink, *, softmax_scale):
    """o[b, t, h] = sum over visible s of exp(q . k[s] scale) k[s] / (exp(sink[h]) + sum of exp)."""
    scores = einsum("bthx,bsx->bhts", q, keys) * softmax_scale
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    sink = sink.astype(jnp.float32)[None, :, None, None]
    largest = jax.lax.stop_gradient(jnp.maximum(scores.max(axis=-1, keepdims=True), sink))
    weights = jnp.exp(scores - largest)
    weights /= weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - largest)
    return einsum("bsx,bhts->bthx", keys, weights.astype(q.dtype), q.dtype)
