"""Manifold-constrained hyper-connections: several residual streams, mixed around each sublayer.

Formulas of DeepSeek-V4's `model.py`: `pre` gathers the streams into a sublayer's input, `post` and
a doubly stochastic `comb` spread its output back. Everything is float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.config import DeepseekV4Config
from pallas_kernels._products import einsum


class Coefficients(NamedTuple):
    """How the streams of a token are mixed around one sublayer.

    Attributes:
        pre: float32 `[..., j]`; weight of each stream in the sublayer's input.
        post: float32 `[..., j]`; weight of the sublayer's output in each stream.
        comb: float32 `[..., j, j]`; weight of stream i (row) in stream j (column).
    """

    pre: jax.Array
    post: jax.Array
    comb: jax.Array


class HyperConnection(nnx.Module):
    """The mixes around one sublayer, computed from the streams themselves."""

    def __init__(self, *, config: DeepseekV4Config, rngs: nnx.Rngs):
        j = config.hc_mult
        self.config = config
        self.fn, self.base, self.scale = mix_parameters((2 + j) * j, 3, config, rngs)

    def coefficients(self, streams: Float[Array, "*b j d"]) -> Coefficients:
        """pre, post and comb of each token."""
        mixes = project(streams, self.fn.get_value(), self.config.rms_norm_eps)
        return split_mixes(mixes, self.base.get_value(), self.scale.get_value(), self.config)

    @staticmethod
    def gather(streams: Float[Array, "*b j d"], mix: Coefficients) -> Float[Array, "*b d"]:
        """The sublayer's input: sum over i of pre[i] h[i]."""
        return (streams.astype(jnp.float32) * mix.pre[..., None]).sum(axis=-2).astype(streams.dtype)

    @staticmethod
    def spread(
        y: Float[Array, "*b d"], streams: Float[Array, "*b j d"], mix: Coefficients
    ) -> Float[Array, "*b j d"]:
        """The streams behind the sublayer: h'[j] = post[j] y + sum over i of comb[i, j] h[i]."""
        kept = einsum("...ij,...id->...jd", mix.comb, streams.astype(jnp.float32))
        added = mix.post[..., None] * y.astype(jnp.float32)[..., None, :]
        return (kept + added).astype(streams.dtype)


class HyperHead(nnx.Module):
    """The last mix, which collapses the streams into one state."""

    def __init__(self, *, config: DeepseekV4Config, rngs: nnx.Rngs):
        self.config = config
        self.fn, self.base, self.scale = mix_parameters(config.hc_mult, 1, config, rngs)

    def __call__(self, streams: Float[Array, "*b j d"]) -> Float[Array, "*b d"]:
        """sum over i of (sigmoid(m[i] scale + base[i]) + hc_eps) h[i]."""
        mixes = project(streams, self.fn.get_value(), self.config.rms_norm_eps)
        offset = over(self.base.get_value(), mixes)
        pre = jax.nn.sigmoid(mixes * self.scale.get_value()[0] + offset) + self.config.hc_eps
        return (streams.astype(jnp.float32) * pre[..., None]).sum(axis=-2).astype(streams.dtype)


def mix_parameters(
    num_outputs: int, num_scales: int, config: DeepseekV4Config, rngs: nnx.Rngs
) -> tuple[nnx.Param, nnx.Param, nnx.Param]:
    """Projection, offset, and a scale for each kind of output; float32 in every checkpoint."""
    width = config.hc_mult * config.hidden_size
    fn = jax.random.normal(rngs.params(), (num_outputs, width), jnp.float32) * width**-0.5
    return (
        nnx.Param(fn, axes=(None, None)),
        nnx.Param(jnp.zeros(num_outputs, jnp.float32), axes=(None,)),
        nnx.Param(jnp.ones(num_scales, jnp.float32), axes=(None,)),
    )


def project(
    streams: Float[Array, "*b j d"], fn: Float[Array, "m x"], eps: float
) -> Float[Array, "*b m"]:
    """m = fn h / sqrt(mean(h^2) + eps), with all streams of a token as one vector h."""
    flat = streams.reshape(*streams.shape[:-2], -1).astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.square(flat).mean(axis=-1, keepdims=True) + eps)
    mixes = einsum("...x,mx->...m", flat, fn)
    return mixes * norm


def split_mixes(
    mixes: Float[Array, "*b m"],
    base: Float[Array, " m"],
    scale: Float[Array, "3"],
    config: DeepseekV4Config,
) -> Coefficients:
    """sigmoid for pre, twice sigmoid for post, Sinkhorn for comb."""
    j = config.hc_mult
    scales = jnp.repeat(scale, jnp.array([j, j, j * j]), total_repeat_length=mixes.shape[-1])
    mixes = mixes * over(scales, mixes) + over(base, mixes)
    pre = jax.nn.sigmoid(mixes[..., :j]) + config.hc_eps
    post = 2 * jax.nn.sigmoid(mixes[..., j : 2 * j])
    comb = mixes[..., 2 * j :].reshape(*mixes.shape[:-1], j, j)
    return Coefficients(pre, post, sinkhorn(comb, config.hc_sinkhorn_iters, config.hc_eps))


def sinkhorn(logits: Float[Array, "*b j j"], num_iterations: int, eps: float):
    """Row softmax + eps and a column normalization, then rows and columns in turn."""

    def normalize(x, axis):
        return x / (x.sum(axis=axis, keepdims=True) + eps)

    x = normalize(jax.nn.softmax(logits, axis=-1) + eps, -2)
    return jax.lax.fori_loop(
        1, num_iterations, lambda _, x: normalize(normalize(x, -1), -2), x, unroll=False
    )


def over(vector: Float[Array, " m"], like: Float[Array, "*b m"]) -> Float[Array, "*b m"]:
    """The vector for every token."""
    return jnp.broadcast_to(vector, like.shape)
