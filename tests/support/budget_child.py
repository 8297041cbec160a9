"""A process for tests/planning/test_budget.py: reads cases from stdin, writes the bytes that each took to stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import fastrl
from fastrl.bench.measure import Run, peak_temporary_bytes
from fastrl.planning import plans as memory

RESPONSES = 8
OBJECTIVES = {
    "GRPO": fastrl.GRPO(entropy_coef=0.01),
    "GSPO": fastrl.GSPO(clip_low=0.3, clip_high=0.3),
    "DeepSeekV32": fastrl.DeepSeekV32(kl_coef=0.1, off_policy_delta=0.1, entropy_coef=0.01),
}


@dataclass
class Case:
    """One call: a plan or None, an objective or "logprobs", the inputs with gradients ("hwb"), and a budget."""

    plan: str | None
    objective: str
    needs: str
    shape: tuple[int, int, int]
    budget: int | None
    masked: bool
    dtype: torch.dtype
    device: str = "cpu"
    warm: bool = True  # whether a first call, unmeasured, loads kernels and the library's own buffers
    sets: str = ""  # "all": every token has a recorded support; "most": nine in ten; "wide": one in ten has half of V
    leaves: list[torch.Tensor] = field(default_factory=list)

    def prepare(self) -> Callable[[], Any]:
        """The call, with its inputs made."""
        n, width, vocab = self.shape
        g = torch.Generator().manual_seed(0)
        hidden = torch.randn(n, width, generator=g).to(self.dtype)
        weight = torch.randn(vocab, width, generator=g).div_(width**0.5).to(self.dtype)
        bias = torch.zeros(vocab, dtype=self.dtype) if "b" in self.needs else None
        made = [x if x is None else x.to(self.device) for x in (hidden, weight, bias)]
        self.leaves = [
            x.requires_grad_(name in self.needs) for x, name in zip(made, "hwb", strict=True) if x is not None
        ]
        targets = torch.randint(vocab, (n,), generator=g).to(self.device)
        old = (0.1 * torch.randn(n, generator=g) - torch.log(torch.tensor(float(vocab))) - 0.5).to(self.device)
        mask = (torch.rand(n, generator=g) > 0.3).to(self.device) if self.masked else None
        offsets = torch.arange(0, n + 1, n // RESPONSES, dtype=torch.int32).to(self.device)
        advantages = torch.randn(RESPONSES, generator=g).to(self.device)
        sampling_mask = self._sampling_mask(targets, g)

        def call() -> Any:
            with memory.use_plan(self.plan) if self.plan else nullcontext():
                if self.objective == "logprobs":
                    out: Any = fastrl.linear_token_logprobs(
                        made[0],
                        made[1],
                        targets,
                        mask=mask,
                        entropy="w" in self.needs,
                        memory_budget=self.budget,
                        sampling_mask=sampling_mask,
                    )
                    loss = out.logprobs.sum() + (0 if out.entropy is None else out.entropy.sum())
                else:
                    out = fastrl.linear_policy_loss(
                        made[0],
                        made[1],
                        targets,
                        bias=bias,
                        objective=OBJECTIVES[self.objective],
                        mask=mask,
                        advantages=advantages,
                        old_logprobs=old,
                        ref_logprobs=old,
                        cu_seqlens=offsets,
                        memory_budget=self.budget,
                        sampling_mask=sampling_mask,
                    )
                    loss = out.loss
            if loss.requires_grad:
                loss.backward()
            return out

        return call

    def _sampling_mask(self, targets: torch.Tensor, g: torch.Generator) -> fastrl.SamplingMask | None:
        """Sets of 1 to 63 ids, 32 in the mean: so many that their bytes outweigh the tokens' own."""
        if not self.sets:
            return None
        sizes = torch.randint(1, 64, (len(targets),), generator=g)
        if self.sets != "all":
            sizes[::10] = 0 if self.sets == "most" else self.shape[2] // 2
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        ids = torch.randint(self.shape[2], (int(offsets[-1]),), generator=g)
        return fastrl.SamplingMask(ids, offsets).to(self.device).with_targets(targets)

    def clear(self) -> None:
        """Forget the gradients of an earlier call."""
        for leaf in self.leaves:
            leaf.grad = None


def refusal(call: Callable[[], Any]) -> str | None:
    """What the call was refused with, or None."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def peak(call: Callable[[], Any]) -> int:
    """Bytes above what is held after the call: its outputs and the gradients."""
    found = peak_temporary_bytes(Run(call), "cpu")
    assert found is not None, "no high-water mark of this process"
    return found


def workspace(plan: memory.Plan, width: int, dtype: torch.dtype) -> int:
    """What the matrix library holds for products of the plan's tiles, beside their operands."""
    return max((_product_workspace(tile.rows, width, tile.columns, dtype) for tile in plan.tiles.values()), default=0)


def _product_workspace(n: int, width: int, vocab: int, dtype: torch.dtype) -> int:
    h, w, z = (torch.ones(shape, dtype=dtype) for shape in ((n, width), (vocab, width), (n, vocab)))
    dh, dw = torch.ones_like(h), torch.ones_like(w)

    def products() -> None:
        torch.mm(h, w.t(), out=z)
        torch.mm(z, w, out=dh)
        torch.mm(z.t(), h, out=dw)

    products()
    return peak(products)


def main() -> None:
    dtype, backend = getattr(torch, sys.argv[1]), sys.argv[2]
    chosen: list[memory.Plan] = []
    choose = memory.choose

    def spy(call: memory.Call, budget: int | None) -> memory.Plan:
        chosen.append(choose(call, budget))
        return chosen[-1]

    memory.choose = spy
    results = []
    with fastrl.use_backend(backend):
        for given in json.load(sys.stdin):
            case = Case(**given, dtype=dtype)
            call = case.prepare()
            words = refusal(call) if case.warm else None
            if words is not None:
                least = (
                    int(words.split("smallest possible is ")[1].split()[0]) if "smallest possible" in words else 2**62
                )
                results.append({"refused": words, "smallest": least})
                continue
            case.clear()
            before = len(chosen)
            used = peak(call)
            assert len(chosen) == before + 1, "one plan a call"
            assert all(x.grad is None or bool(x.grad.isfinite().all()) for x in case.leaves)
            case.clear()
            plan = chosen[-1]
            results.append(
                {"used": used, "planned": plan.temporary_bytes, "workspace": workspace(plan, case.shape[1], dtype)}
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
