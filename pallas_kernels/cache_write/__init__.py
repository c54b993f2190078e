from pallas_kernels.cache_write.api import write_rows

__all__ = ["write_rows"]
