from pallas_kernels.quantize.api import quantize_activations

__all__ = ["quantize_activations"]
