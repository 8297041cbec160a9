"""CUDA C++ kernels that the Triton backend calls in place of its own: compiled by NVRTC on first use."""
