"""Liger's linear GRPO and DPO losses beside ours under the same names: time, peak temporary memory, and the gap.

    python benchmarks/integrations/liger.py                       # 8 responses of 128 tokens, H 256, V 32768, float32
    python benchmarks/integrations/liger.py --shape 8x128x256x32768 --repeats 5

Memory is what a call and its backward hold beyond inputs, outputs and gradients, measured as `fastrl bench` does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss, LigerFusedLinearGRPOLoss
from torch import Tensor

from fastrl.bench.measure import Outcome, Run, peak_temporary_bytes, time_runs
from fastrl.integrations import liger as ours

GRPO = {"loss_type": "dapo", "beta": 0.04}
DPO: dict[str, Any] = {"beta": 0.1}


class Problem:
    """One batch; the same numbers for every contender."""

    def __init__(self, responses: int, length: int, hidden: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.hidden = normal(responses, length, hidden).requires_grad_()
        self.weight = (normal(vocab, hidden) / hidden**0.5).requires_grad_()
        self.ids = torch.randint(vocab, (responses, length), generator=generator)
        self.mask = torch.ones(responses, length)
        self.advantages = normal(responses)
        self.old, self.ref = (normal(responses, length) * 0.1 - 10.9 for _ in range(2))
        self.ref_hidden, self.ref_weight = self.hidden.detach().flip(0), self.weight.detach().flip(0)

    def grpo(self, loss_of: Any) -> Tensor:
        """By the signature that both have."""
        loss: Tensor = loss_of(
            self.hidden,
            self.weight,
            self.ids,
            self.mask,
            self.advantages,
            ref_per_token_logps=self.ref,
            old_per_token_logps=self.old,
        )[0]
        return loss

    def dpo(self, loss_of: Any) -> Tensor:
        """The same for preferences, the reference scored in the call."""
        loss: Tensor = loss_of(
            self.weight, self.hidden, self.ids, ref_input=self.ref_hidden, ref_weight=self.ref_weight
        )[0]
        return loss

    def run(self, loss: Callable[[], Tensor]) -> Run:
        """A call with its gradients."""

        def call() -> Outcome:
            value = loss()
            gradients = torch.autograd.grad(value, (self.hidden, self.weight))
            return Outcome(value.detach(), None, None, dict(zip(("hidden", "weight"), gradients, strict=True)))

        return Run(call)


def contenders(problem: Problem) -> dict[str, dict[str, Run]]:
    """workload -> contender -> run; the first of each is what the others are compared with."""

    def grpo(loss_of: Any) -> Run:
        return problem.run(lambda: problem.grpo(loss_of))

    def dpo(loss_of: Any) -> Run:
        return problem.run(lambda: problem.dpo(loss_of))

    return {
        "GRPO (dapo, beta 0.04)": {
            "Liger": grpo(LigerFusedLinearGRPOLoss(**GRPO)),
            "Liger, compiled=False": grpo(LigerFusedLinearGRPOLoss(compiled=False, **GRPO)),
            "fastrl": grpo(ours.LigerFusedLinearGRPOLoss(**GRPO)),
            "fastrl, memory_budget=64MiB": grpo(ours.LigerFusedLinearGRPOLoss(memory_budget="64MiB", **GRPO)),
        },
        "DPO (reference in the call)": {
            "Liger": dpo(LigerFusedLinearDPOLoss(**DPO)),
            "Liger, compiled=False": dpo(LigerFusedLinearDPOLoss(compiled=False, **DPO)),
            "fastrl": dpo(ours.LigerFusedLinearDPOLoss(**DPO)),
            "fastrl, memory_budget=64MiB": dpo(ours.LigerFusedLinearDPOLoss(memory_budget="64MiB", **DPO)),
        },
    }


def gap(found: Outcome, expected: Outcome) -> float:
    """The largest difference of a gradient, relative to its largest entry."""
    pairs = [(found.gradients[name], value) for name, value in expected.gradients.items()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main() -> None:
    """Print one Markdown table a workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8x128x256x32768", help="responses x tokens x hidden x vocabulary")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    responses, length, hidden, vocab = (int(number) for number in options.shape.split("x"))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "liger-kernel", "fastrl"))
    print(f"{' '.join(sys.argv)}: {versions}, {torch.get_num_threads()} threads of {os.cpu_count()} cores, float32\n")
    for workload, runs in contenders(Problem(responses, length, hidden, vocab)).items():
        print(f"| {workload} | median ms | peak temporary MiB | largest gradient difference |\n|---|---|---|---|")
        first: Outcome | None = None
        for name, run in runs.items():
            outcome = run.call()
            first = outcome if first is None else first
            difference = gap(outcome, first)
            del outcome
            peak = peak_temporary_bytes(run, "cpu")
            times = time_runs(run, "cpu", options.repeats)
            memory = "?" if peak is None else f"{peak / 2**20:.0f}"
            print(f"| {name} | {1e3 * statistics.median(times):.0f} | {memory} | {difference:.1e} |", flush=True)
        del first
        print()


if __name__ == "__main__":
    main()
