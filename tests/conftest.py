"""Settings of every test: set in the environment, so that commands run by a test have them too.

JAX reads them when it is first imported, hence before any test module.
"""

import os
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".jax_cache"

os.environ.update(
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip(),
    JAX_NUMPY_DTYPE_PROMOTION="strict",
    JAX_NUMPY_RANK_PROMOTION="raise",
    JAX_DEFAULT_MATMUL_PRECISION="float32",
    # Most of a test's time is compilation: keep every program, however small.
    JAX_COMPILATION_CACHE_DIR=str(CACHE),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
)
