"""How a model is run, as opposed to what it is: dtype, activations, implementation, mesh."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

Kernels = Literal["auto", "reference", "mosaic_gpu"]


@dataclasses.dataclass(frozen=True)
class Execution:
    """Carried by every module, and the same for all of them.

    Attributes:
        dtype: compute dtype of activations. Routing, softmax statistics and logits are float32.
        quantize_activations: whether activations in front of a quantized matrix are quantized too,
            as DeepSeek's FP8 GEMM does; otherwise the matrix is dequantized.
        kernels: implementation of every operation.
        mesh: axes `data` and `model`, or None for one device.
    """

    dtype: jnp.dtype = dataclasses.field(default_factory=lambda: jnp.dtype(jnp.bfloat16))
    quantize_activations: bool = True
    kernels: Kernels = "auto"
    mesh: Mesh | None = None

    @property
    def num_data_shards(self) -> int:
        """Devices that the rows of a batch are spread over."""
        return self.mesh.shape["data"] if self.mesh else 1

    def per_device(self, fn, in_specs, out_specs):
        """`fn` run on each device's shards; `fn` itself where there is no mesh."""
        if self.mesh is None:
            return fn
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
