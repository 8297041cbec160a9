"""Reward functions to name in a config, as `function = "fastrl.rewards.exact"`, or to call.

Each is called as a user's own function is, `f(prompts, completions, **columns)`, where a prompt is a string or a list
of messages, a completion a string or a list of messages of which the last one counts, and each column holds one value
per completion. It returns one float per completion. Its keyword-only arguments are set in `[reward.arguments.<name>]`.
With no completions it only checks these arguments. Nothing here imports torch.

What a dataset has wrong (no such column, an empty answer) raises ValueError; a completion never does, whatever it says.

Beside them is what calls a user's functions and tools: `loading`, `calls`, and worker processes (`pooled`, `pool`,
`worker`).
"""

from fastrl.rewards.functions import exact, format, length, regex
from fastrl.rewards.verification import math

__all__ = ["exact", "format", "length", "math", "regex"]
