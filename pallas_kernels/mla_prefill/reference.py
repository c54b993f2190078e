"""What prefill attention means. Every implementation is tested against this file."""

import jax
import jax.numpy as jnp

from pallas_kernels.paged_mla.reference import masked_softmax


def mla_prefill(q, k, k_rope, v, positions, *, softmax_scale):
    """o[b, t, h] = softmax(q . [k[s, h] | k_rope[s]] * softmax_scale) v[s, h], s <= position."""
    n = k.shape[-1]
    exact = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
    scores = jnp.einsum("bthn,bshn->bhts", q[..., :n], k, **exact)
    scores += jnp.einsum("bthr,bsr->bhts", q[..., n:], k_rope, **exact)
    visible = jnp.arange(k.shape[1])[None, None, None] <= positions[:, None, :, None]
    weights = masked_softmax(scores * softmax_scale, visible).astype(q.dtype)
    return jnp.einsum("bhts,bshv->bthv", weights, v, **exact).astype(q.dtype)
