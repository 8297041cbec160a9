"""The row functions on the CPU, compiled from `csrc/` on first use."""
