"""The command `jaxspec-convert`."""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from convert.converter import convert
from convert.export import export
from convert.inspection import inspect
from convert.quiet import quiet_libraries
from convert.verify import verify, verify_stored
from jaxspec.errors import JaxspecError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 done, 1 refused or failed with one line on stderr, 2 wrong usage."""
    arguments = parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # conversion is the host's work
    quiet_libraries()
    try:
        print(arguments.run(arguments))
    except (JaxspecError, OSError) as error:
        print(f"jaxspec-convert: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        remedy = "; --resume continues" if hasattr(arguments, "resume") else ""
        print(f"jaxspec-convert: interrupted{remedy}", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="jaxspec-convert",
        description="Convert Hugging Face checkpoints to Orbax and back, byte for byte.",
    )
    commands = result.add_subparsers(required=True, metavar="COMMAND")
    _add_convert(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_export(commands)
    return result


def _add_convert(commands: Any) -> None:
    add = commands.add_parser("convert", help="write the checkpoint DST from the folder SRC")
    add.add_argument("source", metavar="SRC", help="a folder, or a Hub repository (extra `hub`)")
    add.add_argument("destination", metavar="DST", type=pathlib.Path)
    add.add_argument(
        "--weights",
        choices=("keep", "bf16"),
        default="keep",
        help="keep FP8 and FP4 as they are (default), or dequantize them to BF16",
    )
    add.add_argument(
        "--draft",
        choices=("auto", "none", "nextn", "mtp"),
        default="auto",
        help="the draft to take along; default: the one that the config announces",
    )
    add.add_argument("--resume", action="store_true", help="continue a conversion that was stopped")
    add.set_defaults(
        run=lambda arguments: convert(
            arguments.source,
            arguments.destination,
            weights=arguments.weights,
            draft=arguments.draft,
            resume=arguments.resume,
        )
    )


def _add_inspect(commands: Any) -> None:
    add = commands.add_parser("inspect", help="say what SRC holds, what is missing or unknown")
    add.add_argument("source", metavar="SRC", help="a folder, a Hub repository, or a checkpoint")
    add.add_argument("--json", action="store_true")
    add.set_defaults(run=lambda arguments: inspect(arguments.source, as_json=arguments.json))


def _add_verify(commands: Any) -> None:
    add = commands.add_parser(
        "verify", help="compare every tensor of SRC and DST, or DST with its own checksums"
    )
    add.add_argument("source", metavar="SRC", nargs="?", help="a folder, or a Hub repository")
    add.add_argument("checkpoint", metavar="DST", type=pathlib.Path)
    add.set_defaults(
        run=lambda arguments: (
            verify(arguments.source, arguments.checkpoint)
            if arguments.source
            else verify_stored(arguments.checkpoint)
        )
    )


def _add_export(commands: Any) -> None:
    add = commands.add_parser("export", help="write the folder OUT that DST was converted from")
    add.add_argument("checkpoint", metavar="DST", type=pathlib.Path)
    add.add_argument("output", metavar="OUT", type=pathlib.Path)
    add.set_defaults(run=lambda arguments: export(arguments.checkpoint, arguments.output))
