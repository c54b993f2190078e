from pallas_kernels.block_matmul.api import block_matmul

__all__ = ["block_matmul"]
