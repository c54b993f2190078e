from pallas_kernels.grouped_matmul.api import expert_mlp

__all__ = ["expert_mlp"]
