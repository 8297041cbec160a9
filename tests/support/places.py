"""Where things are in the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, EXAMPLES, SUPPORT = ROOT / "benchmarks", ROOT / "examples", Path(__file__).resolve().parent

#: The folders of the package from the bottom up: docs/design.md's list. Tests of what is above use what is below.
LEVELS = (
    "base",
    "distributed",
    "objectives",
    "advantages",
    "rewards",
    "backend",
    "planning",
    "passes",
    "sampling_mask",
    "losses",
    "models",
    "integrations",
    "report",
    "training",
    "init",
    "bench",
)

#: Those of the trainer, in the same order. `rl` and `stages` do not import each other.
ROOMS = ("config", "parallel", "data", "models", "rewards", "batches", "run", "engines", "stages", "rl")
