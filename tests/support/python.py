"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def python(*arguments: str | Path, stdin: str | None = None, timeout: float = 600, **environment: str) -> str:
    """What the interpreter prints when it is run with these arguments; how it ended must be a success.

    Args:
        arguments: the command line behind the interpreter's name, as `-c` and a script.
        stdin: what the process reads.
        timeout: in seconds.
        environment: variables beside those of this process.
    """
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout, env=os.environ | environment
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
