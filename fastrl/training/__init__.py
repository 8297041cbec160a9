"""The commands that train: `rl` (the thin trainer), the `stages` around it, and their shared code (`common`)."""
