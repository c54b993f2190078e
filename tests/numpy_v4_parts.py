"""The parts of a DeepSeek-V4 layer in float64 NumPy, each a formula of `golden/README.md`.

The numbers in brackets are its items. No caches and no batches: one sequence, all its positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def frequencies(config: Mapping[str, Any], ratio: int) -> np.ndarray:
    """[2, 3, 5]: the window's table for ratio 0; else the other base, and YaRN."""
    r = config["qk_rope_head_dim"]
    theta = config["compress_rope_theta" if ratio else "rope_theta"]
    base = theta ** (-2.0 * np.arange(r // 2) / r)
    if not ratio:
        return base
    yarn = config["rope_scaling"]

    def corner(rotations: float) -> float:
        turns = yarn["original_max_position_embeddings"] / (2 * math.pi * rotations)
        return r * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(corner(yarn["beta_fast"])), 0)
    high = min(math.ceil(corner(yarn["beta_slow"])), r - 1)
    ramp = np.clip((np.arange(r // 2) - low) / (high - low or 0.001), 0, 1)
    return base * (1 - ramp) + base / yarn["factor"] * ramp


def rotate_last(x: np.ndarray, positions: np.ndarray, table: np.ndarray, sign: int = 1):
    """[1]: the last 2 * len(table) columns of [t, ..., x], pair by pair; `sign` -1 turns back."""
    r = 2 * len(table)
    angles = sign * positions.reshape(-1, *[1] * (x.ndim - 1)) * table
    a, b = x[..., -r::2], x[..., -r + 1 :: 2]
    turned = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
    return np.concatenate([x[..., :-r], np.stack(turned, -1).reshape(*x.shape[:-1], r)], -1)


def simulate_fp8(x: np.ndarray, group: int = 64) -> np.ndarray:
    """[14]: to e4m3 and back in float32 steps, a power-of-two scale a group."""
    parts = x.astype(np.float32).reshape(*x.shape[:-1], -1, group)
    largest = np.maximum(np.abs(parts).max(-1, keepdims=True), np.float32(1e-4))
    scales = np.exp2(np.ceil(np.log2((largest / np.float32(448)).astype(np.float64))))
    codes = np.clip(parts / scales, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scales).reshape(x.shape)


def simulate_fp4(x: np.ndarray, group: int = 32) -> np.ndarray:
    """[19]: the nearest value of a list, ties to the even code."""
    parts = x.astype(np.float32).astype(np.float64).reshape(*x.shape[:-1], -1, group)
    largest = np.maximum(np.abs(parts).max(-1, keepdims=True), 6 * 2.0**-126)
    scales = np.exp2(np.ceil(np.log2(largest / 6)))
    distance = np.abs(np.abs(parts / scales)[..., None] - E2M1)
    # An odd code is a hair farther away, which decides ties alone.
    nearest = (distance + 1e-12 * (np.arange(8) % 2)).argmin(-1)
    return (np.copysign(E2M1[nearest], parts) * scales).reshape(x.shape)


def hadamard(x: np.ndarray) -> np.ndarray:
    """[19]: Sylvester's matrix, entry (i, j) the parity of the common bits of i and j."""
    n = x.shape[-1]
    matrix = [[(-1) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    return x @ np.array(matrix, np.float64) / math.sqrt(n)


class Mix(NamedTuple):
    pre: np.ndarray
    post: np.ndarray
    comb: np.ndarray


def hyper_mix(h: np.ndarray, fn, base, scale, config: Mapping[str, Any]) -> Mix:
    """[22] of streams [t, j, d]."""
    return split_mixes(project(h, fn, config), base, scale, config)


def project(h: np.ndarray, fn: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    return rms(h.reshape(len(h), -1), config["rms_norm_eps"]) @ fn.T


def split_mixes(m: np.ndarray, base, scale, config: Mapping[str, Any]) -> Mix:
    """[22] of projected streams [t, (2 + j) j]."""
    j, eps = config["hc_mult"], config["hc_eps"]
    pre = sigmoid(m[:, :j] * scale[0] + base[:j]) + eps
    post = 2 * sigmoid(m[:, j : 2 * j] * scale[1] + base[j : 2 * j])
    c = np.exp(m[:, 2 * j :] * scale[2] + base[2 * j :]).reshape(-1, j, j)
    c = c / c.sum(2, keepdims=True) + eps
    c = c / (c.sum(1, keepdims=True) + eps)
    for _ in range(config["hc_sinkhorn_iters"] - 1):
        c = c / (c.sum(2, keepdims=True) + eps)
        c = c / (c.sum(1, keepdims=True) + eps)
    return Mix(pre, post, c)


def hyper_head(h: np.ndarray, fn, base, scale, config: Mapping[str, Any]) -> np.ndarray:
    """[23]: streams [t, j, d] to [t, d]."""
    pre = sigmoid(project(h, fn, config) * scale[0] + base) + config["hc_eps"]
    return np.einsum("tj,tjd->td", pre, h)


def pool(kv: np.ndarray, gate: np.ndarray, ape: np.ndarray, ratio: int) -> list[np.ndarray]:
    """[18] before the norm: every complete entry, from kv and gate [t, x or 2 x], one by one."""
    width = kv.shape[1] // (2 if ratio == 4 else 1)
    entries = []
    for entry in range(len(kv) // ratio):
        own = range(entry * ratio, (entry + 1) * ratio)
        pooled = [(p, slice(-width, None)) for p in own]
        if ratio == 4 and entry:
            pooled += [(p - 4, slice(0, width)) for p in own]
        logits = np.stack([gate[p, half] + ape[p % ratio, half] for p, half in pooled])
        values = np.stack([kv[p, half] for p, half in pooled])
        weights = np.exp(logits - logits.max(0))
        entries.append((weights * values).sum(0) / weights.sum(0))
    return entries


def index_scores(q: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[19]: q [t, h, x], keys [n, x], weights [t, h] to [t, n]."""
    return np.einsum("thn,th->tn", np.maximum(np.einsum("thx,nx->thn", q, keys), 0), weights)


def best_visible(scores: np.ndarray, ratio: int, count: int) -> list[list[int]]:
    """[18, 19]: of the entries below (t + 1) // ratio, the best; ties to the lowest index."""
    chosen = []
    for t, row in enumerate(scores):
        visible = range(min((t + 1) // ratio, len(row)))
        chosen.append(sorted(sorted(visible, key=lambda i, row=row: (-row[i], i))[:count]))
    return chosen


def attend(q: np.ndarray, keys: np.ndarray, sink: np.ndarray, scale: float) -> np.ndarray:
    """[15] for one query [h, x] and the keys [n, x] that it sees, which are the values too."""
    scores = q @ keys.T * scale
    largest = np.maximum(scores.max(-1, initial=-np.inf), sink)[:, None]
    weights = np.exp(scores - largest)
    return weights @ keys / (weights.sum(-1, keepdims=True) + np.exp(sink[:, None] - largest))


def route(logits: np.ndarray, bias: np.ndarray | None, experts, config: Mapping[str, Any]):
    """[20] for one token: ids and weights; `experts` are given where `bias` is None."""
    scores = [math.sqrt(math.log1p(math.exp(x))) for x in logits]
    if bias is not None:
        choice = [score + float(b) for score, b in zip(scores, bias, strict=True)]
        order = sorted(range(len(choice)), key=lambda i: (-choice[i], i))
        experts = order[: config["num_experts_per_tok"]]
    total = sum(scores[i] for i in experts)
    factor = config["routed_scaling_factor"] / total
    return [int(i) for i in experts], [scores[i] * factor for i in experts]


def expert(x: np.ndarray, w1, w2, w3, limit: float, weight=1.0) -> np.ndarray:
    """[21] with plain matrices."""
    return clamped(x @ w1.T, x @ w3.T, limit, weight) @ w2.T


def clamped(gate: np.ndarray, up: np.ndarray, limit: float, weight=1.0) -> np.ndarray:
    """[21] between the matrices: cut above only, and on both sides."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return weight * gate * sigmoid(gate) * up


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
