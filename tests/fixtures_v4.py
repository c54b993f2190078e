"""Tiny DeepSeek-V4 checkpoints in the official names: random, or with text known beforehand.

`v4` makes random weights whose logits have a standard deviation near 3. `v4_perm` makes a target
that answers every token t with a fixed permutation of t, and an MTP draft of known quality.
"""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.quantized import quantize_blocks
from tests.fixtures import BF16, DRAFTS, HFModel, PermModel, hadamard, seen_as

E8M0: Any = np.dtype(ml_dtypes.float8_e8m0fnu)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

V4_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 128,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 8,
    "max_position_embeddings": 1024,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 128,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 3,
    "num_hash_layers": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 16,
    "swiglu_limit": 2.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 96,
}
HC_OUTPUTS = {"attn": 3, "ffn": 3, "head": 1}  # scales of each kind of hyper-connection

# Standard deviation of a random matrix's outputs for inputs of unit variance, by the last part of
# its name before `.weight`; and mean and deviation of parameters that are no matrices.
GAINS = {
    "wo_a": 1.5, "wo_b": 0.5, "gate": 1.5, "wgate": 1.5, "weights_proj": 1.5,
    "w1": 1.5, "w2": 0.3, "w3": 1.5, "head": 3.0,
}  # fmt: skip
VECTORS = {
    "attn_sink": (1.0, 0.9), "ape": (0.0, 0.7), "bias": (0.0, 0.35), "base": (0.0, 0.6),
    "scale": (1.0, 0.25),
}  # fmt: skip


def v4_config(*, quantized: bool = False, **overrides: Any) -> dict[str, Any]:
    """FX-V4's config; a key given as `...` is left out.

    `compress_ratios` (a tuple, for hashing) sets the number of target layers: all but the last
    `num_nextn_predict_layers` entries are theirs.
    """
    config = copy.deepcopy(V4_CONFIG)
    if quantized:
        config["expert_dtype"] = "fp4"
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    for key, value in overrides.items():
        if value is ...:
            del config[key]
        elif key in V4_CONFIG["rope_scaling"]:
            config["rope_scaling"][key] = value
        else:
            config[key] = list(value) if isinstance(value, tuple) else value
    drafts = config["num_nextn_predict_layers"]
    config["num_hidden_layers"] = len(config["compress_ratios"]) - drafts
    config["num_hash_layers"] = min(config["num_hash_layers"], config["num_hidden_layers"] - 1)
    return config


def v4(*, seed: int = 0, **overrides: Any) -> HFModel:
    """FX-V4: random weights, well scaled, BF16 or (with `quantized=True`) FP8 and FP4 experts.

    `expert_dtype="fp8"` stores the experts as FP8 too.
    """
    config = v4_config(**overrides)
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in v4_shapes(config).items():
        array = _random_tensor(name, shape, rng, config)
        if "quantization_config" in config and is_quantizable(name):
            is_fp4 = ".ffn.experts." in name and config.get("expert_dtype") == "fp4"
            tensors[name], scales = quantize_fp4(array) if is_fp4 else quantize_fp8(array)
            tensors[name.removesuffix("weight") + "scale"] = scales
        else:
            tensors[name] = array.astype(BF16) if name.endswith(".weight") else array
    return HFModel(config, tensors)


def is_quantizable(name: str) -> bool:
    """Whether the published FP8 checkpoints quantize this tensor."""
    *_, stem, end = ["", *name.split(".")]
    quantized = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj")
    return end == "weight" and stem in quantized and ".compressor." not in name


def quantize_fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 values and e8m0 scales, one a block of 128 x 128."""
    quantized = quantize_blocks(weight, (128, 128), E8M0)
    return np.asarray(quantized.values), np.asarray(quantized.scales)


def quantize_fp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 bytes [n, k / 2], the even column in the low half, and e8m0 scales [n, k / 32]."""
    groups = weight.reshape(len(weight), -1, 32)
    scales = np.exp2(np.ceil(np.log2(np.abs(groups).max(-1, keepdims=True) / 6)))
    codes = np.abs(np.abs(groups / scales)[..., None] - E2M1).argmin(-1)
    codes = (codes + 8 * (groups < 0)).astype(np.uint8).reshape(weight.shape)
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int8), scales[..., 0].astype(E8M0)


