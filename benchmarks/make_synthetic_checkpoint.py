"""Writes a Hugging Face folder like DeepSeek-V3's own FP8 one, of any size, with random weights.

    python benchmarks/make_synthetic_checkpoint.py OUT [--gigabytes 3] [--shards 4]

Only the number of layers depends on the size, so a larger one takes longer, not more memory.
"""

import argparse
import json
import math
import pathlib
import zlib
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

BLOCK = 128
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 1024,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 16384,
}
NUM_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
Tensor = tuple[str, str, tuple[int, ...]]  # name, type, shape


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("output", metavar="OUT", type=pathlib.Path)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="about; default: 3")
    parser.add_argument("--shards", type=int, default=4, help="default: 4")
    arguments = parser.parse_args()
    total = write(arguments.output, round(arguments.gigabytes * 1e9), arguments.shards)
    print(f"{arguments.output}: {total} bytes of weights")


def write(folder: pathlib.Path, num_bytes: int, num_shards: int) -> int:
    """Writes the folder; returns the bytes of its tensors, near `num_bytes`."""
    fixed = size(tensors(1))
    num_layers = 1 + max(1, round((num_bytes - fixed) / (size(tensors(2)) - fixed)))
    all_tensors = list(tensors(num_layers))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps({**CONFIG, "num_hidden_layers": num_layers}, indent=2)
    )
    random = Random()
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    weight_map: dict[str, str] = {}
    for i, name in enumerate(names):
        begin, end = (len(all_tensors) * edge // num_shards for edge in (i, i + 1))
        write_shard(folder / name, all_tensors[begin:end], random)
        weight_map |= {tensor[0]: name for tensor in all_tensors[begin:end]}
    total = size(all_tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total


def size(tensors: Iterator[Tensor] | Sequence[Tensor]) -> int:
    return sum(NUM_BYTES[dtype] * math.prod(shape) for _, dtype, shape in tensors)


def tensors(num_layers: int) -> Iterator[Tensor]:
    """Every tensor of a model of that many layers and its draft, in the order of the files."""
    d, w = CONFIG["hidden_size"], CONFIG["vocab_size"]
    yield "model.embed_tokens.weight", "BF16", (w, d)
    for layer in range(num_layers):
        yield from decoder_layer(f"model.layers.{layer}.", is_dense=layer == 0)
    yield "model.norm.weight", "BF16", (d,)
    yield "lm_head.weight", "BF16", (w, d)
    draft = f"model.layers.{num_layers}."
    yield from ((f"{draft}{name}.weight", "BF16", (d,)) for name in ("enorm", "hnorm"))
    yield f"{draft}eh_proj.weight", "BF16", (d, 2 * d)
    yield f"{draft}embed_tokens.weight", "BF16", (w, d)
    yield f"{draft}shared_head.norm.weight", "BF16", (d,)
    yield f"{draft}shared_head.head.weight", "BF16", (w, d)
    yield from decoder_layer(draft, is_dense=False)


def decoder_layer(prefix: str, *, is_dense: bool) -> Iterator[Tensor]:
    d, h, e, f = (
        CONFIG[key]
        for key in (
            "hidden_size",
            "num_attention_heads",
            "n_routed_experts",
            "moe_intermediate_size",
        )
    )
    a, c, n, r, v = (
        CONFIG[key]
        for key in (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
    )
    norms = {"input_layernorm": d, "post_attention_layernorm": d}
    norms |= {"self_attn.q_a_layernorm": a, "self_attn.kv_a_layernorm": c}
    yield from ((f"{prefix}{name}.weight", "BF16", (width,)) for name, width in norms.items())
    yield from fp8(f"{prefix}self_attn.q_a_proj", a, d)
    yield from fp8(f"{prefix}self_attn.q_b_proj", h * (n + r), a)
    yield from fp8(f"{prefix}self_attn.kv_a_proj_with_mqa", c + r, d)
    yield from fp8(f"{prefix}self_attn.kv_b_proj", h * (n + v), c)
    yield from fp8(f"{prefix}self_attn.o_proj", d, h * v)
    if is_dense:
        yield from mlp(f"{prefix}mlp.", d, CONFIG["intermediate_size"])
        return
    yield f"{prefix}mlp.gate.weight", "BF16", (e, d)
    yield f"{prefix}mlp.gate.e_score_correction_bias", "F32", (e,)
    for expert in range(e):
        yield from mlp(f"{prefix}mlp.experts.{expert}.", d, f)
    yield from mlp(f"{prefix}mlp.shared_experts.", d, f)


def mlp(prefix: str, d: int, f: int) -> Iterator[Tensor]:
    yield from fp8(f"{prefix}gate_proj", f, d)
    yield from fp8(f"{prefix}up_proj", f, d)
    yield from fp8(f"{prefix}down_proj", d, f)


def fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "F32", (-(-rows // BLOCK), -(-columns // BLOCK))


class Random:
    """Plausible weights cut out of one pool at changing places; drawing 3 GB takes minutes."""

    POOL = 1 << 25

    def __init__(self):
        normal = np.random.default_rng(0).standard_normal(self.POOL, np.float32)
        self._pools = {
            "F8_E4M3": (normal * 64).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn),
            "BF16": (normal / 32).astype(ml_dtypes.bfloat16),
            "F32": np.abs(normal) / 2048,
        }

    def draw(self, name: str, dtype: str, count: int) -> Iterator[bytes]:
        """The tensor's bytes, in pieces. Both embeddings are the same, and both heads."""
        same = next((kind for kind in ("embed_tokens.", "head.weight") if kind in name), name)
        rng = np.random.default_rng(zlib.crc32(same.encode()))
        pool = self._pools[dtype]
        while count:
            piece = min(count, self.POOL // 2)
            start = rng.integers(self.POOL - piece)
            yield pool[start : start + piece].tobytes()
            count -= piece


def write_shard(path: pathlib.Path, tensors: Sequence[Tensor], random: Random) -> None:
    """Writes one safetensors file: the header's length, the header, the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + NUM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape in tensors:
            file.writelines(random.draw(name, dtype, math.prod(shape)))


if __name__ == "__main__":
    main()
