"""`generate` inside a program of your own: generate, then score what was generated, in one jit.

python examples/nested_jit.py CHECKPOINT
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx

import jaxspec


@nnx.jit
def generate_and_score(
    model: jaxspec.SpeculativeModel, prompts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Continues prompts `[b, t]` of one length; returns tokens and their mean log-probability."""
    result = jaxspec.generate(model, prompts, max_new_tokens=32, eos_token_ids=())
    text = jnp.concatenate([prompts, result.tokens], axis=1)
    logits = jaxspec.target_logits(model, text)[:, prompts.shape[1] - 1 : -1]
    scores = jax.nn.log_softmax(logits)
    scores = jnp.take_along_axis(scores, result.tokens[..., None], axis=2)[..., 0]
    return result.tokens, scores.mean(axis=1)


def main(checkpoint: str) -> None:
    model = jaxspec.load(checkpoint)
    prompts = jnp.array([[0, 40, 50, 60], [0, 70, 80, 90]], jnp.int32)
    tokens, scores = generate_and_score(model, prompts)
    for row, score in zip(tokens, scores, strict=True):
        print(f"mean log-probability {float(score):.3f}: {row.tolist()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
