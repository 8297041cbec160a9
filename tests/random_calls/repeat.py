"""Make one random call again, as a failure names it: `python tests/random_calls/repeat.py SEED [FUNCTION]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout's fastrl, wherever it is started
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "oracles"))

import torch
from calls import CALLS, check

if __name__ == "__main__":
    torch.set_num_threads(1)
    seed, start = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    name = next(n for n in CALLS if n.startswith(start)) if start else None
    for key, value in check(seed, name=name).items():
        print(f"{key} = {value!r}")
    print("its numbers are right, or too near a border to tell")
