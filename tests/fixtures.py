"""Tiny DeepSeek-V3 checkpoints in the Hugging Face layout: random, or with text known beforehand.

`v3` makes random weights whose logits have a standard deviation near 3. `v3_perm` makes a target
that answers every token t with a fixed permutation of t, and a draft of known quality.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np

from tests import hf_folder

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = 448.0

V3_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "kv_lora_rank": 128,
    "max_position_embeddings": 512,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 32,
    "vocab_size": 96,
}

# Standard deviation of a random matrix's outputs for inputs of unit variance, by the last part of
# its name before `.weight`.
GAINS = {
    "kv_b_proj": 1.2, "q_b_proj": 1.2, "o_proj": 0.5, "gate_proj": 1.5, "up_proj": 1.5,
    "gate": 1.5, "eh_proj": 1.4, "lm_head": 3.0,
}  # fmt: skip


@dataclasses.dataclass
class HFModel:
    """A checkpoint in memory.

    Attributes:
        config: what `config.json` holds.
        tensors: arrays by Hugging Face name, in the order in which they are written.
    """

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def draft_prefix(self) -> str:
        return f"model.layers.{self.config['num_hidden_layers']}."

    def copy(self) -> Self:
        return dataclasses.replace(
            self, config=copy.deepcopy(self.config), tensors=dict(self.tensors)
        )

    def set(self, name: str, value: np.ndarray | float) -> None:
        """Replaces a tensor by `value`, broadcast to the shape and cast to the type that it has."""
        old = self.tensors[name]
        self.tensors[name] = np.broadcast_to(np.asarray(value), old.shape).astype(old.dtype)

    def write(self, folder: Path, **layout: Any) -> Path:
        """Writes the Hugging Face folder; `layout` is what `hf_folder.write_folder` takes."""
        return hf_folder.write_folder(folder, self.config, self.tensors, **layout)


def v3_config(**overrides: Any) -> dict[str, Any]:
    """FX-V3's config; a key given as `...` is left out, `quantized=True` adds the FP8 section."""
    config = copy.deepcopy(V3_CONFIG)
    if overrides.pop("quantized", False):
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(overrides.pop("weight_block_size", (128, 128))),
        }
    for key, value in overrides.items():
        if value is ...:
            del config[key]
        elif key in V3_CONFIG["rope_scaling"]:
            config["rope_scaling"][key] = value
        else:
            config[key] = value
    config["num_key_value_heads"] = config["num_attention_heads"]
    return config


def v3(*, seed: int = 0, own_copies: bool = True, **overrides: Any) -> HFModel:
    """FX-V3: random weights, well scaled, BF16 or (with `quantized=True`) FP8 in blocks.

    Args:
        own_copies: whether the draft layer holds copies of the embedding and head, as published
            files do.
        overrides: config keys, those of `rope_scaling` among them.
    """
    config = v3_config(**overrides)
    rng = np.random.default_rng(seed)
    block = config.get("quantization_config", {}).get("weight_block_size")
    tensors: dict[str, np.ndarray] = {}
    for name, shape in v3_shapes(config).items():
        array = _random_tensor(name, shape, rng)
        if block and is_quantizable(name):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_fp8(array, block)
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = array
        else:
            tensors[name] = array.astype(BF16)
    model = HFModel(config, tensors)
    if config.get("num_nextn_predict_layers") and own_copies:
        embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        tensors[model.draft_prefix + "embed_tokens.weight"] = embedding
        tensors[model.draft_prefix + "shared_head.head.weight"] = head
    return model


def is_quantizable(name: str) -> bool:
    """Whether the published FP8 checkpoints store this weight as FP8."""
    stem = name.removesuffix(".weight")
    return stem.endswith(("_proj", "_with_mqa")) and not stem.endswith("eh_proj")


