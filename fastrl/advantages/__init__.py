"""Advantages, values and rewards: from the reward of a response to the per-token tensors that a loss reads."""
