"""FP8 and FP4 to BF16, some rows at a time: the product of a whole stack is many times its size."""

import ml_dtypes
import numpy as np

from pallas_kernels.quantized import QuantizedTensor, dequantize

VALUES_AT_A_TIME = 8 << 20


def to_bf16(w: QuantizedTensor) -> np.ndarray:
    """Multiplies values and scales and rounds the product once.

    Args:
        w: NumPy arrays.

    Returns:
        bfloat16, of the same shape.
    """
    result = np.empty(w.shape, ml_dtypes.bfloat16)
    *lead, num_rows, num_columns = w.shape
    block_rows = w.block_shape[0]
    step = max(1, VALUES_AT_A_TIME // (block_rows * num_columns)) * block_rows
    for index in np.ndindex(*lead):
        values, scales = w.values[index], w.scales[index]
        for row in range(0, num_rows, step):
            rows, blocks = (
                slice(row, row + step),
                slice(row // block_rows, (row + step) // block_rows),
            )
            part = QuantizedTensor(values[rows], scales[blocks], w.block_shape)
            result[index][rows] = dequantize(part, ml_dtypes.bfloat16)
    return result
