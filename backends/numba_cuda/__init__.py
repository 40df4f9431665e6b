"""The Numba backend: NVIDIA GPUs where Triton does not run, and the CPU under Numba's simulator."""
