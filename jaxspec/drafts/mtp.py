"""DeepSeek-V4's MTP draft: V4 blocks over the target's streams, used in turn.

Row t joins the target's streams of position t with the embedding of token t + 1 and gives the law of
token t + 2. To draft more than one token it feeds back its own streams.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.compressed import CompressedCache
from jaxspec.config_v4 import DeepseekV4Config
from jaxspec.execution import Execution
from jaxspec.layers.hyper_connections import HyperHead
from jaxspec.layers.linear import Linear
from jaxspec.layers.norms import RMSNorm
from jaxspec.models.deepseek_v4 import Block


class MTPLayer(nnx.Module):
    """enorm, hnorm, e_proj + h_proj, one block, and a head of its own down to the norm."""

    def __init__(
        self, ratio: int, *, config: DeepseekV4Config, execution: Execution, rngs: nnx.Rngs
    ):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        d = config.hidden_size
        self.enorm = RMSNorm(d, eps=config.rms_norm_eps)
        self.hnorm = RMSNorm(d, eps=config.rms_norm_eps)
        self.e_proj = Linear(d, d, (None, None), **shared)
        self.h_proj = Linear(d, d, (None, None), **shared)
        self.block = Block(ratio, is_hash=False, **shared)
        self.hc_head = HyperHead(config=config, rngs=rngs)
        self.norm = RMSNorm(d, eps=config.rms_norm_eps)

    def join(self, embedding: Float[Array, "b t d"], streams: Float[Array, "b t j d"]):
        """What the block runs on: x[j] = e_proj(enorm(embedding)) + h_proj(hnorm(h[j]))."""
        return self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(embedding))[:, :, None]

    def state(self, streams: Float[Array, "*b j d"]) -> Float[Array, "*b d"]:
        """The state in front of the target's head."""
        return self.norm(self.hc_head(streams))
