"""What prefill attention means. Every implementation is tested against this file."""

import jax.numpy as jnp

from pallas_kernels._products import einsum
from pallas_kernels.paged_mla.reference import masked_softmax


def mla_prefill(q, k, k_rope, v, positions, *, softmax_scale):
    """o[b, t, h] = softmax(q . [k[s, h] | k_rope[s]] * softmax_scale) v[s, h], s <= position."""
    n = k.shape[-1]
    scores = einsum("bthn,bshn->bhts", q[..., :n], k)
    scores += einsum("bthr,bsr->bhts", q[..., n:], k_rope)
    visible = jnp.arange(k.shape[1])[None, None, None] <= positions[:, None, :, None]
    weights = masked_softmax(scores * softmax_scale, visible).astype(q.dtype)
    return einsum("bhts,bshv->bthv", weights, v, q.dtype)
