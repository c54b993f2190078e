"""How a token is chosen from its law. Greedy: the most probable one."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The law that tokens are drawn from, after its filters; `Sampling()` is greedy.

    Attributes:
        temperature: 0 is greedy, the only one so far.

    Raises:
        NotImplementedError: a temperature above 0.
    """

    temperature: float = 0.0

    def __post_init__(self):
        if self.temperature != 0:
            raise NotImplementedError(
                f"Sampling: temperature={self.temperature}; only greedy decoding (0) is available"
            )

    def pick(self, logits: Float[Array, "*b w"], key: jax.Array | None) -> Int[Array, "*b"]:
        """The most probable token; ties go to the lowest id."""
        del key
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
