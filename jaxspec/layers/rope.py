"""Rotary position embedding, interleaved, with YaRN's stretched frequencies."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.config import DeepseekV3Config, Yarn


def yarn_frequencies(theta: float, width: int, yarn: Yarn | None) -> np.ndarray:
    """Angle per position of each of the `width / 2` pairs, float64 (arXiv:2309.00071, 3.2).

    Pairs that turn more than `beta_fast` times within the original context keep their frequency,
    those that turn less than `beta_slow` times are slowed by `factor`, a ramp lies between.
    """
    pair = np.arange(width // 2)
    frequencies = theta ** (-2.0 * pair / width)
    if yarn is None:
        return frequencies

    def pair_turning(times: float) -> float:
        turns = yarn.original_max_position_embeddings / (times * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), width - 1)
    ramp = np.clip((pair - low) / (high - low if high > low else 0.001), 0, 1)
    return frequencies * (1 - ramp) + frequencies / yarn.factor * ramp


def rope_amplitude(yarn: Yarn | None) -> float:
    """Factor of cos and sin: the ratio of YaRN's two amplitudes, 1 in every released model."""
    return (
        1.0 if yarn is None else yarn.amplitude(yarn.mscale) / yarn.amplitude(yarn.mscale_all_dim)
    )


def softmax_scale(config: DeepseekV3Config) -> float:
    """(n + r)^(-1/2) times the square of YaRN's amplitude (DeepSeek-V3's `model.py`)."""
    amplitude = config.rope.amplitude(config.rope.mscale_all_dim) if config.rope else 1.0
    return (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * amplitude**2


class Rope(NamedTuple):
    """One rotary embedding: its base and its stretching."""

    theta: float
    yarn: Yarn | None
    amplitude: float = 1.0


def rotate(
    x: Float[Array, "b t h r"], positions: Int[Array, "b t"], rope: Rope, *, inverse: bool = False
) -> Float[Array, "b t h r"]:
    """Turns each pair (x[2i], x[2i + 1]) by its position's angle, or back, in float32."""
    frequencies = yarn_frequencies(rope.theta, x.shape[-1], rope.yarn)
    angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(
        frequencies.reshape(1, 1, 1, -1), jnp.float32
    )
    cos, sin = jnp.cos(angles) * rope.amplitude, jnp.sin(angles) * rope.amplitude
    sin = -sin if inverse else sin
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack((even * cos - odd * sin, even * sin + odd * cos), axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def rotate_last(
    x: Float[Array, "b t h x"],
    positions: Int[Array, "b t"],
    width: int,
    rope: Rope,
    *,
    inverse: bool = False,
) -> Float[Array, "b t h x"]:
    """`rotate` on the last `width` columns; the others stay."""
    still, turning = jnp.split(x, [x.shape[-1] - width], axis=-1)
    turned = rotate(turning, positions, rope, inverse=inverse)
    return jnp.concatenate((still, turned), axis=-1)
