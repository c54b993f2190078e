"""What speculation did, counted per row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["target_steps", "proposed", "accepted", "accepted_at", "verified"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class SpeculationStats:
    """Counters of a decoding call. The prefill and the token it gives are in none of them.

    Attributes:
        target_steps: int32 `[b]`; verification passes of the target in which the row took part.
        proposed: int32 `[b]`; drafted tokens that could still be committed: not those past the
            row's budget, nor those behind an accepted end token.
        accepted: int32 `[b]`; drafted tokens that were committed.
        accepted_at: int32 `[b, g]`; the same, by place in the draft.
        verified: int32 `[b]`; tokens committed by verification passes.
    """

    target_steps: jax.Array
    proposed: jax.Array
    accepted: jax.Array
    accepted_at: jax.Array
    verified: jax.Array

    @property
    def acceptance_length(self) -> jax.Array:
        """float32 `[b]`; tokens a verification pass commits on average, 0 without a pass."""
        return self.verified / jnp.maximum(self.target_steps, 1)

    @classmethod
    def zeros(cls, num_rows: int, num_draft_tokens: int) -> "SpeculationStats":
        """Nothing counted yet."""
        row = jnp.zeros(num_rows, jnp.int32)
        at = jnp.zeros((num_rows, num_draft_tokens), jnp.int32)
        return cls(target_steps=row, proposed=row, accepted=row, accepted_at=at, verified=row)

    def count(
        self,
        num_accepted: Int[Array, " b"],
        num_new: Int[Array, " b"],
        ended: Bool[Array, " b"],
        remaining: Int[Array, " b"],
        active: Bool[Array, " b"],
    ) -> "SpeculationStats":
        """The counters after a pass.

        Args:
            num_accepted: drafted tokens that the target agreed to, before budget and end tokens.
            num_new: tokens committed.
            ended: whether the last of them is an end token.
            remaining: tokens the row could still commit before the pass.
            active: rows that took part.
        """
        num_draft_tokens = self.accepted_at.shape[1]
        accepted = jnp.minimum(num_accepted, num_new)
        proposed = jnp.minimum(num_draft_tokens, remaining)
        # Behind an accepted end token nothing could be committed.
        proposed = jnp.where(ended & (num_new <= num_accepted), num_new, proposed)
        places = jnp.arange(num_draft_tokens)[None]
        is_accepted = (places < accepted[:, None]) & active[:, None]

        def of_active(counts: jax.Array) -> jax.Array:
            return jnp.where(active, counts, 0)

        return SpeculationStats(
            target_steps=self.target_steps + active.astype(jnp.int32),
            proposed=self.proposed + of_active(proposed),
            accepted=self.accepted + of_active(accepted),
            accepted_at=self.accepted_at + is_accepted.astype(jnp.int32),
            verified=self.verified + of_active(num_new),
        )
