"""DeepSeek-V4's `config.json`: the released files, transformers 5's, and each key refused."""

import copy
import json
from typing import Any

import pytest

from jaxspec.config import DeepseekV4Config, Yarn, read_config
from jaxspec.errors import ConfigError
from tests import golden_case

# What the released files say, in their own keys.
V4_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
}
V4_PRO = V4_FLASH | {
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}
OLDER_KEYS = (
    "compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "scoring_func",
    "topk_method", "torch_dtype", "expert_dtype",
)  # fmt: skip
SLIDING, SPARSE, HEAVY = (
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip


def of_transformers(hf: dict[str, Any] = V4_FLASH) -> dict[str, Any]:
    """The same model as transformers 5 writes it."""
    names = {0: SLIDING, 4: SPARSE, 128: HEAVY}
    num_layers, num_hash = hf["num_hidden_layers"], hf["num_hash_layers"]
    share = hf["qk_rope_head_dim"] / hf["head_dim"]
    yarn = {key: value for key, value in hf["rope_scaling"].items() if key != "type"}
    return {key: value for key, value in hf.items() if key not in OLDER_KEYS} | {
        "compress_rates": {SPARSE: 4, HEAVY: 128},
        "dtype": "bfloat16",
        "layer_types": [names[ratio] for ratio in hf["compress_ratios"][:num_layers]],
        "mlp_bias": False,
        "mlp_layer_types": ["hash_moe"] * num_hash + ["moe"] * (num_layers - num_hash),
        "output_router_logits": False,
        "partial_rotary_factor": share,
        "quantization_config": {**hf["quantization_config"], "expert_dtype": "fp4"},
        "rope_parameters": {
            "main": {
                "partial_rotary_factor": share,
                "rope_theta": hf["rope_theta"],
                "rope_type": "default",
            },
            "compress": {
                **yarn,
                "attention_factor": 1.0,
                "partial_rotary_factor": share,
                "rope_theta": hf["compress_rope_theta"],
                "rope_type": "yarn",
            },
        },
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    }


def changed(hf: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Other values; a dotted key, its dots written `__`, reaches inside, `...` removes it."""
    hf = copy.deepcopy(hf)
    for key, value in values.items():
        *parents, last = key.split("__")
        node = hf
        for parent in parents:
            node = node[parent]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return hf


@pytest.mark.parametrize(("hf", "num_layers"), [(V4_FLASH, 43), (V4_PRO, 61)])
def test_the_released_configs(hf, num_layers):
    config = read_config(hf)
    assert isinstance(config, DeepseekV4Config)
    assert len(config.compress_ratios) == num_layers
    assert (config.draft_compress_ratios, config.num_nextn_predict_layers) == ((0,), 1)
    assert config.rope == Yarn(16.0, 65536, 32.0, 1.0)
    assert (config.rope_theta, config.compress_rope_theta) == (10000, 160000)
    assert (config.num_hash_layers, config.expert_dtype) == (3, "fp4")
    assert config.activation_scale_format == "ue8m0"
    assert config.cache_ratios == (4, 128)
    assert config.unknown_keys == ()


@pytest.mark.parametrize("hf", [V4_FLASH, V4_PRO])
def test_the_newer_keys_of_transformers_say_the_same(hf):
    assert read_config(of_transformers(hf)) == read_config(hf)


@pytest.mark.parametrize("case", ["v4_bf16", "v4_quant"])
def test_golden_configs(case):
    config = read_config(golden_case.checkpoint(case).config)
    assert isinstance(config, DeepseekV4Config)
    assert config.unknown_keys == () and config.num_nextn_predict_layers == 1
    assert config.expert_dtype == ("fp4" if case == "v4_quant" else None)


def test_draft_layers_are_counted_by_their_ratios():
    """DSpark's config announces one layer and has a ratio for each of three."""
    hf = changed(V4_FLASH, compress_ratios=[*V4_FLASH["compress_ratios"], 0, 0])
    config = read_config(hf | {"dspark_block_size": 5})
    assert isinstance(config, DeepseekV4Config)
    assert config.num_nextn_predict_layers == 3
    assert config.unknown_keys == ("dspark_block_size",)
    config = read_config(changed(hf, num_nextn_predict_layers=0))
    assert isinstance(config, DeepseekV4Config) and config.draft_compress_ratios == ()


def test_unknown_keys_are_listed():
    assert read_config(V4_FLASH | {"b": 1, "a": 2, "_c": 3}).unknown_keys == ("a", "b")


REFUSED = {
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "scoring": ({"scoring_func": "sigmoid"}, "scoring_func"),
    "several key/value heads": ({"num_key_value_heads": 8}, "num_key_value_heads"),
    "too few ratios": ({"compress_ratios": [0, 4]}, "compress_ratios"),
    "another ratio": ({"compress_ratios": [8] * 43}, "compress_ratios holds 8"),
    "groups": ({"o_groups": 7}, "o_groups=7"),
    "no limit": ({"swiglu_limit": ...}, "swiglu_limit"),
    "expert type": ({"expert_dtype": "int4"}, "expert_dtype='int4'"),
    "rope": ({"rope_scaling__type": "linear"}, "rope_scaling.type"),
    "token": ({"eos_token_id": 129280}, "129280"),
}
REFUSED_NEWER = {
    "layer type": ({"layer_types": ["full_attention"] * 43}, "layer_types"),
    "number of layers": ({"layer_types": [SPARSE]}, "layer_types"),
    "rates": ({"compress_rates": {SPARSE: 8, HEAVY: 128}}, "compress_rates"),
    "rate": ({"compress_rate_csa": 8}, "compress_rate_csa=8"),
    "contradicted ratios": ({"compress_ratios": [0] * 43}, "layer_types says compress_ratios"),
    "hash layers in between": (
        {"mlp_layer_types": ["moe", "hash_moe"] + ["moe"] * 41},
        "mlp_layer_types",
    ),
    "contradicted hash layers": ({"num_hash_layers": 2}, "mlp_layer_types says num_hash_layers"),
    "contradicted share": ({"qk_rope_head_dim": 32}, "qk_rope_head_dim"),
    "two shares": (
        {"rope_parameters__main__partial_rotary_factor": 0.5},
        "partial_rotary_factor says qk_rope_head_dim",
    ),
    "amplitude": (
        {"rope_parameters__compress__attention_factor": 1.3},
        "rope_parameters.compress.attention_factor",
    ),
    "kind of rope": ({"rope_parameters__compress__rope_type": "llama3"}, "llama3"),
    "YaRN in the window": (
        {"rope_parameters__main__rope_type": "yarn"},
        "rope_parameters.main",
    ),
    "two bases": ({"rope_parameters__main__rope_theta": 5000}, "rope_parameters.main"),
    "bias": ({"mlp_bias": True}, "mlp_bias=True"),
    "two expert types": ({"expert_dtype": "fp8"}, "quantization_config.expert_dtype"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(kind):
    values, reason = REFUSED[kind]
    with pytest.raises(ConfigError) as error:
        read_config(changed(V4_FLASH, **values))
    assert reason in str(error.value)


@pytest.mark.parametrize("kind", REFUSED_NEWER)
def test_newer_keys_are_refused_by_name(kind):
    values, reason = REFUSED_NEWER[kind]
    with pytest.raises(ConfigError) as error:
        read_config(changed(of_transformers(), **values))
    assert reason in str(error.value)


def test_a_config_survives_json():
    hf = json.loads(json.dumps(of_transformers()))
    assert read_config(hf).unknown_keys == ()
