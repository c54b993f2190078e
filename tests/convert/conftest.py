"""The command run in this process, and what it said."""

import dataclasses
from collections.abc import Callable

import pytest

from convert import cli


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Exit code and output of one run."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `jaxspec-convert` with these arguments; anything is turned into a string."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def done(command: Command) -> Command:
    """The same for a run that must succeed in silence on stderr."""

    def run(*arguments: object) -> Outcome:
        outcome = command(*arguments)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome

    return run


@pytest.fixture
def refused(command: Command) -> Callable[..., str]:
    """The same for a run that must fail with one line; returns the line."""

    def run(*arguments: object) -> str:
        outcome = command(*arguments)
        assert outcome.code == 1
        assert outcome.err.count("\n") == 1 and outcome.err.startswith("jaxspec-convert: ")
        assert "Traceback" not in outcome.err
        return outcome.err

    return run
