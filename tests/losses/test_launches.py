"""How many kernels a call launches on a GPU with its backward, and how often the host waits; counted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastrl

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("counted where the interpreter runs the kernels", allow_module_level=True)

from launches import launches_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    ("objective", "masked", "most"),
    [(fastrl.PPO(), False, 38), (fastrl.GRPO(), False, 40), (fastrl.GRPO(), True, 40), (fastrl.DAPO(), True, 38)],
    ids=["ppo", "grpo", "grpo-masked", "dapo-masked"],
)
def test_recorded_sets_take_few_launches_and_no_wait(objective: Any, masked: bool, most: int) -> None:
    torch.manual_seed(0)
    shape, width, vocab = (4, 4), 16, 128
    targets = torch.randint(vocab, shape)
    sets = fastrl.SamplingMask.from_lists([sorted({int(t), 3, 70}) for t in targets.flatten()])
    hidden, weight = torch.randn(*shape, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    arguments: dict[str, Any] = {"advantages": torch.randn(4), "old_logprobs": torch.randn(shape) - 1}
    if objective.kl is not None:
        arguments["ref_logprobs"] = torch.randn(shape) - 1
    if masked:
        arguments["mask"] = torch.rand(shape) < 0.8

    def call() -> None:
        out = fastrl.linear_policy_loss(hidden, weight, targets, objective=objective, sampling_mask=sets, **arguments)
        torch.autograd.grad(out.loss, (hidden, weight))

    with fastrl.use_backend("triton"):
        found = launches_of(call)
    assert found.total <= most, found.kernels.most_common()
    assert not found.waits.total(), found.waits
