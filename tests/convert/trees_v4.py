"""DeepSeek-V4's trees and its other name forms, worked out name by name and without the rules."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.convert import trees
from tests.fixtures import HFModel

EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w\d)\.(weight|scale)")
STAGE = re.compile(r"mtp\.(\d+)\.(.*)")
HYPER = re.compile(r"hc_(\w+)_(fn|base|scale)$")
OWN = re.compile(r"(enorm|hnorm|e_proj|h_proj|norm|hc_head)\b")
TINY: Mapping[str, Any] = {"compress_ratios": (0, 4, 0), "n_routed_experts": 4}

TRANSFORMERS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "ffn.gate": "mlp.gate",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}


def expected(model: HFModel) -> dict[str, np.ndarray]:
    """The tree of a model whose files have the official names and no copies."""
    tensors = dict(model.tensors)
    tensors |= stack_experts(tensors)
    return {
        tree_path(name, is_quantized=name.removesuffix("weight") + "scale" in tensors): kept(array)
        for name, array in tensors.items()
    }


def stack_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Takes the experts out of `tensors` and returns them stacked, `...experts.w1.weight`."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name in list(tensors):
        if found := EXPERT.fullmatch(name):
            stem, index, *rest = found.groups()
            experts.setdefault(".".join([stem, *rest]), {})[int(index)] = tensors.pop(name)
    return {name: np.stack([by_index[i] for i in range(len(by_index))])
            for name, by_index in experts.items()}  # fmt: skip


def kept(array: np.ndarray) -> np.ndarray:
    """Packed FP4 is kept as bytes, and a table of ids in 32 bits."""
    if array.dtype == np.int8:
        return array.view(np.uint8)
    return array.astype(np.int32) if array.dtype == np.int64 else array


def tree_path(name: str, *, is_quantized: bool) -> str:
    """Where a tensor of that name is kept."""
    if name.endswith(".scale"):
        name = name.removesuffix("scale") + "weight.scales"
    elif is_quantized:
        name += ".values"
    root = "target/"
    if found := STAGE.fullmatch(name):
        stage, name = found.groups()
        root = f"draft/layers/{stage}/" + ("" if OWN.match(HYPER.sub(r"hc_\1", name)) else "block/")
    return root + HYPER.sub(r"hc_\1/\2", name).replace(".", "/")


def renamed(model: HFModel, rename: Callable[[str], str]) -> HFModel:
    """The same tensors under other names."""
    return HFModel(model.config, {rename(name): array for name, array in model.tensors.items()})


def prefixed(model: HFModel) -> HFModel:
    """The form `model.layers.*`, whose drafts are the layers behind the target's last."""
    num_layers = model.config["num_hidden_layers"]

    def rename(name: str) -> str:
        if found := STAGE.fullmatch(name):
            return f"model.layers.{num_layers + int(found[1])}.{found[2]}"
        return f"model.{name}"

    return renamed(model, rename)


def of_transformers(model: HFModel) -> HFModel:
    """What transformers 5 calls the tensors of the target; it has no draft."""
    tensors = {name: array for name, array in model.tensors.items() if not STAGE.match(name)}
    stacks = stack_experts(tensors)
    result = {_transformers_name(name): array for name, array in tensors.items()}
    for name in [name for name in stacks if ".w1." in name]:
        gate, up, down = (stacks[name.replace(".w1.", f".{w}.")] for w in ("w1", "w3", "w2"))
        stem = f"model.{name.split('.ffn.')[0]}.mlp.experts"
        ending = "_scale_inv" if name.endswith("scale") else ""
        result[f"{stem}.gate_up_proj{ending}"] = np.concatenate([gate, up], axis=1)
        result[f"{stem}.down_proj{ending}"] = down
    return HFModel(model.config, result)


def saved_by_transformers(model: HFModel) -> HFModel:
    """What it makes of its names when it saves: not quite the official ones again."""

    def rename(name: str) -> str:
        if name == "head.weight":
            return name
        name = re.sub(r"^hc_head_(\w+)", r"hc_head.hc_\1", name)
        name = name.replace("embed.weight", "embed_tokens.weight")
        return "model." + name.replace(".attn.kv_norm.", ".attn.norm.")

    targets = {name: array for name, array in model.tensors.items() if not STAGE.match(name)}
    return renamed(HFModel(model.config, targets), rename)


def _transformers_name(name: str) -> str:
    top = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    if name in top:
        return top[name]
    name = re.sub(r"^hc_head_(\w+)", r"hc_head.hc_\1", name)
    name = re.sub(r"\.hc_(\w+)_(fn|base|scale)$", r".\1_hc.\2", name)
    found = re.fullmatch(r"(layers\.\d+)\.(.+?)(\.weight|\.scale)?", name)
    if found and found[2] in TRANSFORMERS:
        ending = {".scale": ".weight_scale_inv"}.get(found[3], found[3] or "")
        name = f"{found[1]}.{TRANSFORMERS[found[2]]}{ending}"
    return f"model.{name}"


def call_fp4(path: Path) -> None:
    """Changes a file's header so that what it calls I8 is F4, which counts values, not bytes."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    for entry in header.values():
        if entry.get("dtype") == "I8":
            entry["dtype"], entry["shape"][-1] = "F4", 2 * entry["shape"][-1]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def dequantized(tree: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with every pair multiplied out, element by element, and rounded to BF16."""
    blocks = {np.dtype(np.uint8): (1, 32)}
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    result: dict[str, np.ndarray] = {}
    for path, array in tree.items():
        stem = path.removesuffix("/values")
        if stem != path:
            pair = {path: array, f"{stem}/scales": tree[f"{stem}/scales"].astype(np.float32)}
            if array.dtype == np.uint8:
                wide = np.empty((*array.shape[:-1], 2 * array.shape[-1]), np.float32)
                wide[..., 0::2], wide[..., 1::2] = table[array % 16], table[array // 16]
                pair[path] = wide
            result |= trees.dequantized(pair, blocks.get(array.dtype, (128, 128)))
        elif not path.endswith("/scales"):
            result[path] = array
    assert all(result[path].dtype != ml_dtypes.float8_e4m3fn for path in result)
    return result
