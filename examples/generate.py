"""Speculative generation in Python, for a batch of prompts.

    python examples/generate.py CHECKPOINT PROMPT [PROMPT ...]

CHECKPOINT is what `jaxspec-convert` wrote; `make demo` leaves one in build/demo/jaxspec.
"""

import sys

import numpy as np
import tokenizers

import jaxspec


def main(checkpoint: str, *prompts: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(f"{checkpoint}/hf/tokenizer.json")
    model = jaxspec.load(checkpoint)
    result = jaxspec.generate(
        model,
        [tokenizer.encode(prompt).ids for prompt in prompts],
        max_new_tokens=48,
        num_draft_tokens=3,
    )
    tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
    for row, prompt in enumerate(prompts):
        print(prompt + tokenizer.decode(tokens[row, : lengths[row]].tolist()))
        print(f"  tokens per target step: {float(result.stats.acceptance_length[row]):.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
