"""`config.json` of a published model, read into one frozen, validated object.

`read_config` and what it calls are the only places that know upstream's key names. They refuse what
cannot be honoured, by key name, and list the keys they do not know.
"""

from collections.abc import Mapping
from typing import Any

from jaxspec.config.base import ModelConfig, Quantization, Yarn
from jaxspec.config.deepseek_v3 import DeepseekV3Config
from jaxspec.config.deepseek_v4 import DeepseekV4Config
from jaxspec.errors import ConfigError

__all__ = [
    "DeepseekV3Config",
    "DeepseekV4Config",
    "ModelConfig",
    "Quantization",
    "Yarn",
    "read_config",
]

# By `model_type`: the reader, and the architecture that the config must name if it names any.
FAMILIES = {
    "deepseek_v3": (DeepseekV3Config, "DeepseekV3ForCausalLM"),
    "kimi_k2": (DeepseekV3Config, "DeepseekV3ForCausalLM"),
    "deepseek_v4": (DeepseekV4Config, "DeepseekV4ForCausalLM"),
}


def read_config(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Reads the contents of `config.json` and, where there is one, `generation_config.json`.

    Raises:
        ConfigError: another model, or a key that is missing, malformed, or has a value that cannot
            be honoured; names the key.
    """
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type={model_type!r} is not supported; "
            f"one of {', '.join(FAMILIES)} is"
        )
    family, architecture = FAMILIES[model_type]
    architectures = hf.get("architectures") or [architecture]
    if not isinstance(architectures, list) or architecture not in architectures:
        raise ConfigError(
            f"config.json: architectures={architectures!r} is not supported; {architecture} is"
        )
    return family.from_hf(hf, generation)
