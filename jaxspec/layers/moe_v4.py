"""Feed-forward part of DeepSeek-V4: clamped experts, chosen by score or by token id."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import DeepseekV4Config
from jaxspec.execution import Execution
from jaxspec.layers.linear import Linear, matrix
from jaxspec.layers.moe import ExpertWeight, run_experts
from pallas_kernels._products import einsum
from pallas_kernels.grouped_matmul import expert_mlp
from pallas_kernels.grouped_matmul.reference import swiglu


class ClampedMLP(nnx.Module):
    """w2(silu(min(w1 x, limit)) * clip(w3 x, -limit, limit)) of hidden width f."""

    def __init__(self, f: int, *, config: DeepseekV4Config, execution: Execution, rngs: nnx.Rngs):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.limit = config.swiglu_limit
        self.w1 = Linear(f, config.hidden_size, ("width", None), **shared)
        self.w2 = Linear(config.hidden_size, f, (None, "width"), **shared)
        self.w3 = Linear(f, config.hidden_size, ("width", None), **shared)

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).astype(x.dtype))


class Gate(nnx.Module):
    """sqrt(softplus(x)) scores. Experts are the best by biased score, or `tid2eid` of the token."""

    def __init__(
        self, *, is_hash: bool, config: DeepseekV4Config, execution: Execution, rngs: nnx.Rngs
    ):
        self.config, self.execution = config, execution
        e, k = config.n_routed_experts, config.num_experts_per_tok
        self.weight = matrix((e, config.hidden_size), (None, None), rngs, quantizable=False)
        table = jnp.zeros((config.vocab_size, k), jnp.int32)
        self.tid2eid = nnx.Param(table, axes=(None, None)) if is_hash else None
        bias = jnp.zeros(e, jnp.float32)
        self.bias = None if is_hash else nnx.Param(bias, axes=(None,))

    def __call__(
        self, x: Float[Array, "m d"], tokens: Int[Array, " m"]
    ) -> tuple[Int[Array, "m k"], Float[Array, "m k"]]:
        """Experts of each row and their weights, which sum to `routed_scaling_factor`; float32."""
        is_hash = self.bias is None
        selector = self.tid2eid or self.bias
        assert selector is not None  # A gate has one or the other.

        def route_local(x, tokens, weight, selector):
            logits = einsum("md,ed->me", x.astype(jnp.float32), weight.astype(jnp.float32))
            scores = jnp.sqrt(jax.nn.softplus(logits))
            if is_hash:
                ids = selector[tokens].astype(jnp.int32)
            else:
                _, ids = jax.lax.top_k(scores + selector[None], self.config.num_experts_per_tok)
            weights = jnp.take_along_axis(scores, ids, axis=1)
            total = weights.sum(axis=-1, keepdims=True)
            return ids, weights * self.config.routed_scaling_factor / total

        rows, whole = P("data"), P()
        route = self.execution.per_device(route_local, (rows, rows, whole, whole), (rows, rows))
        return route(x, tokens, self.weight.get_value(), selector.get_value())


class ClampedExperts(nnx.Module):
    """The routed experts' matrices, stacked; spread over the devices by whole experts."""

    def __init__(self, *, config: DeepseekV4Config, execution: Execution, rngs: nnx.Rngs):
        self.config, self.execution = config, execution
        e, f, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.w1 = ExpertWeight((e, f, d), rngs)
        self.w2 = ExpertWeight((e, d, f), rngs)
        self.w3 = ExpertWeight((e, f, d), rngs)

    def __call__(
        self,
        x: Float[Array, "m d"],
        expert_ids: Int[Array, "m k"],
        expert_weights: Float[Array, "m k"],
    ) -> Float[Array, "m d"]:
        """The sum of each row's experts, weighted before w2; an id of -1 leaves one out."""
        run = functools.partial(
            expert_mlp,
            limit=self.config.swiglu_limit,
            weigh="hidden",
            quantize=self.execution.quantize_activations,
            scale_format=self.config.activation_scale_format,
            implementation=self.execution.kernels,
        )
        weights = (self.w1, self.w3, self.w2)
        return run_experts(run, self.execution, x, expert_ids, expert_weights, *weights)


class ClampedMoE(nnx.Module):
    """Routed experts plus shared experts; rows that are not valid reach no routed expert."""

    def __init__(
        self, *, is_hash: bool, config: DeepseekV4Config, execution: Execution, rngs: nnx.Rngs
    ):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.gate = Gate(is_hash=is_hash, **shared)
        self.experts = ClampedExperts(**shared)
        f = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = ClampedMLP(f, **shared)

    def __call__(
        self, x: Float[Array, "b t d"], tokens: Int[Array, "b t"], valid: Bool[Array, "b t"]
    ) -> Float[Array, "b t d"]:
        flat = x.reshape(-1, x.shape[-1])
        expert_ids, expert_weights = self.gate(flat, tokens.reshape(-1))
        expert_ids = jnp.where(valid.reshape(-1, 1), expert_ids, -1)
        routed = self.experts(flat, expert_ids, expert_weights)
        return routed.reshape(x.shape) + self.shared_experts(x)
