"""How configs name reward functions."""

BUILT_IN = "fastrl.rewards."


def name_of(source: str) -> str:
    """The function's name in "path/to/file.py:function" or "fastrl.rewards.function"."""
    return source.rpartition("." if source.startswith(BUILT_IN) else ":")[2]