def quantize_fp8(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns e4m3 values and float32 scales, one a block; value * scale is close to `weight`."""
    rows, columns = (-(-size // edge) for size, edge in zip(weight.shape, block, strict=True))
    scales = np.ones((rows, columns), np.float32)
    values = np.empty(weight.shape, FP8)
    for r in range(rows):
        for c in range(columns):
            at = np.s_[r * block[0] : (r + 1) * block[0], c * block[1] : (c + 1) * block[1]]
            largest = np.abs(weight[at]).max()
            if largest > 0:
                scales[r, c] = largest / FP8_MAX
            values[at] = (weight[at] / scales[r, c]).astype(FP8)
    return values, scales


def v3_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor but the draft's copies of the embedding and head, by HF name."""
    d, w = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (w, d)}
    num_layers = config["num_hidden_layers"]
    for layer in range(num_layers + (config.get("num_nextn_predict_layers") or 0)):
        prefix = f"model.layers.{layer}."
        if layer >= num_layers:
            norms = {
                f"{prefix}{name}.weight": (d,) for name in ("enorm", "hnorm", "shared_head.norm")
            }
            shapes |= norms | {f"{prefix}eh_proj.weight": (d, 2 * d)}
        is_dense = layer < config["first_k_dense_replace"]
        shapes |= _attention_shapes(config, prefix)
        shapes |= _dense_shapes(config, prefix) if is_dense else _moe_shapes(config, prefix)
    return shapes | {"model.norm.weight": (d,), "lm_head.weight": (w, d)}


def _attention_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    d, h, a, c = (
        config[k] for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    n, r, v = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if a is None:
        queries: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (h * (n + r), d)}
    else:
        queries = {
            "self_attn.q_a_proj": (a, d),
            "self_attn.q_a_layernorm": (a,),
            "self_attn.q_b_proj": (h * (n + r), a),
        }
    others: dict[str, tuple[int, ...]] = {
        "input_layernorm": (d,),
        "self_attn.kv_a_proj_with_mqa": (c + r, d),
        "self_attn.kv_a_layernorm": (c,),
        "self_attn.kv_b_proj": (h * (n + v), c),
        "self_attn.o_proj": (d, h * v),
        "post_attention_layernorm": (d,),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in (queries | others).items()}


def _dense_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    return _mlp_shapes(f"{prefix}mlp.", config["hidden_size"], config["intermediate_size"])


def _moe_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    d, f, e = (config[k] for k in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}mlp.gate.weight": (e, d),
        f"{prefix}mlp.gate.e_score_correction_bias": (e,),
    }
    for expert in range(e):
        shapes |= _mlp_shapes(f"{prefix}mlp.experts.{expert}.", d, f)
    return shapes | _mlp_shapes(f"{prefix}mlp.shared_experts.", d, f * config["n_shared_experts"])


def _mlp_shapes(prefix: str, d: int, f: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (f, d),
        f"{prefix}up_proj.weight": (f, d),
        f"{prefix}down_proj.weight": (d, f),
    }


def _random_tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(shape, np.float32)
    if name.endswith("e_score_correction_bias"):
        return 0.15 * noise
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    if name.endswith("down_proj.weight"):
        gain = 0.18 if ".experts." in name else 0.3
    else:
        gain = GAINS.get(name.split(".")[-2], 1.0)
    return gain / np.sqrt(shape[1]) * noise


# Drafts by the tokens they continue rightly; `cycle` is the number of the cycle that holds a token.
DRAFTS: dict[str, Callable[[int, int], bool]] = {
    "perfect": lambda token, cycle: True,
    "half": lambda token, cycle: token % 2 == 0,
    "wrong": lambda token, cycle: False,
    "steered": lambda token, cycle: (True, False, token % 2 == 0, token % 3 > 0)[cycle],
}


@dataclasses.dataclass
class PermModel(HFModel):
    """FX-PERM: the target answers token t with `answers[t]`.

    Attributes:
        answers: the permutation, [vocab]; four cycles, of a quarter of the vocabulary each.
        cycles: the tokens of each cycle, in the order in which they answer each other.
    """

    answers: np.ndarray
    cycles: np.ndarray

    def continuation(self, token: int, length: int) -> list[int]:
        """The tokens that follow `token` in greedy text."""
        out = []
        for _ in range(length):
            token = int(self.answers[token])
            out.append(token)
        return out


