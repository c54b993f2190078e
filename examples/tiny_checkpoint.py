"""A small DeepSeek-V3 checkpoint in the Hugging Face layout, with a text it knows by heart.

The weights are constructed, not trained. Every token's embedding is a direction of its own, and the
head's row of token u points along all tokens that u follows, so the target recites `SENTENCE` over
and over, whatever the prompt. Attention and feed-forward layers are random and only disturb it a
little. The NextN draft sees the newest token's embedding alone (`eh_proj` is the identity on that
half), but takes two words for others, and what it drafts behind them the target rejects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SENTENCE = (
    "A small draft guesses the next few tokens, then one pass of a large target model checks them"
    " and keeps what is right."
)
# What the draft takes a word for: it then guesses that one's successor, which is wrong.
MISTAKEN = {" few": " guesses", " keeps": " next"}
BOS, EOS = "<|begin|>", "<|end|>"

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "kv_lora_rank": 128,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 4,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 12,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 32,
    "vocab_size": 512,
}
DISTURBANCE = 0.01  # norm of what a sublayer adds to an embedding of norm 1, roughly


def write(folder: Path, *, num_hidden_layers: int = 12, num_shards: int = 3) -> Path:
    """Writes config, tokenizer, safetensors shards and their index into a new folder."""
    config = {**CONFIG, "num_hidden_layers": num_hidden_layers}
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"add_bos_token": True, "bos_token": BOS})
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    tensors = dict(make_tensors(config, tokenizer))
    names = np.array_split(list(tensors), num_shards)
    files = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    for file, inside in zip(files, names, strict=True):
        save_file({name: tensors[name] for name in inside}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, inside in zip(files, names, strict=True) for name in inside}
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    return folder


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE that knows the words of `SENTENCE` and spells everything else in bytes."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocab = {BOS: 0, EOS: 1}
    for symbol in sorted(byte_level.alphabet()):
        vocab[symbol] = len(vocab)
    merges = []
    # The text starts without a space and, the second time round, with one.
    for word, _ in byte_level.pre_tokenize_str(f"{SENTENCE} {SENTENCE}"):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return tokenizer


def make_tensors(config: dict, tokenizer: Tokenizer) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the checkpoint, by its published name."""
    vocab, width = config["vocab_size"], config["hidden_size"]
    num_layers = config["num_hidden_layers"]
    rng = np.random.default_rng(0)
    embedding = np.eye(vocab, width)
    head = np.zeros((vocab, width))
    head[following_tokens(tokenizer, vocab), np.arange(vocab)] = 1.0
    yield "model.embed_tokens.weight", bf16(embedding)
    for layer in range(num_layers):
        yield from decoder_layer(f"model.layers.{layer}", layer, config, rng)
    yield "model.norm.weight", ones(width)
    yield "lm_head.weight", bf16(head)

    draft = f"model.layers.{num_layers}"
    yield f"{draft}.embed_tokens.weight", bf16(embedding)
    yield f"{draft}.enorm.weight", ones(width)
    yield f"{draft}.hnorm.weight", ones(width)
    yield f"{draft}.eh_proj.weight", bf16(draft_projection(tokenizer, width))
    yield from decoder_layer(draft, num_layers, config, rng)
    yield f"{draft}.shared_head.norm.weight", ones(width)
    yield f"{draft}.shared_head.head.weight", bf16(head)


def following_tokens(tokenizer: Tokenizer, vocab: int) -> np.ndarray:
    """The token that follows each: the sentence's next, or its start where a token is not in it."""
    cycle = tokenizer.encode(f" {SENTENCE}").ids
    following = np.full(vocab, cycle[0])
    following[cycle] = np.roll(cycle, -1)
    following[tokenizer.encode(SENTENCE).ids[0]] = cycle[1]
    return following


def draft_projection(tokenizer: Tokenizer, width: int) -> np.ndarray:
    """`eh_proj`: passes the embedding on, with the mistaken words replaced, and drops the state."""
    reads_as = np.eye(width)
    for word, other in MISTAKEN.items():
        reads_as[:, tokenizer.encode(word).ids[0]] = reads_as[:, tokenizer.encode(other).ids[0]]
    return np.concatenate([reads_as, np.zeros((width, width))], axis=1)


def decoder_layer(
    prefix: str, layer: int, config: dict, rng: np.random.Generator
) -> Iterator[tuple[str, np.ndarray]]:
    """One layer with random matrices; the last ones, `o_proj` and `down_proj`, are small."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0):
        values = rng.normal(0.0, gain / np.sqrt(columns), (rows, columns))
        return f"{prefix}.{name}.weight", bf16(values)

    def mlp(name: str, hidden: int):
        yield matrix(f"{name}.gate_proj", hidden, width)
        yield matrix(f"{name}.up_proj", hidden, width)
        yield matrix(f"{name}.down_proj", width, hidden, DISTURBANCE / np.sqrt(width))

    yield f"{prefix}.input_layernorm.weight", ones(width)
    yield matrix("self_attn.q_a_proj", query, width)
    yield f"{prefix}.self_attn.q_a_layernorm.weight", ones(query)
    yield matrix("self_attn.q_b_proj", heads * (nope + rope), query)
    yield matrix("self_attn.kv_a_proj_with_mqa", latent + rope, width)
    yield f"{prefix}.self_attn.kv_a_layernorm.weight", ones(latent)
    yield matrix("self_attn.kv_b_proj", heads * (nope + value), latent)
    yield matrix("self_attn.o_proj", width, heads * value, DISTURBANCE / np.sqrt(width))
    yield f"{prefix}.post_attention_layernorm.weight", ones(width)
    if layer < config["first_k_dense_replace"]:
        yield from mlp("mlp", config["intermediate_size"])
        return
    yield matrix("mlp.gate", config["n_routed_experts"], width)
    bias = rng.normal(0.0, 0.01, config["n_routed_experts"]).astype(np.float32)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", bias
    hidden = config["moe_intermediate_size"]
    yield from mlp("mlp.shared_experts", hidden * config["n_shared_experts"])
    for expert in range(config["n_routed_experts"]):
        yield from mlp(f"mlp.experts.{expert}", hidden)


def bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16)


def ones(size: int) -> np.ndarray:
    return bf16(np.ones(size))
