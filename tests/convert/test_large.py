"""Gigabytes: memory stays bounded, a kill at a random moment is survived, and all comes back."""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.convert.trees import assert_same_files

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
GIGABYTES = 3.0
PROGRAM = """
import sys
from convert.cli import main
code = main()
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1])
sys.exit(code)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("large") / "src"
    script = ROOT / "benchmarks" / "make_synthetic_checkpoint.py"
    options = ["--gigabytes", str(GIGABYTES), "--shards", "4"]
    subprocess.run([sys.executable, script, folder, *options], check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    """A folder that is not kept after the test."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def run(*arguments: object) -> int:
    """Runs the command in a process of its own; returns its VmHWM in KiB."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return int(result.stdout.split()[-1])


def test_memory_stays_bounded_and_the_files_come_back(source, folder):
    assert run("convert", source, folder / "dst") < 1.5 * 2**20
    assert run("verify", source, folder / "dst") < 1.5 * 2**20
    assert run("verify", folder / "dst") < 1.5 * 2**20
    assert run("export", folder / "dst", folder / "out") < 1.5 * 2**20
    assert_same_files(source, folder / "out")


def test_killed_at_a_random_moment_and_resumed(source, folder):
    command = [sys.executable, "-c", PROGRAM, "convert", str(source), str(folder / "dst")]
    start = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        while not (folder / "dst.partial_save" / "source" / "record.json").exists():
            assert process.poll() is None and time.monotonic() - start < 120
            time.sleep(0.01)
        time.sleep(random.uniform(0, 8))
        process.send_signal(signal.SIGKILL)
    run("convert", source, folder / "dst", "--resume")
    run("verify", source, folder / "dst")
    assert sorted(path.name for path in folder.iterdir()) == ["dst"]