def v3_perm(
    *, draft: str = "perfect", branch_gain: float = 0.0, seed: int = 0, **overrides: Any
) -> PermModel:
    """FX-PERM for V3: the embedding's direction of t is the head's row of `answers[t]`.

    The draft's joint projection passes the embedding alone: unchanged for the tokens that it is to
    continue rightly, as another token's for the rest. The prompt steers the draft "steered": text
    that starts in `cycles[0]` is drafted rightly always, in `cycles[1]` never, in `cycles[2]` and
    `cycles[3]` sometimes.

    Args:
        draft: a key of `DRAFTS`, or "random" for a random draft layer and joint projection.
        branch_gain: how much of the random attention and FFN outputs the target keeps. 0 makes its
            text the permutation exactly; with a few, the text depends on the whole context and a
            "perfect" draft is right only now and then.
    """
    base = v3(seed=seed, **overrides)
    d, w = base.config["hidden_size"], base.config["vocab_size"]
    cycles = np.random.default_rng(seed + 1).permutation(w).reshape(4, w // 4)
    answers = np.empty(w, np.int64)
    answers[cycles] = np.roll(cycles, -1, axis=1)
    model = PermModel(base.config, base.tensors, answers, cycles)

    directions = hadamard(d)[:w]
    head = np.zeros((w, d), np.float32)
    head[answers] = directions / 8
    for prefix in ("model.", model.draft_prefix):
        _set_if_there(model, f"{prefix}embed_tokens.weight", directions)
    for name in ("lm_head.weight", model.draft_prefix + "shared_head.head.weight"):
        _set_if_there(model, name, head)
    scale_branches(model, branch_gain, range(base.config["num_hidden_layers"]))
    for name in base.tensors:
        if name.endswith("norm.weight"):
            model.set(name, 1.0)
    if base.config.get("num_nextn_predict_layers") and draft != "random":
        scale_branches(model, 0.0, [base.config["num_hidden_layers"]])
        model.set(
            model.draft_prefix + "eh_proj.weight", _steering(cycles, directions, DRAFTS[draft])
        )
    return model


def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix, float32: rows of 1 and -1, each orthogonal to all others."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def scale_branches(model: HFModel, gain: float, layers: Iterable[int]) -> None:
    """Multiplies what attention and FFN of these layers add to the residual stream."""
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    for name, array in model.tensors.items():
        if name.startswith(prefixes) and name.endswith(("o_proj.weight", "down_proj.weight")):
            scale = f"{name}_scale_inv"
            if scale in model.tensors and gain != 0:
                model.set(scale, model.tensors[scale] * gain)
            else:
                model.set(name, array.astype(np.float32) * gain)


def _steering(
    cycles: np.ndarray, directions: np.ndarray, is_right: Callable[[int, int], bool]
) -> np.ndarray:
    """The joint projection [d, 2d]: maps each embedding to itself or to a wrong one."""
    d = directions.shape[1]
    projection = np.zeros((d, 2 * d), np.float32)
    projection[:, :d] = directions[seen_as(cycles, is_right)].T @ directions / d
    return projection


def seen_as(cycles: np.ndarray, is_right: Callable[[int, int], bool]) -> np.ndarray:
    """The token that the draft takes each one for: itself, or another one of its cycle."""
    seen = np.arange(cycles.size)
    for cycle, tokens in enumerate(cycles):
        for place, token in enumerate(tokens):
            if not is_right(int(token), cycle):
                seen[token] = tokens[(place + len(tokens) // 2) % len(tokens)]
    return seen


def _set_if_there(model: HFModel, name: str, value: np.ndarray) -> None:
    if name in model.tensors:
        model.set(name, value)
