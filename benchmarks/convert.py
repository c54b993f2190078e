"""How fast and in how much memory a checkpoint is converted, against a plain copy of its files.

    python benchmarks/convert.py [--source SRC] [--gigabytes 3] [--pairs 3]

Each pair is one `dd conv=fsync` of every safetensors file and one `jaxspec-convert convert`, in
turn, each reading the source from disk where the machine lets a page cache be dropped.
"""

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import make_synthetic_checkpoint

# Runs the command and prints the most memory that was resident at once.
COMMAND = """
import sys
from convert.cli import main
code = main(sys.argv[1:])
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1])
sys.exit(code)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", type=pathlib.Path, help="default: a synthetic one is made")
    parser.add_argument("--gigabytes", type=float, default=3.0, help="of the synthetic one")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        "--folder", type=pathlib.Path, help="where to write; default: a temporary one"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = pathlib.Path(name)
        source = arguments.source or folder / "source"
        if not arguments.source:
            make_synthetic_checkpoint.write(source, round(arguments.gigabytes * 1e9), 4)
        compare(source, folder, arguments.pairs)


def compare(source: pathlib.Path, folder: pathlib.Path, num_pairs: int) -> None:
    """Times the pairs and prints a line each, then the median."""
    num_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(f"{num_bytes / 1e9:.2f} GB in {source}")
    ratios, peaks = [], []
    for pair in range(num_pairs):
        copy_seconds = time_copy(source, folder / "copy")
        convert_seconds, peak_kib = time_conversion(source, folder / "converted")
        ratios.append(copy_seconds / convert_seconds)
        peaks.append(peak_kib)
        print(
            f"pair {pair + 1}: dd conv=fsync {num_bytes / copy_seconds / 1e6:.0f} MB/s, "
            f"convert {num_bytes / convert_seconds / 1e6:.0f} MB/s, ratio {ratios[-1]:.2f}, "
            f"VmHWM {peak_kib / 2**20:.2f} GiB"
        )
    print(
        f"median ratio {statistics.median(ratios):.2f} (0.5 is needed), "
        f"largest VmHWM {max(peaks) / 2**20:.2f} GiB (1.5 is allowed for 3 GB)"
    )


def time_copy(source: pathlib.Path, destination: pathlib.Path) -> float:
    """Seconds to copy every safetensors file with dd, each synced to disk."""
    drop_page_cache(source)
    destination.mkdir()
    start = time.perf_counter()
    for path in sorted(source.glob("*.safetensors")):
        subprocess.run(
            ["dd", f"if={path}", f"of={destination / path.name}", "bs=4M", "conv=fsync"],
            check=True,
            capture_output=True,
        )
    seconds = time.perf_counter() - start
    shutil.rmtree(destination)
    return seconds


def time_conversion(source: pathlib.Path, destination: pathlib.Path) -> tuple[float, int]:
    """Seconds of the whole command, start-up included, and its VmHWM in KiB."""
    drop_page_cache(source)
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", COMMAND, "convert", str(source), str(destination)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - start
    shutil.rmtree(destination)
    return seconds, int(result.stdout.split()[-1])


def drop_page_cache(folder: pathlib.Path) -> None:
    """Asks for the files' pages to be dropped, so that both sides read from disk."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
