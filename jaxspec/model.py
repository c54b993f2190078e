"""`SpeculativeModel`: a target, its draft, and what they share; and the list of its parameters."""

import dataclasses
import pathlib
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from jaxspec.checkpoint import Metadata
from jaxspec.config import DeepseekV4Config, ModelConfig
from jaxspec.drafts.draft import Shared
from jaxspec.drafts.mtp import MTP
from jaxspec.drafts.nextn import NextN
from jaxspec.execution import Execution
from jaxspec.models.deepseek_v3 import DeepseekV3
from jaxspec.models.deepseek_v4 import DeepseekV4

DraftKind = Literal["nextn", "mtp"]

# Stored only where they differ from the target's: the draft's own embedding and head.
OWN_EMBEDDING = ("draft/embed_tokens/weight", "draft/embed/weight")
OWN_HEAD = ("draft/shared_head/head/weight", "draft/head/weight")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a model came from. All compare equal, since no compiled program depends on it."""

    metadata: Metadata = dataclasses.field(compare=False)
    path: pathlib.Path = dataclasses.field(compare=False)
    has_hf_files: bool = dataclasses.field(compare=False)


class SpeculativeModel(nnx.Module):
    """What `generate` runs.

    Attributes:
        provenance: set by `load`, for `save`.
        target: the model whose output is produced, a `Target`.
        draft: what proposes tokens, a `Draft`, or None for plain decoding.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        execution: Execution,
        rngs: nnx.Rngs,
        draft: DraftKind | None = "nextn",
        owned: tuple[str, ...] = (),
        zero_first_embedding: bool | None = None,
    ):
        self.config, self.execution, self.draft_kind = config, execution, draft
        self.provenance: Provenance | None = None
        shared = {"config": config, "execution": execution, "rngs": rngs}
        is_v4 = isinstance(config, DeepseekV4Config)
        # Any: the families have members of their own beyond the two protocols.
        self.target: Any = DeepseekV4(**shared) if is_v4 else DeepseekV3(**shared)
        self.draft: Any = make_draft(draft, owned, zero_first_embedding, **shared)

    @property
    def shared(self) -> Shared:
        """What the draft uses of the target."""
        return Shared(*self.target.embedding_and_head)


def make_draft(
    kind: DraftKind | None,
    owned: tuple[str, ...],
    zero_first_embedding: bool | None,
    **shared: Any,
) -> NextN | MTP | None:
    """The draft of that kind. The first embedding is zeroed as told, else as in the kind's seed."""
    if kind is None:
        return None
    draft = NextN if kind == "nextn" else MTP
    return draft(
        owns_embedding=any(name in owned for name in OWN_EMBEDDING),
        owns_head=any(name in owned for name in OWN_HEAD),
        zero_first_embedding=kind == "mtp"
        if zero_first_embedding is None
        else zero_first_embedding,
        **shared,
    )


def announced_draft(config: ModelConfig) -> DraftKind | None:
    """The kind of draft that the config says there is."""
    if not config.num_nextn_predict_layers:
        return None
    return "mtp" if isinstance(config, DeepseekV4Config) else "nextn"


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the tree.

    Attributes:
        shape: of the matrix or vector that it stands for.
        dtype: what a released checkpoint stores where it does not quantize.
        axes: logical axis of each dimension, for sharding.
        quantizable: whether a checkpoint may store it as FP8 values with block scales.
        optional: stored only where the checkpoint's copy differs from the target's.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]
    quantizable: bool
    optional: bool


def abstract_model(
    config: ModelConfig,
    execution: Execution,
    draft: DraftKind | None,
    owned: tuple[str, ...] = (),
    zero_first_embedding: bool | None = None,
) -> SpeculativeModel:
    """The model with shapes in the place of arrays."""
    return nnx.eval_shape(
        lambda: SpeculativeModel(
            config=config,
            execution=execution,
            rngs=nnx.Rngs(0),
            draft=draft,
            owned=owned,
            zero_first_embedding=zero_first_embedding,
        )
    )


def parameter_specs(config: ModelConfig, draft: DraftKind | None) -> dict[str, ParameterSpec]:
    """Every parameter by its path, as `target/layers/3/self_attn/q_b_proj/weight`."""
    model = abstract_model(config, Execution(), draft, owned=OWN_EMBEDDING + OWN_HEAD)
    specs = {}
    for keys, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        path, value = "/".join(map(str, keys)), variable.get_value()
        specs[path] = ParameterSpec(
            shape=value.shape,
            dtype=value.dtype,
            axes=variable.get_metadata("axes"),
            quantizable=variable.get_metadata().get("quantizable", False),
            optional=path in OWN_EMBEDDING + OWN_HEAD,
        )
    return specs
