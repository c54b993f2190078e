"""D40: two processes save one checkpoint, or stop early, or leave nothing that restores."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspec
from tests import models
from tests.test_loading import MODEL, assert_same_bytes, leaves

ROOT = Path(__file__).parent.parent
TIMEOUT_SECONDS = 240


def start(destinations: list[Path], *dying: int) -> list[subprocess.Popen[str]]:
    """Two workers on two devices each; those in `dying` are killed while they save."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    command = [sys.executable, "-m", "tests.distributed_worker", coordinator]
    source = models.checkpoint("v3", **MODEL)
    return [
        subprocess.Popen(
            [*command, str(i), str(source), str(destination), *["--die-saving"] * (i in dying)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, destination in enumerate(destinations)
    ]


def finish(workers: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and standard error of each."""
    try:
        errors = [worker.communicate(timeout=TIMEOUT_SECONDS)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [(worker.returncode, error) for worker, error in zip(workers, errors, strict=True)]


@pytest.mark.slow
def test_a_shared_directory_restores_in_one_process(tmp_path):
    destination = tmp_path / "checkpoint"
    outcomes = finish(start([destination] * 2))
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    want = jaxspec.load(models.checkpoint("v3", **MODEL))
    assert_same_bytes(leaves(jaxspec.load(destination)), leaves(want))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.slow
def test_separate_directories_stop_early(tmp_path):
    destinations = [tmp_path / host / "checkpoint" for host in ("one", "two")]
    for destination in destinations:
        destination.parent.mkdir()
    outcomes = finish(start(destinations))
    for code, error in outcomes:
        assert code == 1 and "not a folder that all hosts share" in error, error
    assert not [path for host in tmp_path.iterdir() for path in host.iterdir()]


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_restores(tmp_path):
    """The survivor waits for the dead one, as it would until its scheduler ends it."""
    destination = tmp_path / "checkpoint"
    survivor, killed = start([destination] * 2, 1)
    assert killed.wait(TIMEOUT_SECONDS) == -9
    with pytest.raises(subprocess.TimeoutExpired):
        survivor.wait(5)
    survivor.kill()
    finish([survivor, killed])
    assert not destination.exists()
    left = list(tmp_path.iterdir())
    assert left, "the save should have begun"
    for path in left:
        with pytest.raises(jaxspec.CheckpointError):
            jaxspec.load(path)
