"""The row functions as launches of the Triton kernels in `fastrl.kernels`."""
