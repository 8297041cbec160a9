"""Where things are in the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, EXAMPLES, SUPPORT = ROOT / "benchmarks", ROOT / "examples", Path(__file__).resolve().parent
