from pallas_kernels.quantize.api import quantize_activations
from pallas_kernels.quantize.simulate import hadamard, simulate_fp4, simulate_fp8

__all__ = ["hadamard", "quantize_activations", "simulate_fp4", "simulate_fp8"]
