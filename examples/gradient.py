"""A loss through `target_logits`, differentiated with respect to every weight.

python examples/gradient.py CHECKPOINT
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx

import jaxspec


def loss(model: jaxspec.SpeculativeModel, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of tokens `[b, t]`, each predicted from those before it."""
    scores = jax.nn.log_softmax(jaxspec.target_logits(model, tokens)[:, :-1])
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=2).mean()


def main(checkpoint: str) -> None:
    model = jaxspec.load(checkpoint, draft=None, dtype="float32")
    tokens = jnp.arange(2, 26, dtype=jnp.int32).reshape(2, 12)
    value, gradient = nnx.jit(nnx.value_and_grad(loss))(model, tokens)
    print(f"loss {float(value):.4f}")
    for keys, leaf in nnx.to_flat_state(gradient):
        name, norm = "/".join(map(str, keys)), jnp.linalg.norm(leaf.get_value().astype(jnp.float32))
        if keys[-2] in ("embed_tokens", "o_proj", "lm_head"):
            print(f"gradient norm {float(norm):.2e}  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
