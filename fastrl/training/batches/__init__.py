"""Completions as tensors, cut into micro-batches, and the memory that computing with them takes."""
