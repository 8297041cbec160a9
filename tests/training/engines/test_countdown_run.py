"""The countdown example from nothing, with a real vLLM on a CPU, to problems that are solved. Run with -m engine.

Two processes train: `test_vllm.py` has runs of one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import EXAMPLES
from real_vllm import INSTALLED, RealVLLM
from run_files import records

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not INSTALLED.exists(), reason="vLLM is not installed: make engine"),
]

STEPS = 16  # instead of 30: two minutes less
PATIENCE = 1500  # seconds for any of its commands; all of them take five minutes on two idle cores


def test_a_model_learns_countdown_with_the_server(tmp_path: Path) -> None:
    example, runs = tmp_path / "examples" / "countdown", tmp_path / "runs" / "countdown"
    shutil.copytree(EXAMPLES / "countdown", example)

    def call(*command: str | Path) -> None:
        subprocess.run([sys.executable, *map(str, command)], check=True, timeout=PATIENCE, cwd=tmp_path)

    call(example / "make_data.py")
    call("-m", "fastrl.cli", "sft", example / "sft.toml")
    server = RealVLLM(runs / "sft" / "model", "float32", tmp_path / "server.log")
    server.start()
    try:
        options = ["--rollout.url", server.url, "--training.steps", str(STEPS)]
        options += ["--nproc", "2", "--training.threads", "1"]  # of two cores
        call("-m", "fastrl.cli", "train", example / "config.toml", *options)
    finally:
        server.kill()
    run = records(runs / "rl")
    solved = [record["eval/reward"] for record in run if "eval/reward" in record]
    assert run[0]["reward"] < 0.25 and solved[-1] >= 0.9
    assert all(record["off_policy_steps"] == 0 and record["mismatch/abs_log_ratio"] < 0.05 for record in run)
