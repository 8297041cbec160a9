"""Rows of datasets: where they are read from, and prompts as the model's input."""
