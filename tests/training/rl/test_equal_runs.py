"""A seeded run is the same in any batches: its tokens, and to rounding its losses and metrics."""

import pytest
from rollouts import play
from teachers import save_teacher

import fastrl.training.rl.train as module

#: rollout.batch_size, training.micro_batch_tokens and training.packing; None is all, or unlimited.
CUTS = [(None, None, False), (1, 64, False), (3, 300, False), (None, 64, True), (1, 300, True), (3, None, True)]
UNLIMITED = 10**6
RUNS = {
    "grpo": {"objective": {"name": "grpo", "presets": {"grpo": {"kl_coef": 0.1}}}},
    "gspo": {"objective": {"name": "gspo"}},
    "ppo": {"objective": {"name": "ppo"}, "advantages": {"estimator": "gae"}, "critic": {}},
    "distillation": {"distillation": {"kind": "jsd"}},
}


def same(found, expected):
    """Metrics to float32 rounding, which the products of other batches have, and without the count of such tokens."""
    for step in (*found, *expected):
        step.pop("ratio_not_one", None)
    assert found == [pytest.approx(step, rel=1e-6, abs=1e-6, nan_ok=True) for step in expected]


@pytest.mark.parametrize("name", RUNS)
def test_steps_do_not_depend_on_batches(make_config, spy, tmp_path, name):
    tables = RUNS[name]
    if name == "distillation":
        tables = {"distillation": tables["distillation"] | {"teacher": save_teacher(tmp_path / "teacher")}}
    rollouts, expected = spy(module, "update", lambda _, run, rollout: rollout), None
    for size, tokens, packing in CUTS:
        rollouts.clear()
        config = make_config(
            **tables,
            rollout={"prompts_per_step": 16, "max_new_tokens": 12, "top_p": 0.9, "batch_size": size},
            training={"micro_batch_tokens": tokens or UNLIMITED, "packing": packing},
        )
        _, steps = play(config)
        drawn = [r.targets[row][r.completion_mask[row]].tolist() for r in rollouts for row in range(64)]
        numbers = [{k: v for k, v in step.items() if not k.startswith(("time/", "memory/"))} for step in steps]
        expected = expected or (drawn, numbers)
        assert drawn == expected[0]
        same(numbers, expected[1])
    assert len({len(tokens) for tokens in drawn}) > 6  # uneven
