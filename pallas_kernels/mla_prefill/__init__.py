from pallas_kernels.mla_prefill.api import mla_prefill

__all__ = ["mla_prefill"]
