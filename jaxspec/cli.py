"""The command `jaxspec-generate`: text in, text out, and how many drafted tokens were accepted."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import jaxspec
from jaxspec.checkpoint import read_metadata
from jaxspec.errors import JaxspecError, MeshError
from jaxspec.text import Tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 done, 1 refused or failed with one line on stderr, 2 wrong usage."""
    arguments = parser().parse_args(argv)
    try:
        run(arguments)
    except (JaxspecError, OSError) as error:
        print(f"jaxspec-generate: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="jaxspec-generate",
        description="Generate text from a converted checkpoint, with the model's own draft.",
    )
    add = result.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DST", help="what jaxspec-convert wrote")
    add(
        "--prompt",
        dest="prompts",
        action="append",
        required=True,
        metavar="TEXT",
        help="text to continue; may be given several times, the prompts are one batch",
    )
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    add(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help="tokens drafted a step; 0 is plain decoding",
    )
    add("--draft", choices=("auto", "nextn", "mtp", "none"), default="auto", help="default: auto")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the checkpoint's")
    add("--mesh", type=mesh_shape, metavar="DATA,MODEL", help="devices for rows and for weights")
    add("--page-size", type=int, default=64, metavar="N", help="tokens a cache page; default: 64")
    return result


def mesh_shape(text: str) -> tuple[int, int]:
    """Reads `DATA,MODEL`, two positive integers."""
    sizes = text.split(",")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not two positive integers, as in 1,8")
    return int(sizes[0]), int(sizes[1])


def run(arguments: argparse.Namespace) -> None:
    """Loads, generates and prints: text to stdout, what was accepted to stderr."""
    read_metadata(
        arguments.checkpoint
    )  # what is no checkpoint is refused as such, tokenizer or not
    tokenizer = Tokenizer.from_checkpoint(arguments.checkpoint)
    model = jaxspec.load(
        arguments.checkpoint,
        mesh=make_mesh(arguments.mesh),
        draft=None if arguments.draft == "none" else arguments.draft,
        dtype=arguments.dtype,
    )
    result = jaxspec.generate(
        model,
        [tokenizer.encode(prompt) for prompt in arguments.prompts],
        max_new_tokens=arguments.max_new_tokens,
        num_draft_tokens=arguments.num_draft_tokens,
        cache=jaxspec.CacheOptions(page_size=arguments.page_size),
    )
    tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
    for row, prompt in enumerate(arguments.prompts):
        print(prompt + tokenizer.decode(tokens[row, : lengths[row]].tolist()), flush=True)
        print(f"  [{acceptance(result.stats, row, int(lengths[row]))}]", file=sys.stderr)


def make_mesh(shape: tuple[int, int] | None) -> jax.sharding.Mesh | None:
    if shape is None:
        return None
    needed, present = shape[0] * shape[1], jax.device_count()
    if needed > present:
        raise MeshError(f"mesh: {shape[0]},{shape[1]} needs {needed} devices; {present} present")
    return jax.make_mesh(shape, ("data", "model"), devices=jax.devices()[:needed])


def acceptance(stats: jaxspec.SpeculationStats, row: int, length: int) -> str:
    """One line on how a row was decoded."""
    steps, proposed = int(stats.target_steps[row]), int(stats.proposed[row])
    line = f"{length} tokens in {steps} target steps"
    if not proposed:
        return f"{line}, nothing drafted"
    accepted = int(stats.accepted[row])
    return f"{line}, {accepted} of {proposed} drafted tokens accepted ({accepted / proposed:.0%})"


if __name__ == "__main__":
    sys.exit(main())
