"""Projections. A weight is `[out, in]`, an array or a `QuantizedTensor`; nobody else asks which."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxspec.config import ModelConfig
from jaxspec.execution import Execution
from pallas_kernels.block_matmul import block_matmul
from pallas_kernels.quantized import QuantizedTensor, dequantize


def matrix(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    rngs: nnx.Rngs,
    *,
    quantizable: bool = True,
) -> nnx.Param:
    """A random matrix `[..., out, in]` of variance 1 / in; `quantizable` if FP8 may store it."""
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-1] ** -0.5
    return nnx.Param(values.astype(jnp.bfloat16), axes=axes, quantizable=quantizable)


class Linear(nnx.Module):
    """y = x W^T without a bias.

    Args:
        axes: logical axes of the weight's two dimensions, for sharding.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        axes: tuple[str | None, str | None],
        *,
        config: ModelConfig,
        execution: Execution,
        rngs: nnx.Rngs,
    ):
        self.config, self.execution = config, execution
        self.weight = matrix((out_features, in_features), axes, rngs)

    def __call__(self, x: Float[Array, "*b i"], *, out_dtype=None) -> Float[Array, "*b o"]:
        """The product in `out_dtype` (x's), accumulated in float32."""
        y = block_matmul(
            x.reshape(-1, x.shape[-1]),
            self.weight.get_value(),
            out_dtype=out_dtype,
            quantize=self.execution.quantize_activations,
            scale_format=self.config.activation_scale_format,
            implementation=self.execution.kernels,
        )
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def dequantized(self) -> Float[Array, "o i"]:
        """The weight in the compute dtype."""
        w, dtype = self.weight.get_value(), self.execution.dtype
        return dequantize(w, dtype) if isinstance(w, QuantizedTensor) else w.astype(dtype)
