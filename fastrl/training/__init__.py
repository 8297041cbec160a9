"""The commands that train, in rooms: each holds what its name says, and imports only those before it.

`rl` is the thin trainer, `stages` the commands around it; both take their steps in `run`'s loop.
"""
