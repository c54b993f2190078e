"""DeepSeek-V3 and its NextN draft in float64 NumPy: no cache, no batch, one sequence a call.

Written from the formulas of `golden/README.md` (the numbers in brackets are its items) on tensors
by their Hugging Face names. It shares no code with the package, so agreement is evidence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.fixtures import HFModel


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What one pass gives for every row.

    Attributes:
        logits: [t, vocab].
        pre_norm, post_norm: the last layer's output before and after the final norm, [t, hidden].
        router: the chosen experts of each MoE layer, sorted, [t, k].
    """

    logits: np.ndarray
    pre_norm: np.ndarray
    post_norm: np.ndarray
    router: Mapping[int, np.ndarray]


class Reference:
    """The model of an `HFModel`; `quantize_activations` rounds them as FP8 kernels do [10, 11]."""

    def __init__(self, model: HFModel, *, quantize_activations: bool = False):
        self.config: dict[str, Any] = model.config
        self.tensors = model.tensors
        self.quantize_activations = quantize_activations
        self._dequantized: dict[str, np.ndarray] = {}

    def target(self, tokens: Sequence[int] | np.ndarray) -> Outputs:
        """Teacher forced: row i has seen tokens 0..i."""
        x = self.weight("model.embed_tokens")[np.asarray(tokens)]
        router: dict[int, np.ndarray] = {}
        for layer in range(self.config["num_hidden_layers"]):
            x = self.layer(layer, x, router)
        post_norm = self.norm("model.norm", x)
        return Outputs(post_norm @ self.weight("lm_head").T, x, post_norm, router)

    def draft(
        self, next_tokens: Sequence[int] | np.ndarray, hidden: np.ndarray, *, mask_first=False
    ) -> Outputs:
        """NextN [24]: row t sees `next_tokens[t]`, of position t + 1, and state `hidden[t]`.

        Args:
            hidden: the target's states after its final norm, [t, hidden].
            mask_first: zero the embedding used at position 0.
        """
        layer = self.config["num_hidden_layers"]
        prefix = f"model.layers.{layer}."
        embedding = self.weight(self._own(f"{prefix}embed_tokens", "model.embed_tokens"))
        e = embedding[np.asarray(next_tokens)]
        if mask_first:
            e[0] = 0
        both = [self.norm(f"{prefix}enorm", e), self.norm(f"{prefix}hnorm", hidden)]
        x = np.concatenate(both, axis=-1) @ self.weight(f"{prefix}eh_proj").T
        router: dict[int, np.ndarray] = {}
        x = self.layer(layer, x, router)
        post_norm = self.norm(f"{prefix}shared_head.norm", x)
        head = self.weight(self._own(f"{prefix}shared_head.head", "lm_head"))
        return Outputs(post_norm @ head.T, x, post_norm, router)

    def chain(
        self,
        tokens: Sequence[int] | np.ndarray,
        num_draft_tokens: int,
        *,
        fed: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Logits [num_draft_tokens, vocab] of drafting behind `tokens`; the last is the anchor.

        The draft knows the target's states of the positions before the anchor, then its own [26].

        Args:
            fed: tokens to feed behind the anchor; by default the draft's own greedy choices.
        """
        hidden = self.target(tokens[:-1]).post_norm
        next_tokens = list(tokens[1:])
        logits = []
        for step in range(num_draft_tokens):
            outputs = self.draft(next_tokens, hidden)
            logits.append(outputs.logits[-1])
            next_tokens.append(int(np.argmax(logits[-1])) if fed is None else fed[step])
            hidden = np.concatenate([hidden, outputs.post_norm[-1:]])
        return np.stack(logits)

    def greedy(self, tokens: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy text of the target alone."""
        text = list(tokens)
        for _ in range(num_tokens):
            text.append(int(np.argmax(self.target(text).logits[-1])))
        return text[len(tokens) :]

    def layer(self, layer: int, x: np.ndarray, router: dict[int, np.ndarray]) -> np.ndarray:
        """One decoder layer [6] on rows of positions 0..t-1; notes the routing in `router`."""
        prefix = f"model.layers.{layer}."
        x = x + self.attention(f"{prefix}self_attn.", self.norm(f"{prefix}input_layernorm", x))
        y = self.norm(f"{prefix}post_attention_layernorm", x)
        if layer < self.config["first_k_dense_replace"]:
            return x + self.mlp(f"{prefix}mlp.", y)
        return x + self.moe(layer, y, router)

    def attention(self, prefix: str, x: np.ndarray) -> np.ndarray:
        config, t = self.config, len(x)
        h, c = config["num_attention_heads"], config["kv_lora_rank"]
        n, r, v = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        if config["q_lora_rank"] is None:
            q = self.linear(f"{prefix}q_proj", x)
        else:
            latent = self.norm(f"{prefix}q_a_layernorm", self.linear(f"{prefix}q_a_proj", x))
            q = self.linear(f"{prefix}q_b_proj", latent)
        q = q.reshape(t, h, n + r)
        kv = self.linear(f"{prefix}kv_a_proj_with_mqa", x)
        compressed = self.norm(f"{prefix}kv_a_layernorm", kv[:, :c])
        expanded = compressed @ self.weight(f"{prefix}kv_b_proj").T
        k, values = np.split(expanded.reshape(t, h, n + v), [n], axis=-1)
        k_rope = self.rotate(kv[:, None, c:])[:, 0]
        scores = np.einsum("thn,shn->hts", q[..., :n], k)
        scores += np.einsum("thr,sr->hts", self.rotate(q[..., n:]), k_rope)
        scores = scores * self.softmax_scale() + np.triu(np.full((t, t), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hts,shv->thv", weights, values).reshape(t, h * v)
        return self.linear(f"{prefix}o_proj", out)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Interleaved rotary embedding [1-3] of [t, heads, r] at positions 0..t-1."""
        angles = np.arange(len(x))[:, None, None] * self.frequencies()
        amplitude = self._amplitude("mscale", 1.0) / self._amplitude("mscale_all_dim", 0.0)
        cos, sin = amplitude * np.cos(angles), amplitude * np.sin(angles)
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)

    def frequencies(self) -> np.ndarray:
        r, theta = self.config["qk_rope_head_dim"], self.config["rope_theta"]
        scaling = self.config.get("rope_scaling")
        base = theta ** (-2.0 * np.arange(r // 2) / r)
        if not scaling:
            return base
        original = scaling["original_max_position_embeddings"]

        def corner(rotations: float) -> float:
            return r * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

        low = max(math.floor(corner(scaling["beta_fast"])), 0)
        high = min(math.ceil(corner(scaling["beta_slow"])), r - 1)
        width = high - low or 0.001
        ramp = np.clip((np.arange(r // 2) - low) / width, 0, 1)
        return base * (1 - ramp) + base / scaling["factor"] * ramp

    def softmax_scale(self) -> float:
        """[4]: the squared YaRN amplitude goes with the scores."""
        width = self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"]
        return width**-0.5 * self._amplitude("mscale_all_dim", 0.0) ** 2

    def _amplitude(self, key: str, default: float) -> float:
        scaling = self.config.get("rope_scaling")
        if not scaling:
            return 1.0
        return 0.1 * scaling.get(key, default) * math.log(scaling["factor"]) + 1.0

    def mlp(self, prefix: str, x: np.ndarray) -> np.ndarray:
        gate, up = self.linear(f"{prefix}gate_proj", x), self.linear(f"{prefix}up_proj", x)
        return self.linear(f"{prefix}down_proj", gate / (1 + np.exp(-gate)) * up)

    def moe(self, layer: int, x: np.ndarray, router: dict[int, np.ndarray]) -> np.ndarray:
        prefix = f"model.layers.{layer}.mlp."
        bias = self.tensors[f"{prefix}gate.e_score_correction_bias"].astype(np.float64)
        y = self.mlp(f"{prefix}shared_experts.", x)
        chosen = []
        for i, logits in enumerate(x @ self.weight(f"{prefix}gate").T):
            experts, weights = route(logits, bias, self.config)
            for expert, weight in zip(experts, weights, strict=True):
                y[i] += weight * self.mlp(f"{prefix}experts.{expert}.", x[i : i + 1])[0]
            chosen.append(sorted(experts))
        router[layer] = np.array(chosen)
        return y

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return self.weight(name) * x / np.sqrt(mean_square + self.config["rms_norm_eps"])

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """x W^T; before an FP8 weight the activations are rounded if that is asked for."""
        if self.quantize_activations and f"{name}.weight_scale_inv" in self.tensors:
            x = quantize_activations(x, self.config["quantization_config"].get("scale_fmt"))
        return x @ self.weight(name).T

    def weight(self, name: str) -> np.ndarray:
        """The exact value of a weight in float64 [8]."""
        if name not in self._dequantized:
            value = self.tensors[f"{name}.weight"].astype(np.float64)
            if f"{name}.weight_scale_inv" in self.tensors:
                scale = self.tensors[f"{name}.weight_scale_inv"].astype(np.float64)
                rows, columns = self.config["quantization_config"]["weight_block_size"]
                scale = scale.repeat(rows, 0).repeat(columns, 1)
                value *= scale[: value.shape[0], : value.shape[1]]
            self._dequantized[name] = value
        return self._dequantized[name]

    def _own(self, name: str, shared: str) -> str:
        return name if f"{name}.weight" in self.tensors else shared


def quantize_activations(x: np.ndarray, scale_fmt: str | None = None) -> np.ndarray:
    """Rounds each 128 consecutive values of a row to e4m3 and back [10]."""
    out = np.empty(x.shape, np.float64)
    for start in range(0, x.shape[-1], 128):
        part = x[..., start : start + 128].astype(np.float32)
        largest = np.maximum(np.abs(part).max(-1, keepdims=True), np.float32(1e-4))
        scale = largest / np.float32(448)
        if scale_fmt == "ue8m0":
            scale = np.exp2(np.ceil(np.log2(scale)))
        codes = np.clip(part / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        out[..., start : start + 128] = codes.astype(np.float64) * scale
    return out


def route(
    logits: np.ndarray, bias: np.ndarray, config: Mapping[str, Any]
) -> tuple[list[int], list[float]]:
    """The experts of one token and their weights [7]; ties go to the lowest index."""
    scores = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [score + float(b) for score, b in zip(scores, bias, strict=True)]
    size = len(scores) // config["n_group"]
    groups = [choice[i : i + size] for i in range(0, len(choice), size)]
    best_two = [sum(sorted(group, reverse=True)[:2]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda i: (-best_two[i], i))[: config["topk_group"]]
    allowed = [expert for expert in range(len(scores)) if expert // size in kept]
    chosen = sorted(allowed, key=lambda i: (-choice[i], i))[: config["num_experts_per_tok"]]
    total = sum(scores[expert] for expert in chosen)
    return chosen, [scores[i] / total * config["routed_scaling_factor"] for i in chosen]
