"""What paged latent attention means. Every implementation is tested against this file."""

import jax
import jax.numpy as jnp

from pallas_kernels._products import einsum


def gather_rows(pages, page_table, num_valid):
    """rows[b, s] = the cached row at position s of sequence b, zero from `num_valid[b]` on."""
    _, page_size, width = pages.shape
    b, pages_per_row = page_table.shape
    rows = pages[jnp.maximum(page_table, 0)].reshape(b, pages_per_row * page_size, width)
    written = jnp.arange(pages_per_row * page_size)[None] < num_valid[:, None]
    # What was never written may be NaN, and 0 * NaN is NaN: it is replaced before any product.
    return jnp.where(written[..., None], rows, 0)


def masked_softmax(scores, visible):
    """Softmax over the last axis among `visible`; all zeros where nothing is visible."""
    scores = jnp.where(visible, scores, -jnp.inf)
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def paged_mla(q, pages, page_table, positions, *, kv_lora_rank, softmax_scale):
    """o[b, t, h] = softmax(q . row[s] * softmax_scale) row[s, :c], over s <= positions[b, t]."""
    rows = gather_rows(pages, page_table, positions.max(axis=1) + 1).astype(q.dtype)
    scores = einsum("bthx,bsx->bhts", q, rows) * softmax_scale
    visible = jnp.arange(rows.shape[1])[None, None, None] <= positions[:, None, :, None]
    weights = masked_softmax(scores, visible).astype(q.dtype)
    return einsum("bsc,bhts->bthc", rows[..., :kv_lora_rank], weights, q.dtype)
