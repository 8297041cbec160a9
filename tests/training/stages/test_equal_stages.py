"""An update of a stage is the same in any micro-batches: to rounding its losses and metrics."""

import random

import pytest
import torch
from digit_models import gradient_of
from run_files import config_of, repeatable

from fastrl.training.batches.micro_batches import MicroBatches
from fastrl.training.config.stages import TokenTrainingConfig
from fastrl.training.stages import dpo, sft
from fastrl.training.stages.loop import measure
from fastrl.training.stages.rows import Tokens


@pytest.mark.parametrize("stage", [sft, dpo])
def test_stages_do_not_depend_on_micro_batches(settings, write_rows, tmp_path, stage):
    """Rows of 5 to 31 tokens."""
    generator, rows = random.Random(0), []
    for index in range(40):
        prompt, *answers = ("".join(generator.choices("0123456789", k=generator.randint(1, 13))) for _ in range(3))
        names = ("completion",) if stage is sft else ("chosen", "rejected")
        rows.append(
            {"prompt": f"{prompt}=", **{name: f"{index}{answer}" for name, answer in zip(names, answers, strict=False)}}
        )
    path, expected = write_rows(rows), None
    for tokens, packing in ((10**6, False), (64, False), (300, False), (64, True), (300, True), (10**6, True)):
        training = {"batch_size": 20, "micro_batch_tokens": tokens, "packing": packing}
        folder = {"output_dir": str(tmp_path / f"{tokens} {packing}")}
        config = config_of(stage).model_validate(
            settings(path, data={"eval_path": str(path)}, training=training, logging=folder, optimizer={"lr": 1e-4})
        )
        stage.train(config)
        found = repeatable(config)
        for step in found[:2]:  # a margin from the policy itself is rounding, which is above 0 or not
            step.pop("accuracy", None), step.pop("eval/accuracy", None)
        expected = expected or found
        assert found == [pytest.approx(step, rel=1e-6, abs=1e-6) for step in expected]


def test_an_update_that_ran_out_of_memory_is_computed_again(policy, monkeypatch):
    """In the second micro-batch, whose first one had left its gradient."""
    stage, rows = sft.SFT(policy, TokenTrainingConfig()), [Tokens([3, 4, 1], [5, 6, 0])] * 4
    expected = measure(stage, rows, MicroBatches(12), backward=True), gradient_of(policy.model)
    part, calls = stage.part, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return part(*arguments)

    monkeypatch.setattr(stage, "part", once)
    found = measure(stage, rows, batches := MicroBatches(12), backward=True), gradient_of(policy.model)
    assert batches.limit == 6 and len(calls) == 2 + 4
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1])
