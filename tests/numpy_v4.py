"""DeepSeek-V4 and its MTP draft in float64 NumPy: no cache, no batch, one sequence a call.

Made of `numpy_v4_parts`, on tensors by their official names; it shares no code with the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests import numpy_v4_parts as parts
from tests.fixtures import HFModel
from tests.numpy_reference import quantize_activations


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What one pass gives.

    Attributes:
        logits: [t, vocab].
        streams: behind the last block, [t, j, hidden].
        router: the experts of each scored layer, sorted, [t, k].
        chosen: the entries that each query of an indexed layer sees, sorted.
    """

    logits: np.ndarray
    streams: np.ndarray
    router: dict[str, np.ndarray]
    chosen: dict[str, list[list[int]]]


class Reference:
    """The model of an `HFModel`; `simulate` adds the roundings of the official run [10, 14, 19]."""

    def __init__(self, model: HFModel, *, simulate: bool = False):
        self.config: dict[str, Any] = model.config
        self.tensors, self.simulate = model.tensors, simulate
        self._dequantized: dict[str, np.ndarray] = {}

    def target(self, tokens: Sequence[int] | np.ndarray) -> Outputs:
        """Teacher forced: row i has seen tokens 0..i."""
        tokens = np.asarray(tokens)
        streams = self.weight("embed")[tokens][:, None].repeat(self.config["hc_mult"], 1)
        notes = Outputs(np.empty(0), np.empty(0), {}, {})
        for layer in range(self.config["num_hidden_layers"]):
            ratio = self.config["compress_ratios"][layer]
            streams = self.block(f"layers.{layer}.", ratio, streams, tokens, notes)
        return dataclasses.replace(notes, logits=self.logits("", streams), streams=streams)

    def draft(
        self, next_tokens, streams: np.ndarray, *, layer: int = 0, mask_first: bool = False
    ) -> Outputs:
        """[28]: row t sees `next_tokens[t]`, of position t + 1, and the streams of position t."""
        prefix, next_tokens = f"mtp.{layer}.", np.asarray(next_tokens)
        embedding = self.weight("embed")[next_tokens]
        if mask_first:
            embedding[0] = 0
        joined = self.linear(f"{prefix}e_proj", self.norm(f"{prefix}enorm", embedding))[:, None]
        streams = joined + self.linear(f"{prefix}h_proj", self.norm(f"{prefix}hnorm", streams))
        ratio = self.config["compress_ratios"][self.config["num_hidden_layers"] + layer]
        streams = self.block(prefix, ratio, streams, next_tokens, Outputs(joined, joined, {}, {}))
        return Outputs(self.logits(prefix, streams), streams, {}, {})

    def chain(
        self, tokens: Sequence[int], num_draft_tokens: int, *, mask_first: bool = True
    ) -> np.ndarray:
        """Logits [num_draft_tokens, vocab] of drafting behind `tokens`; the last is the anchor.

        The draft knows the target's streams of the positions before the anchor, then its own [29].
        """
        streams, next_tokens = self.target(tokens[:-1]).streams, list(tokens[1:])
        num_layers = len(self.config["compress_ratios"]) - self.config["num_hidden_layers"]
        logits = []
        for step in range(num_draft_tokens):
            layer = step % num_layers
            outputs = self.draft(next_tokens, streams, layer=layer, mask_first=mask_first)
            logits.append(outputs.logits[-1])
            next_tokens.append(int(np.argmax(logits[-1])))
            streams = np.concatenate([streams, outputs.streams[-1:]])
        return np.stack(logits)

    def greedy(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy text of the target alone."""
        text = list(tokens)
        for _ in range(num_tokens):
            text.append(int(np.argmax(self.target(text).logits[-1])))
        return text[len(tokens) :]

    def logits(self, prefix: str, streams: np.ndarray) -> np.ndarray:
        """[23]"""
        hidden = parts.hyper_head(streams, *self.mixes(f"{prefix}hc_head"), self.config)
        return self.norm(f"{prefix}norm", hidden) @ self.weight("head").T

    def mixes(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        fn, base, scale = (self.tensor(f"{name}_{part}") for part in ("fn", "base", "scale"))
        return fn, base, scale

    def block(self, prefix: str, ratio: int, streams, tokens, notes: Outputs) -> np.ndarray:
        """One block on rows of positions 0..t-1; routing and choices go to `notes`."""
        for kind in ("attn", "ffn"):
            mix = parts.hyper_mix(streams, *self.mixes(f"{prefix}hc_{kind}"), self.config)
            x = self.norm(f"{prefix}{kind}_norm", np.einsum("tj,tjd->td", mix.pre, streams))
            if kind == "attn":
                y = self.attention(f"{prefix}attn.", ratio, x, notes)
            else:
                y = self.moe(f"{prefix}ffn.", x, tokens, notes)
            streams = mix.post[..., None] * y[:, None] + np.einsum(
                "tij,tid->tjd", mix.comb, streams
            )
        return streams

    def attention(self, prefix: str, ratio: int, x: np.ndarray, notes: Outputs) -> np.ndarray:
        """[12, 13, 15, 16, 17]"""
        config, t = self.config, len(x)
        table, positions = parts.frequencies(config, ratio), np.arange(t)
        latent = self.norm(f"{prefix}q_norm", self.linear(f"{prefix}wq_a", x))
        q = self.linear(f"{prefix}wq_b", latent).reshape(t, -1, config["head_dim"])
        q = parts.rotate_last(parts.rms(q, config["rms_norm_eps"]), positions, table)
        kv = self.norm(f"{prefix}kv_norm", self.linear(f"{prefix}wkv", x))
        kv = self.simulated_keys(parts.rotate_last(kv, positions, table))
        entries, chosen = kv[:0], [[]] * t
        if ratio:
            entries = self.compress(f"{prefix}compressor.", ratio, x, self.simulated_keys)
            chosen = [list(range((p + 1) // ratio)) for p in positions]
        if ratio == 4:
            chosen = self.choose(f"{prefix}indexer.", x, latent)
            notes.chosen[prefix] = chosen
        sink, scale = self.tensor(f"{prefix}attn_sink"), config["head_dim"] ** -0.5
        window = config["sliding_window"]
        out = np.stack(
            [
                parts.attend(
                    q[p],
                    np.concatenate([kv[max(p - window + 1, 0) : p + 1], entries[chosen[p]]]),
                    sink,
                    scale,
                )
                for p in positions
            ]
        )
        out = parts.rotate_last(out, positions, table, -1)
        groups = out.reshape(t, config["o_groups"], -1)
        wo_a = self.weight(f"{prefix}wo_a").reshape(config["o_groups"], config["o_lora_rank"], -1)
        return self.linear(f"{prefix}wo_b", np.einsum("tgx,grx->tgr", groups, wo_a).reshape(t, -1))

    def simulated_keys(self, keys: np.ndarray) -> np.ndarray:
        """[14]"""
        if not self.simulate:
            return keys
        still = keys.shape[-1] - self.config["qk_rope_head_dim"]
        return np.concatenate([parts.simulate_fp8(keys[..., :still]), keys[..., still:]], -1)

    def simulated_index(self, x: np.ndarray) -> np.ndarray:
        """[19]"""
        return parts.simulate_fp4(parts.hadamard(x)) if self.simulate else x

    def compress(self, prefix: str, ratio: int, x: np.ndarray, simulated) -> np.ndarray:
        """[18]: every complete entry, [n, width]."""
        kv, gate = x @ self.weight(f"{prefix}wkv").T, x @ self.weight(f"{prefix}wgate").T
        pooled = parts.pool(kv, gate, self.tensor(f"{prefix}ape"), ratio)
        entries = np.array(pooled).reshape(len(pooled), len(self.weight(f"{prefix}norm")))
        entries = self.norm(f"{prefix}norm", entries)
        starts = np.arange(len(entries)) * ratio
        return simulated(parts.rotate_last(entries, starts, parts.frequencies(self.config, ratio)))

    def choose(self, prefix: str, x: np.ndarray, latent: np.ndarray) -> list[list[int]]:
        """[19]: the entries that each query keeps."""
        config = self.config
        width, heads = config["index_head_dim"], config["index_n_heads"]
        table = parts.frequencies(config, 4)
        q = self.linear(f"{prefix}wq_b", latent).reshape(len(x), heads, width)
        q = self.simulated_index(parts.rotate_last(q, np.arange(len(x)), table))
        keys = self.compress(f"{prefix}compressor.", 4, x, self.simulated_index)
        weights = x @ self.weight(f"{prefix}weights_proj").T / np.sqrt(width * heads)
        scores = parts.index_scores(q, keys, weights)
        return parts.best_visible(scores, 4, config["index_topk"])

    def moe(self, prefix: str, x: np.ndarray, tokens: np.ndarray, notes: Outputs) -> np.ndarray:
        """[20, 21]"""
        table = self.tensors.get(f"{prefix}gate.tid2eid")
        bias = None if table is not None else self.tensor(f"{prefix}gate.bias")
        y = self.expert(f"{prefix}shared_experts.", x, 1.0)
        routed = [
            parts.route(row, bias, None if table is None else table[token], self.config)
            for row, token in zip(x @ self.weight(f"{prefix}gate").T, tokens, strict=True)
        ]
        ids, weights = np.array([r[0] for r in routed]), np.array([r[1] for r in routed])
        for index in range(self.config["n_routed_experts"]):
            rows, slots = np.nonzero(ids == index)
            weight = weights[rows, slots][:, None]
            y[rows] += self.expert(f"{prefix}experts.{index}.", x[rows], weight)
        if bias is not None:
            notes.router[prefix] = np.sort(ids, -1)
        return y

    def expert(self, prefix: str, x: np.ndarray, weight) -> np.ndarray:
        gate, up = self.linear(f"{prefix}w1", x), self.linear(f"{prefix}w3", x)
        limit = self.config["swiglu_limit"]
        return self.linear(f"{prefix}w2", parts.clamped(gate, up, limit, weight))

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.weight(name) * parts.rms(x, self.config["rms_norm_eps"])

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """x W^T; before a quantized weight the activations are rounded if that is asked for."""
        if self.simulate and f"{name}.scale" in self.tensors:
            x = quantize_activations(x, "ue8m0")
        return x @ self.weight(name).T

    def weight(self, name: str) -> np.ndarray:
        """The exact value of a weight in float64 [8, 9]."""
        if name not in self._dequantized:
            stored = self.tensors[f"{name}.weight"]
            scale = self.tensors.get(f"{name}.scale")
            if stored.dtype == np.int8:
                codes = np.stack([stored.view(np.uint8) & 15, stored.view(np.uint8) >> 4], -1)
                value = parts.E2M1[codes & 7] * np.where(codes & 8, -1.0, 1.0)
                value = value.reshape(len(stored), -1)
            else:
                value = stored.astype(np.float64)
            if scale is not None:
                rows, columns = (1, 32) if stored.dtype == np.int8 else (128, 128)
                scale = scale.astype(np.float64).repeat(rows, 0).repeat(columns, 1)
                value = value * scale[: value.shape[0], : value.shape[1]]
            self._dequantized[name] = value
        return self._dequantized[name]

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name].astype(np.float64)
