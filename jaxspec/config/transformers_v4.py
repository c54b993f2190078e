"""DeepSeek-V4's config as transformers 5 writes it, put back into the keys of the released files.

It names what a layer does instead of giving a ratio or a count, gives the rotary dimensions as a
share of the head, and nests the rotary settings of layers without and with compression.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.config.base import check_values, read_integer, read_number
from jaxspec.errors import ConfigError

LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
COMPRESS_RATES = {name: ratio for name, ratio in LAYER_TYPES.items() if ratio}
# What `rope_parameters` holds, and the released key of the base in each.
ROPE_SETS = {"main": "rope_theta", "compress": "compress_rope_theta"}
NEWER_KEYS = (
    "compress_rate_csa",
    "compress_rate_hca",
    "compress_rates",
    "layer_types",
    "mlp_layer_types",
    "partial_rotary_factor",
)


def in_released_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The same config without transformers' newer keys; one that has none comes back as it is.

    Raises:
        ConfigError: a newer key has a value that cannot be honoured, or contradicts an older one.
    """
    result = {key: value for key, value in hf.items() if key not in NEWER_KEYS}
    check_values(
        hf,
        {"compress_rate_csa": 4, "compress_rate_hca": 128, "compress_rates": COMPRESS_RATES},
    )
    num_layers = read_integer(hf, "num_hidden_layers")
    if hf.get("layer_types") is not None:
        _set(result, "compress_ratios", _ratios(hf["layer_types"], num_layers), "layer_types")
    if hf.get("mlp_layer_types") is not None:
        count = _count_hash_layers(hf["mlp_layer_types"], num_layers)
        _set(result, "num_hash_layers", count, "mlp_layer_types")
    nested = hf.get("rope_parameters") or {}
    if ROPE_SETS.keys() & nested.keys():
        del result["rope_parameters"]
        for name, key in ROPE_SETS.items():
            _read_rope_set(result, name, nested.get(name) or {}, key)
    if hf.get("partial_rotary_factor") is not None:
        _set_rope_head_dim(result, hf, "partial_rotary_factor")
    moved = (hf.get("quantization_config") or {}).get("expert_dtype")
    if moved is not None:
        _set(result, "expert_dtype", moved, "quantization_config.expert_dtype")
    return result


def _set(result: dict[str, Any], key: str, value: Any, newer: str) -> None:
    """Sets a released key, unless it is there with the same value."""
    old = result.get(key)
    if old is not None and old != value:
        raise ConfigError(f"config.json: {newer} says {key}={value!r}, which is there as {old!r}")
    result[key] = value


def _ratios(types: Any, num_layers: int) -> list[int]:
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or not LAYER_TYPES.keys() >= {*types}
    ):
        raise ConfigError(
            f"config.json: layer_types={types!r}; one of {', '.join(LAYER_TYPES)} for each of the "
            f"{num_layers} layers is needed"
        )
    return [LAYER_TYPES[name] for name in types]


def _count_hash_layers(types: Any, num_layers: int) -> int:
    count = list(types).count("hash_moe")
    if list(types) != ["hash_moe"] * count + ["moe"] * (num_layers - count):
        raise ConfigError(
            f"config.json: mlp_layer_types={types!r} is not supported; 'hash_moe' for the first "
            f"layers and 'moe' for the rest of the {num_layers} is"
        )
    return count


def _read_rope_set(
    result: dict[str, Any], name: str, values: Mapping[str, Any], theta_key: str
) -> None:
    values, newer = dict(values), f"rope_parameters.{name}"
    if "rope_theta" in values:
        _set(result, theta_key, values.pop("rope_theta"), newer)
    if values.pop("attention_factor", None) not in (None, 1):
        raise ConfigError(f"config.json: {newer}.attention_factor is not supported; 1.0 is")
    if "partial_rotary_factor" in values:
        _set_rope_head_dim(result, values, f"{newer}.partial_rotary_factor")
        del values["partial_rotary_factor"]
    if name == "compress":
        _set(result, "rope_scaling", values, newer)
    elif values.pop("rope_type", "default") != "default" or values:
        raise ConfigError(f"config.json: {newer} is not supported; rope_type 'default' is")


def _set_rope_head_dim(result: dict[str, Any], values: Mapping[str, Any], newer: str) -> None:
    factor = read_number(values, "partial_rotary_factor")
    _set(result, "qk_rope_head_dim", int(read_integer(result, "head_dim") * factor), newer)
