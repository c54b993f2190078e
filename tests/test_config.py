"""`config.json` of the released models, and each key that is refused by name."""

import copy
import json
from pathlib import Path

import pytest

from jaxspec.config import DeepseekV3Config, Yarn, read_config
from jaxspec.errors import ConfigError

# What the released files say, in their own keys.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = V3 | {
    "aux_loss_alpha": 0.001,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": V3["rope_scaling"] | {"beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}


def changed(**values):
    """V3's config with other values; a dotted key reaches into a nested one, `...` removes it."""
    hf = copy.deepcopy(V3)
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


def test_deepseek_v3():
    config = DeepseekV3Config.from_hf(V3)
    assert config.latent_dim == 576
    assert config.rope == Yarn(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert config.quantization is not None
    assert config.weight_block_size == (128, 128)
    assert config.activation_scale_format == "float32"
    assert (config.eos_token_ids, config.pad_token_id, config.dtype) == ((1,), 1, "bfloat16")
    assert [config.is_moe(layer) for layer in (0, 2, 3, 60, 61)] == [False, False, True, True, True]
    assert config.unknown_keys == ()


def test_v3_1_rounds_activation_scales_to_powers_of_two():
    config = DeepseekV3Config.from_hf(changed(quantization_config__scale_fmt="ue8m0"))
    assert config.activation_scale_format == "ue8m0"


def test_kimi_k2_shares_the_architecture_and_has_no_draft():
    config = read_config(KIMI_K2)
    assert isinstance(config, DeepseekV3Config)
    assert config.num_nextn_predict_layers == 0
    assert config.n_group == config.topk_group == 1


def test_the_keys_of_transformers_5():
    newer = changed(rope_scaling=..., rope_theta=..., torch_dtype=..., num_nextn_predict_layers=...)
    newer |= {
        "dtype": "bfloat16",
        "head_dim": 64,
        "num_mtp_layers": 1,
        "pretraining_tp": 1,
        "qk_head_dim": 192,
        "rope_interleave": True,
        "rope_parameters": {
            **{k: v for k, v in V3["rope_scaling"].items() if k != "type"},
            "rope_theta": 10000,
            "rope_type": "yarn",
        },
    }
    assert DeepseekV3Config.from_hf(newer) == DeepseekV3Config.from_hf(V3)


def test_plain_rotary_embedding_and_direct_queries():
    config = DeepseekV3Config.from_hf(changed(rope_scaling=None, q_lora_rank=None))
    assert config.rope is None and config.q_lora_rank is None


def test_generation_config_comes_first():
    config = DeepseekV3Config.from_hf(V3, {"eos_token_id": [3, 1], "pad_token_id": 7})
    assert (config.eos_token_ids, config.pad_token_id) == ((3, 1), 7)
    assert DeepseekV3Config.from_hf(V3, {"temperature": 0.6}).eos_token_ids == (1,)
    nulls = DeepseekV3Config.from_hf(V3, {"eos_token_id": None, "pad_token_id": None})
    assert (nulls.eos_token_ids, nulls.pad_token_id) == ((1,), 1)
    none = DeepseekV3Config.from_hf(changed(eos_token_id=None))
    assert (none.eos_token_ids, none.pad_token_id) == ((), 0)


def test_keys_that_nothing_reads_are_listed():
    config = DeepseekV3Config.from_hf(V3 | {"index_topk": 2048, "_name_or_path": "x"})
    assert config.unknown_keys == ("index_topk",)


def test_an_nvfp4_config_runs_its_draft_in_bf16():
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    config = DeepseekV3Config.from_hf(changed(quantization_config=nvfp4))
    assert config.quantization is not None and config.quantization.method == "nvfp4"
    assert config.draft_quantization is None
    fp8 = DeepseekV3Config.from_hf(V3)
    assert fp8.draft_quantization == fp8.quantization


@pytest.mark.parametrize(
    "values, message",
    [
        ({"model_type": "deepseek_v2"}, "model_type='deepseek_v2'"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures="),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
        ({"rope_scaling__type": "linear"}, "rope_scaling.type='linear'"),
        ({"rope_scaling__type": ...}, "rope_scaling.type=missing"),
        ({"rope_scaling__rope_type": "linear"}, "rope_scaling.type='linear' and 'yarn'"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn'"),
        ({"rope_scaling__factor": 0}, "rope_scaling.factor=0"),
        ({"rope_scaling__original_max_position_embeddings": 32.5}, "=32.5"),
        ({"rope_theta": 1}, "rope_theta=1"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8'"),
        ({"num_mtp_layers": 2}, "num_nextn_predict_layers=1"),
        ({"model_type": []}, "model_type=[]"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "architectures="),
        ({"eos_token_id": True}, "eos_token_id=True"),
        ({"pad_token_id": "x"}, "pad_token_id='x'"),
        ({"rope_scaling__factor": ...}, "rope_scaling lacks factor"),
        ({"rope_scaling__attention_factor": 1.5}, "rope_scaling.attention_factor"),
        ({"quantization_config__quant_method": "gptq"}, "quantization_config.quant_method='gptq'"),
        ({"quantization_config__fmt": "e5m2"}, "quantization_config.fmt"),
        ({"quantization_config__activation_scheme": "static"}, "activation_scheme"),
        ({"quantization_config__scale_fmt": "e4m3"}, "scale_fmt"),
        ({"quantization_config__weight_block_size": [128]}, "weight_block_size"),
        ({"torch_dtype": "float8"}, "torch_dtype='float8'"),
        ({"vocab_size": ...}, "vocab_size=None"),
        ({"hidden_size": "7168"}, "hidden_size='7168'"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"n_group": 7}, "n_group=7"),
        ({"topk_group": 9}, "topk_group=9"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok=200"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63"),
        ({"eos_token_id": 129280}, "special token 129280"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_key(values, message):
    with pytest.raises(ConfigError, match="config.json") as error:
        read_config(changed(**values))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["v3_bf16", "v3_fp8"])
def test_the_golden_configs_are_read(case):
    path = Path(__file__).parent / "golden" / case / "config.json"
    config = DeepseekV3Config.from_hf(json.loads(path.read_text()))
    assert config.unknown_keys == ()
    assert (config.quantization is None) == (case == "v3_bf16")
