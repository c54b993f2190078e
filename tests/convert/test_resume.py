"""A conversion that is stopped anywhere and continued gives what one run gives."""

import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import orbax.checkpoint.experimental.v1 as ocp
import pytest

from convert import cli, plan, record
from convert.orbax_out import Session
from jaxspec import checkpoint
from jaxspec.errors import CheckpointError
from tests import fixtures
from tests.convert.trees import TINY, assert_same, expected, stored


class Killed(BaseException):
    """Ends a run without any of its cleaning up, as a kill does."""


MODEL = fixtures.v3(quantized=True, **TINY)


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """A source that is saved in five groups, each complete before the next begins."""
    original = ocp.partial.save_async

    def save_now(*arguments, **options):
        response = original(*arguments, **options)
        response.result()  # in this process, it would go on after the "kill"
        return response

    monkeypatch.setattr(ocp.partial, "save_async", save_now)
    monkeypatch.setattr(plan, "GROUP_BYTES", 150_000)
    return MODEL.write(tmp_path / "src", num_shards=2)


def assert_finished(tmp_path: Path, done) -> None:
    assert {path.name for path in tmp_path.iterdir()} == {"src", "dst"}
    assert_same(stored(tmp_path / "dst"), expected(MODEL))
    done("verify", tmp_path / "src", tmp_path / "dst")
    done("verify", tmp_path / "dst")


def kill_in(monkeypatch, owner, name: str, *, call: int = 1, before: bool = False) -> None:
    """Kills the run before or after that call of the method or function."""
    original, calls = getattr(owner, name), []

    def wrapper(*arguments, **options):
        calls.append(name)
        is_the_one = len(calls) == call
        if before and is_the_one:
            raise Killed
        result = original(*arguments, **options)
        if is_the_one:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, wrapper)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    "owner, name, call",
    [
        (record, "write", 1),
        (record.Checksums, "append", 3),
        (ocp.partial, "save_async", 1),
        (ocp.partial, "save_async", 3),
        (Session, "_put_away", 3),
        (record, "seal", 1),
        (shutil, "copytree", 1),
        (shutil, "copytree", 2),
        (ocp.partial, "finalize", 1),
        (Session, "discard", 1),
    ],
)
def test_killed_at_any_step_and_resumed(
    owner, name, call, before, source, tmp_path, monkeypatch, done
):
    destination = tmp_path / "dst"
    with monkeypatch.context() as patches, contextlib.suppress(Killed):
        kill_in(patches, owner, name, call=call, before=before)
        cli.main(["convert", str(source), str(destination)])
        pytest.fail("the run was not killed")
    if name != "discard":
        with pytest.raises(CheckpointError):
            checkpoint.read(destination)
    with pytest.raises(CheckpointError):
        checkpoint.read(tmp_path / "dst.partial_save")
    done("convert", source, destination, "--resume")
    assert_finished(tmp_path, done)


def test_what_was_saved_is_not_read_again(source, tmp_path, monkeypatch, done):
    with monkeypatch.context() as patches, contextlib.suppress(Killed):
        kill_in(patches, ocp.partial, "save_async", call=3)
        cli.main(["convert", str(source), str(tmp_path / "dst")])
    saved = []
    original = ocp.partial.save_async
    monkeypatch.setattr(
        ocp.partial, "save_async", lambda *a, **k: (saved.append(a), original(*a, **k))[1]
    )
    done("convert", source, tmp_path / "dst", "--resume")
    num_groups = len(record.Checksums.read(tmp_path / "dst").groups)
    assert len(saved) == num_groups - 3


def test_a_torn_save_is_thrown_away(source, tmp_path, monkeypatch, done):
    with monkeypatch.context() as patches, contextlib.suppress(Killed):
        kill_in(patches, ocp.partial, "save_async", call=2)
        cli.main(["convert", str(source), str(tmp_path / "dst")])
    torn = tmp_path / "dst.partial_save.orbax-checkpoint-tmp" / "state"
    torn.mkdir(parents=True)
    (torn / "manifest.ocdbt").write_bytes(b"half")
    with open(tmp_path / "dst.partial_save/source/checksums.jsonl", "a") as file:
        file.write('{"target/no')
    done("convert", source, tmp_path / "dst", "--resume")
    assert_finished(tmp_path, done)


def test_killed_at_a_random_moment(tmp_path, done):
    """The real thing: SIGKILL, wherever it hits."""
    source = MODEL.write(tmp_path / "src", num_shards=2)
    program = (
        "import sys; from convert import cli, plan; plan.GROUP_BYTES = 100_000; "
        "print(flush=True); sys.exit(cli.main())"
    )
    rng = random.Random()
    command = [sys.executable, "-c", program, "convert", str(source), str(tmp_path / "dst")]
    for _ in range(2):
        with subprocess.Popen(
            [*command, "--resume"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(rng.uniform(0.1, 1))
            process.send_signal(signal.SIGKILL)
    result = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert_finished(tmp_path, done)


def test_a_file_system_without_links_will_do(source, tmp_path, monkeypatch, done):
    def link(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", link)
    done("convert", source, tmp_path / "dst")
    assert_finished(tmp_path, done)


def test_two_processes_do_not_write_one_destination(source, tmp_path, monkeypatch, refused, done):
    with monkeypatch.context() as patches, contextlib.suppress(Killed):
        kill_in(patches, ocp.partial, "save_async", call=2)
        cli.main(["convert", str(source), str(tmp_path / "dst")])
    descriptor = os.open(tmp_path / "dst.partial_save", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "another process" in refused("convert", source, tmp_path / "dst", "--resume")
    os.close(descriptor)
    done("convert", source, tmp_path / "dst", "--resume")
    assert_finished(tmp_path, done)


def test_ctrl_c_keeps_what_was_saved(source, tmp_path, monkeypatch, command, done):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(record, "seal", interrupt)
        outcome = command("convert", source, tmp_path / "dst")
    assert outcome.code == 130 and "--resume" in outcome.err
    assert not (tmp_path / "dst").exists()
    done("convert", source, tmp_path / "dst", "--resume")
    assert_finished(tmp_path, done)


def test_only_resume_touches_an_unfinished_conversion(source, tmp_path, monkeypatch, refused, done):
    with monkeypatch.context() as patches, contextlib.suppress(Killed):
        kill_in(patches, ocp.partial, "save_async", call=2)
        cli.main(["convert", str(source), str(tmp_path / "dst")])
    assert "--resume" in refused("convert", source, tmp_path / "dst")
    line = refused("convert", source, tmp_path / "dst", "--resume", "--weights", "bf16")
    assert "other options" in line
    other = fixtures.v3(quantized=True, **{**TINY, "num_hidden_layers": 3})
    line = refused("convert", other.write(tmp_path / "other"), tmp_path / "dst", "--resume")
    assert "another source" in line
    shutil.rmtree(tmp_path / "other")
    done("convert", source, tmp_path / "dst", "--resume")
    assert_finished(tmp_path, done)


def test_resume_starts_what_was_not_begun_and_leaves_what_is_finished(
    source, tmp_path, done, refused
):
    done("convert", source, tmp_path / "dst", "--resume")
    assert "complete already" in done("convert", source, tmp_path / "dst", "--resume").out
    assert "other options" in refused(
        "convert", source, tmp_path / "dst", "--resume", "--draft", "none"
    )
    assert "exists already" in refused("convert", source, tmp_path / "dst")
    assert_finished(tmp_path, done)
