from pallas_kernels.paged_mla.api import gather_rows, paged_mla

__all__ = ["gather_rows", "paged_mla"]
