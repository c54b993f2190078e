"""One of two processes that load a checkpoint on all their devices together and save it.

python -m tests.distributed_worker COORDINATOR PROCESS_ID SOURCE DESTINATION [--die-saving]
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import jax

import jaxspec
from jaxspec import loading


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator")
    parser.add_argument("process_id", type=int)
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--die-saving", action="store_true")
    args = parser.parse_args()

    jax.distributed.initialize(args.coordinator, num_processes=2, process_id=args.process_id)
    # Both processes hold a part of every head's matrices and of every row.
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    model = jaxspec.load(args.source, mesh=mesh)
    if args.die_saving:
        die_in_the_middle_of_a_save()
    try:
        jaxspec.save(args.destination, model)
    except jaxspec.CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def die_in_the_middle_of_a_save() -> None:
    """Makes Orbax's save write everything that this process holds, and then not finish."""
    write = loading.ocp.save_async

    def write_and_die(*args, **options):
        write(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    loading.ocp.save = write_and_die


if __name__ == "__main__":
    sys.exit(main())