def v4_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor, by official name."""
    d, w = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (w, d)}
    num_layers = config["num_hidden_layers"]
    for layer, ratio in enumerate(config["compress_ratios"]):
        is_draft = layer >= num_layers
        prefix = f"mtp.{layer - num_layers}." if is_draft else f"layers.{layer}."
        if is_draft:
            shapes |= {f"{prefix}{name}.weight": (d,) for name in ("enorm", "hnorm", "norm")}
            shapes |= {f"{prefix}{name}.weight": (d, d) for name in ("e_proj", "h_proj")}
            shapes |= _hyper_shapes(config, prefix, "head")
        shapes |= _attention_shapes(config, f"{prefix}attn.", ratio)
        shapes |= _moe_shapes(config, f"{prefix}ffn.", layer < config["num_hash_layers"])
        for kind in ("attn", "ffn"):
            shapes[f"{prefix}{kind}_norm.weight"] = (d,)
            shapes |= _hyper_shapes(config, prefix, kind)
    return shapes | {"norm.weight": (d,), "head.weight": (w, d)} | _hyper_shapes(config, "", "head")


def _hyper_shapes(config: dict[str, Any], prefix: str, kind: str) -> dict[str, tuple[int, ...]]:
    j = config["hc_mult"]
    outputs = j if kind == "head" else (2 + j) * j
    return {
        f"{prefix}hc_{kind}_fn": (outputs, j * config["hidden_size"]),
        f"{prefix}hc_{kind}_base": (outputs,),
        f"{prefix}hc_{kind}_scale": (HC_OUTPUTS[kind],),
    }


def _attention_shapes(
    config: dict[str, Any], prefix: str, ratio: int
) -> dict[str, tuple[int, ...]]:
    d, h, x, a = (
        config[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank")
    )
    groups, rank = config["o_groups"], config["o_groups"] * config["o_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}attn_sink": (h,),
        f"{prefix}wq_a.weight": (a, d),
        f"{prefix}q_norm.weight": (a,),
        f"{prefix}wq_b.weight": (h * x, a),
        f"{prefix}wkv.weight": (x, d),
        f"{prefix}kv_norm.weight": (x,),
        f"{prefix}wo_a.weight": (rank, h * x // groups),
        f"{prefix}wo_b.weight": (d, rank),
    }
    if ratio:
        shapes |= _compressor_shapes(f"{prefix}compressor.", ratio, x, d)
    if ratio == 4:
        heads, width = config["index_n_heads"], config["index_head_dim"]
        shapes |= {
            f"{prefix}indexer.wq_b.weight": (heads * width, a),
            f"{prefix}indexer.weights_proj.weight": (heads, d),
        }
        shapes |= _compressor_shapes(f"{prefix}indexer.compressor.", ratio, width, d)
    return shapes


def _compressor_shapes(prefix: str, ratio: int, width: int, d: int) -> dict[str, tuple[int, ...]]:
    outputs = 2 * width if ratio == 4 else width
    return {
        f"{prefix}ape": (ratio, outputs),
        f"{prefix}wkv.weight": (outputs, d),
        f"{prefix}wgate.weight": (outputs, d),
        f"{prefix}norm.weight": (width,),
    }


def _moe_shapes(config: dict[str, Any], prefix: str, is_hash: bool) -> dict[str, tuple[int, ...]]:
    d, f, e = (config[k] for k in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}gate.weight": (e, d)}
    if is_hash:
        shapes[f"{prefix}gate.tid2eid"] = (config["vocab_size"], config["num_experts_per_tok"])
    else:
        shapes[f"{prefix}gate.bias"] = (e,)
    mlps = {f"{prefix}experts.{expert}.": f for expert in range(e)}
    mlps[f"{prefix}shared_experts."] = f * config["n_shared_experts"]
    for mlp, width in mlps.items():
        shapes |= {
            f"{mlp}w1.weight": (width, d),
            f"{mlp}w2.weight": (d, width),
            f"{mlp}w3.weight": (width, d),
        }
    return shapes


def _random_tensor(
    name: str, shape: tuple[int, ...], rng: np.random.Generator, config: dict[str, Any]
) -> np.ndarray:
    last = name.split("_")[-1] if "hc_" in name else name.split(".")[-1]
    if last == "tid2eid":
        experts = [rng.permutation(config["n_routed_experts"])[: shape[1]] for _ in range(shape[0])]
        return np.array(experts, np.int64)
    noise = rng.standard_normal(shape, np.float32)
    if name == "embed.weight":
        return noise
    if len(shape) == 1 or last in VECTORS:
        mean, deviation = VECTORS.get(last, (1.0, 0.2))
        return np.float32(mean) + np.float32(deviation) * noise
    gain = GAINS.get(name.removesuffix(".weight").split(".")[-1], 1.0)
    return np.float32(gain / np.sqrt(shape[1])) * noise


def v4_perm(
    *, draft: str = "perfect", branch_gain: float = 0.0, seed: int = 0, **overrides: Any
) -> PermModel:
    """FX-PERM for V4: the embedding's direction of t is the head's row of `answers[t]`.

    All streams start as the embedding, and a mix whose columns sum to 1 keeps equal streams as they
    are, so without branches they pass through whatever the hyper-connections are. The draft
    passes the embedding alone, steered as in `fixtures.v3_perm`.

    Args:
        draft: a key of `fixtures.DRAFTS`, or "random" for a random draft.
        branch_gain: how much of the random attention and FFN outputs the target keeps.
    """
    base = v4(seed=seed, **overrides)
    d, w = base.config["hidden_size"], base.config["vocab_size"]
    cycles = np.random.default_rng(seed + 1).permutation(w).reshape(4, w // 4)
    answers = np.empty(w, np.int64)
    answers[cycles] = np.roll(cycles, -1, axis=1)
    model = PermModel(base.config, base.tensors, answers, cycles)

    directions = hadamard(d)[:w]
    head = np.zeros((w, d), np.float32)
    head[answers] = directions / 8
    model.set("embed.weight", directions)
    model.set("head.weight", head)
    scale_branches(model, "layers.", branch_gain)
    for name in base.tensors:
        if name.endswith("norm.weight"):
            model.set(name, 1.0)
    if draft != "random":
        scale_branches(model, "mtp.", 0.0)
        seen = seen_as(cycles, DRAFTS[draft])
        for name in base.tensors:
            if name.endswith("e_proj.weight"):
                model.set(name, directions[seen].T @ directions / d)
            elif name.endswith("h_proj.weight"):
                model.set(name, 0.0)
    return model


def scale_branches(model: HFModel, prefix: str, gain: float) -> None:
    """Multiplies what attention and FFN of these layers add to the residual streams."""
    for name, array in model.tensors.items():
        if name.startswith(prefix) and name.endswith(("wo_b.weight", ".w2.weight")):
            model.set(name, array.astype(np.float32) * gain)
