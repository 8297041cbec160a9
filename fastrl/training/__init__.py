"""The commands that train: `rl` (the thin trainer), `stages` around it, and what all share (`common`)."""
