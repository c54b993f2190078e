"""Settings of every test: set in the environment, so that commands run by a test have them too.

JAX reads them when it is first imported, hence before any test module.
"""

import os
from pathlib import Path

import pytest

CACHE = Path(__file__).parent.parent / ".jax_cache"

os.environ.update(
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=" ".join(
        (
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=8",
            # Tests compile far longer than they run: optimize for the compiler's time.
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
        )
    ).strip(),
    JAX_NUMPY_DTYPE_PROMOTION="strict",
    JAX_NUMPY_RANK_PROMOTION="raise",
    JAX_DEFAULT_MATMUL_PRECISION="float32",
    # Most of a test's time is compilation: keep every program, however small.
    JAX_COMPILATION_CACHE_DIR=str(CACHE),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
)


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory) -> Path:
    """The demo's model with two layers, converted by the command; its source lies beside it."""
    # Imported here, after the settings above.
    from convert import cli
    from examples import tiny_checkpoint

    folder = tmp_path_factory.mktemp("demo")
    tiny_checkpoint.write(folder / "hf", num_hidden_layers=2)
    assert cli.main(["convert", str(folder / "hf"), str(folder / "jaxspec")]) == 0
    return folder / "jaxspec"
