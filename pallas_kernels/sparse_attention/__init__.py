from pallas_kernels.sparse_attention.api import sparse_attention

__all__ = ["sparse_attention"]
