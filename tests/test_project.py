"""The frame: set-up on a fresh machine, packaging, and which package may import which."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import jaxspec

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "jaxspec", "convert")
PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
PYENV_SHIM = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"


@pytest.fixture
def machine(tmp_path):
    """A machine with a shell, make, and what a test adds: programs on PATH, pyenv versions."""
    (tmp_path / "bin").mkdir()
    for program in ("sh", "make"):
        (tmp_path / "bin" / program).symlink_to(str(shutil.which(program)))

    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(command, programs=None, pyenv=None):
        for name, text in (programs or {}).items():
            write(tmp_path / "bin" / name, text)
        for version, text in (pyenv or {}).items():
            write(tmp_path / f"home/.pyenv/versions/{version}/bin/python", text)
        environment = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home")}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return run


def test_a_shim_that_does_not_run_is_passed_over(machine):
    programs = {"python3.12": PYENV_SHIM, "python3": PYENV_SHIM, "python3.13": PYTHON}
    found = machine([ROOT / "scripts/find-python"], programs)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{sys.executable}\n", "")


def test_pyenv_versions_are_searched_last(machine):
    versions = {"3.9.18": PYENV_SHIM, "3.12.1": PYTHON}
    found = machine([ROOT / "scripts/find-python"], {"python3": PYENV_SHIM}, versions)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{sys.executable}\n", "")


def test_without_a_python_make_says_in_one_line_what_to_install(machine, tmp_path):
    for path in ("Makefile", "pyproject.toml", "scripts"):
        (tmp_path / path).symlink_to(ROOT / path)
    done = machine(["make", "-C", str(tmp_path), "--no-print-directory", "test"])
    assert done.returncode != 0 and done.stdout == ""
    assert re.fullmatch(r"\S+ \*\*\* jaxspec needs Python 3\.12 .*install it.*\n", done.stderr)


def test_commands_and_types_are_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for target in project["scripts"].values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()


def test_links_in_the_documents_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert "://" in target or (document.parent / target).exists(), f"{document}: {target}"


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    above = set(PACKAGES[PACKAGES.index(package) + 1 :]) | {"tests", "examples", "benchmarks"}
    for path in (ROOT / package).rglob("*.py"):
        modules = imported_modules(path)
        assert not {name.split(".")[0] for name in modules} & above, path
        private = [name for name in modules if name.startswith("jax._src")]
        assert not private or path == ROOT / "pallas_kernels" / "testing.py", path


def test_examples_use_public_names_only():
    for path in (ROOT / "examples").glob("*.py"):
        assert not [name for name in imported_modules(path) if name.startswith("jaxspec.")], path
        for name in re.findall(r"\bjaxspec\.(\w+)", path.read_text()):
            assert name in jaxspec.__all__, f"{path}: jaxspec.{name}"


def test_tests_run_with_strict_settings():
    assert jax.device_count() == 8
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert jax.config.jax_numpy_rank_promotion == "raise"
