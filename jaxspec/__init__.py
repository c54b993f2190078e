"""Lossless speculative decoding for DeepSeek models, each with the draft of its own checkpoint."""

from jaxspec.cache.latent import CacheOptions
from jaxspec.decoding.generate import Chunk, Result, generate, stream
from jaxspec.decoding.sampling import Sampling
from jaxspec.decoding.scoring import draft_logits, propose, target_logits
from jaxspec.decoding.stats import SpeculationStats
from jaxspec.decoding.verification import FinishReason
from jaxspec.drafts.draft import Proposal
from jaxspec.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    JaxspecError,
    MeshError,
    RequestError,
)
from jaxspec.loading import load, save
from jaxspec.model import SpeculativeModel

__all__ = [
    "CacheOptions",
    "CapacityError",
    "CheckpointError",
    "Chunk",
    "ConfigError",
    "FinishReason",
    "JaxspecError",
    "MeshError",
    "Proposal",
    "RequestError",
    "Result",
    "Sampling",
    "SpeculationStats",
    "SpeculativeModel",
    "draft_logits",
    "generate",
    "load",
    "propose",
    "save",
    "stream",
    "target_logits",
]
