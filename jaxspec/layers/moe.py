"""Feed-forward parts of DeepSeek-V3 (arXiv:2412.19437, 2.1.2): gated MLP, mixture of experts."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import DeepseekV3Config
from jaxspec.execution import Execution
from jaxspec.layers.linear import Linear, matrix
from jaxspec.sharding import weight_spec
from pallas_kernels._products import einsum
from pallas_kernels.grouped_matmul import expert_mlp


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) of hidden width f."""

    def __init__(self, f: int, *, config: DeepseekV3Config, execution: Execution, rngs: nnx.Rngs):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.gate_proj = Linear(f, config.hidden_size, ("width", None), **shared)
        self.up_proj = Linear(f, config.hidden_size, ("width", None), **shared)
        self.down_proj = Linear(config.hidden_size, f, (None, "width"), **shared)

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        hidden = jax.nn.silu(self.gate_proj(x).astype(jnp.float32))
        return self.down_proj((hidden * self.up_proj(x).astype(jnp.float32)).astype(x.dtype))


class Router(nnx.Module):
    """Sigmoid scores, group-limited top-k, and a bias that selects but does not weigh."""

    def __init__(self, *, config: DeepseekV3Config, execution: Execution, rngs: nnx.Rngs):
        self.config, self.execution = config, execution
        shape = (config.n_routed_experts, config.hidden_size)
        self.weight = matrix(shape, (None, None), rngs, quantizable=False)
        bias = jnp.zeros(config.n_routed_experts, jnp.float32)
        self.e_score_correction_bias = nnx.Param(bias, axes=(None,))

    def __call__(self, x: Float[Array, "m d"]) -> tuple[Int[Array, "m k"], Float[Array, "m k"]]:
        """Experts of each row, best first, and their weights, which sum to `routed_scaling_factor`.

        All in float32. A group's score is the sum of its two best biased scores; the experts
        outside the `topk_group` best groups are excluded. Ties go to the lowest index.
        """

        def route_local(x, weight, bias):
            logits = einsum("md,ed->me", x.astype(jnp.float32), weight.astype(jnp.float32))
            return route(logits, bias.astype(jnp.float32), self.config)

        rows, whole = P("data"), P()
        route_rows = self.execution.per_device(route_local, (rows, whole, whole), (rows, rows))
        return route_rows(x, self.weight.get_value(), self.e_score_correction_bias.get_value())


def route(
    logits: Float[Array, "m e"], bias: Float[Array, " e"], config: DeepseekV3Config
) -> tuple[Int[Array, "m k"], Float[Array, "m k"]]:
    """The choice of `Router`, given its logits."""
    scores = jax.nn.sigmoid(logits)
    choice = scores + bias[None]
    groups = choice.reshape(choice.shape[0], config.n_group, -1)
    best_two, _ = jax.lax.top_k(groups, min(2, groups.shape[-1]))
    _, kept_groups = jax.lax.top_k(best_two.sum(axis=-1), config.topk_group)
    is_kept = jax.nn.one_hot(kept_groups, config.n_group, dtype=jnp.bool_).any(axis=1)
    choice = jnp.where(is_kept[..., None], groups, -jnp.inf).reshape(choice.shape)
    _, expert_ids = jax.lax.top_k(choice, config.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, expert_ids, axis=1)
    weights *= config.routed_scaling_factor / weights.sum(axis=-1, keepdims=True)
    return expert_ids, weights


class Experts(nnx.Module):
    """The routed experts' matrices, stacked; spread over the devices by whole experts."""

    def __init__(self, *, config: DeepseekV3Config, execution: Execution, rngs: nnx.Rngs):
        self.config, self.execution = config, execution
        e, f, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_proj = ExpertWeight((e, f, d), rngs)
        self.up_proj = ExpertWeight((e, f, d), rngs)
        self.down_proj = ExpertWeight((e, d, f), rngs)

    def __call__(
        self,
        x: Float[Array, "m d"],
        expert_ids: Int[Array, "m k"],
        expert_weights: Float[Array, "m k"],
    ) -> Float[Array, "m d"]:
        """The weighted sum of each row's experts; an id of -1 leaves the assignment out."""
        run = functools.partial(
            expert_mlp,
            quantize=self.execution.quantize_activations,
            scale_format=self.config.activation_scale_format,
            implementation=self.execution.kernels,
        )
        weights = (self.gate_proj, self.up_proj, self.down_proj)
        return run_experts(run, self.execution, x, expert_ids, expert_weights, *weights)


def run_experts(
    run: Callable[..., jax.Array],
    execution: Execution,
    x: Float[Array, "m d"],
    expert_ids: Int[Array, "m k"],
    expert_weights: Float[Array, "m k"],
    *matrices: "ExpertWeight",
) -> Float[Array, "m d"]:
    """`run` on each device with the experts that it holds; the parts are summed."""
    weights = [matrix.weight.get_value() for matrix in matrices]
    if execution.mesh is None:
        return run(x, expert_ids, expert_weights, *weights)

    def run_local(x, expert_ids, expert_weights, *weights):
        held = weights[0].shape[0]
        local = expert_ids - jax.lax.axis_index("model") * held
        dispatched = (expert_ids >= 0) & (local >= 0) & (local < held)
        y = run(x, jnp.where(dispatched, local, -1), expert_weights, *weights)
        return jax.lax.psum(y, "model")

    rows = P("data")
    specs = (rows, rows, rows, *(weight_spec(w, "experts") for w in weights))
    return execution.per_device(run_local, specs, rows)(x, expert_ids, expert_weights, *weights)


class ExpertWeight(nnx.Module):
    """One matrix of every expert, `[e, out, in]`."""

    def __init__(self, shape: tuple[int, int, int], rngs: nnx.Rngs):
        self.weight = matrix(shape, ("experts", None, None), rngs)


class MoE(nnx.Module):
    """Routed experts plus shared experts; rows that are not valid reach no routed expert."""

    def __init__(self, *, config: DeepseekV3Config, execution: Execution, rngs: nnx.Rngs):
        shared = {"config": config, "execution": execution, "rngs": rngs}
        self.gate = Router(**shared)
        self.experts = Experts(**shared)
        self.shared_experts = MLP(config.n_shared_experts * config.moe_intermediate_size, **shared)

    def __call__(
        self, x: Float[Array, "b t d"], valid: Bool[Array, "b t"]
    ) -> Float[Array, "b t d"]:
        flat = x.reshape(-1, x.shape[-1])
        expert_ids, expert_weights = self.gate(flat)
        expert_ids = jnp.where(valid.reshape(-1, 1), expert_ids, -1)
        routed = self.experts(flat, expert_ids, expert_weights)
        return routed.reshape(x.shape) + self.shared_experts(x)
