"""Advantages, values and rewards: from what a reward says of a response to what a loss reads per token."""
