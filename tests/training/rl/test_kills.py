"""Runs that are killed at any moment, again and again: nothing is lost but the steps since the last checkpoint."""

import json
import multiprocessing
import random
import signal
import time

import pytest
from run_files import repeatable
from safetensors.torch import load_file

from fastrl.training.config.train import Config
from fastrl.training.rl.train import train
from fastrl.training.run.folder import NUMBERS

STEPS = 150  # more than are made until the last kill
TABLES = {
    "objective": {"name": "grpo", "presets": {}},
    "kl": {"coef": 0.1, "adaptive": "schulman", "target": 1e-3, "sync_every": 3},
    "entropy": {"target": 2.0},
    "rollout": {"prompts_per_step": 6, "num_generations": 4, "top_p": 0.9},
    "optimizer": {"schedule": "cosine", "warmup_updates": 3},
    "training": {"steps": STEPS, "minibatches": 2, "threads": 1},
    "evaluation": {"every": 5},
}


def go_on(values: dict, resume: bool) -> None:
    train(Config.model_validate(values), resume=resume)


def complete(config):
    """The checkpoints that a run could go on from; all of them can be read."""
    found = sorted((config.logging.output_dir / "checkpoints").glob("step-*"))
    for directory in found:
        json.loads((directory / NUMBERS).read_text())
        for name in ("model", "training_state", "reference"):
            assert load_file(directory / f"{name}.safetensors")
    return found


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_metric(make_config, trained):
    """Three of four are kill -9. The moments are drawn anew each time; the seed is printed for a failure."""
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    whole = trained("whole", **TABLES)
    config = make_config("killed", **TABLES, logging={"checkpoint_every": 1, "keep_checkpoints": 2})
    # Children of a process that has imported all but done nothing yet: a fork of this one could hang in its threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fastrl.training.rl.train"])
    kills, statuses = 0, []
    metrics = config.logging.output_dir / "metrics.jsonl"
    while True:
        found = complete(config)
        assert len(found) <= 3  # keep_checkpoints, and one that was killed before it could be removed
        # Killed between its first record and its first checkpoint, a run has nothing to go on from, and begins anew.
        values = config.model_dump(mode="json")
        values["logging"]["overwrite"] = not found
        process = context.Process(target=go_on, args=(values, bool(found)))
        size = metrics.stat().st_size if metrics.exists() else 0
        process.start()
        while kills < 20 and process.is_alive() and (not metrics.exists() or metrics.stat().st_size == size):
            time.sleep(0.001)  # until it has begun, or cut what it will do again
        if kills < 20:
            process.join(draw.uniform(0.0, 0.2))
        if kills == 20 or not process.is_alive():
            process.join()
            break
        (process.terminate if draw.random() < 0.25 else process.kill)()
        process.join()
        kills += 1
        statuses.append(process.exitcode)
    assert process.exitcode == 0
    assert kills == 20 and -signal.SIGKILL in statuses
    assert repeatable(config) == repeatable(whole)
    assert [directory.name for directory in complete(config)] == [f"step-{step:06d}" for step in (STEPS - 1, STEPS)]
