"""One tolerance table for operations, by output dtype."""

import numpy as np

# Largest |got - want| / |want| (Frobenius). Rounding the output once to bfloat16 costs up to 2**-9,
# 2**-9 / sqrt(3) on average; float32 sums of a few hundred terms lose under 16 units of 2**-24.
TOLERANCE = {"bfloat16": 4e-3, "float32": 1e-6}


def assert_close(got, want) -> None:
    """`got` against a float64 reference, by the dtype of `got`; NaN and infinity fail."""
    name = got.dtype.name
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error <= TOLERANCE[name], f"relative error {error:.2e} in {name}"
