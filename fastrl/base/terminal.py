"""Lines for whoever watches a command."""

import sys


def say(text: str) -> None:
    """Print a line on stderr."""
    print(f"fastrl: {text}", file=sys.stderr, flush=True)
