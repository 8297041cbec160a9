"""A process for tests/planning/test_budget.py: a line of cases from stdin for a line of what each took to stdout."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from smallest_budget import SMALLEST

import fastrl
from fastrl.bench.measure import Run, peak_temporary_bytes
from fastrl.losses.divergence import KINDS
from fastrl.passes import blocks
from fastrl.planning import plans as memory

RESPONSES = 8
ENTRIES = 64  # of each token, where several are asked for
OBJECTIVES = {
    "GRPO": fastrl.GRPO(entropy_coef=0.01),
    "GSPO": fastrl.GSPO(clip_low=0.3, clip_high=0.3),
    "DeepSeekV32": fastrl.DeepSeekV32(kl_coef=0.1, off_policy_delta=0.1, entropy_coef=0.01),
}


@dataclass
class Case:
    """One call: a plan or None, an objective or what else is called, the inputs with gradients, and a budget."""

    plan: str | None
    objective: str
    needs: str  # some of "hwb"
    shape: tuple[int, int, int]
    budget: int | None
    masked: bool
    dtype: torch.dtype
    device: str = "cpu"
    warm: bool = True  # whether a first call, unmeasured, loads kernels and the library's own buffers
    float32_logits: bool = False
    batch_invariant: bool = False
    padding: int = 0  # rows of the head beyond the vocabulary, and half as many of the teacher's
    sets: str = ""  # "all": every token has a recorded support; "most": nine in ten; "wide": one in ten has half of V
    leaves: list[torch.Tensor] = field(default_factory=list)

    def prepare(self) -> Callable[[], Any]:
        """The call, with its inputs made."""
        n, width, vocab = self.shape
        g = torch.Generator().manual_seed(0)
        head = {
            "hidden": torch.randn(n, width, generator=g).to(self.dtype),
            "weight": torch.randn(vocab + self.padding, width, generator=g).div_(width**0.5).to(self.dtype),
        }
        head |= {"bias": torch.zeros(vocab + self.padding, dtype=self.dtype)} if "b" in self.needs else {}
        head = {k: x.to(self.device).requires_grad_(k[0] in self.needs) for k, x in head.items()}
        self.leaves = list(head.values())
        targets = torch.randint(vocab, (n,), generator=g).to(self.device)
        old = (0.1 * torch.randn(n, generator=g) - torch.log(torch.tensor(float(vocab))) - 0.5).to(self.device)
        mask = (torch.rand(n, generator=g) > 0.3).to(self.device) if self.masked else None
        offsets = torch.arange(0, n + 1, n // RESPONSES, dtype=torch.int32).to(self.device)
        batch = {"advantages": torch.randn(RESPONSES, generator=g).to(self.device), "cu_seqlens": offsets}
        batch |= {"old_logprobs": old, "ref_logprobs": old}
        teacher = {}
        if self.objective in KINDS:  # a teacher half as wide again, without a gradient
            teacher = {
                "teacher_hidden": torch.randn(n, 3 * width // 2, generator=g).to(self.dtype).to(self.device),
                "teacher_weight": torch.randn(vocab + self.padding // 2, 3 * width // 2, generator=g)
                .div_(width**0.5)
                .to(self.dtype)
                .to(self.device),
            }
        given = {**head, "targets": targets, "mask": mask, "sampling_mask": self._sampling_mask(targets, g)}
        ids = torch.randint(vocab, (n, ENTRIES), generator=g).to(self.device)
        given |= {"memory_budget": self.budget, "logits_dtype": torch.float32 if self.float32_logits else None}
        given |= {"vocab_size": vocab} if self.padding else {}
        given |= {"batch_invariant": True} if self.batch_invariant else {}

        def call() -> Any:
            blocks._checked.clear()  # each call checks its products
            with memory.use_plan(self.plan) if self.plan else nullcontext():
                if teacher:
                    options = {
                        name: given[name]
                        for name in ("mask", "memory_budget", "logits_dtype", "vocab_size", "batch_invariant")
                        if name in given
                    }
                    out: Any = fastrl.linear_divergence(**head, **teacher, kind=self.objective, **options)
                    loss = out.loss
                elif self.objective == "gathered":
                    several = {"ids": ids} | {k: x for k, x in given.items() if k != "targets"}
                    out = fastrl.linear_gathered_logprobs(**several)
                    loss = out.sum()
                elif self.objective == "DPO":
                    pairs = {"cu_seqlens": offsets, "objective": fastrl.DPO()}
                    pairs["mask"] = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
                    sums = torch.full((RESPONSES,), -9.0, device=self.device)
                    out = fastrl.linear_preference_loss(**given | pairs, ref_logprobs=sums)
                    loss = out.loss
                elif self.objective == "logprobs":
                    out = fastrl.linear_token_logprobs(**given, entropy="w" in self.needs)
                    loss = out.logprobs.sum() + (0 if out.entropy is None else out.entropy.sum())
                else:
                    out = fastrl.linear_policy_loss(**given, **batch, objective=OBJECTIVES[self.objective])
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
    dtypes = {dtype, torch.float32} if plan.call.float32_logits else {dtype}
    tiles = plan.tiles.values()
    return max((_product_workspace(tile.rows, width, tile.columns, x) for tile in tiles for x in dtypes), default=0)


@cache
def _product_workspace(n: int, width: int, vocab: int, dtype: torch.dtype) -> int:
    h, w, z = (torch.ones(shape, dtype=dtype) for shape in ((n, width), (vocab, width), (n, vocab)))
    dh, dw = torch.ones_like(h), torch.ones_like(w)

    def products() -> None:
        torch.mm(h, w.t(), out=z)
        torch.mm(z, w, out=dh)
        torch.mm(z.t(), h, out=dw)

    products()
    return peak(products)


def measured(case: Case, chosen: list[memory.Plan]) -> dict[str, int | str]:
    """The case's bytes; `chosen` is where plans are noted as they are chosen."""
    call = case.prepare()
    words = refusal(call) if case.warm else None
    if not gc.get_freeze_count():  # what is imported by now stays, and garbage is collected four times a case
        gc.collect()
        gc.freeze()
    if words is not None:
        least = re.search(SMALLEST, words)
        return {"refused": words, "smallest": int(least[1]) if least else 2**62}
    case.clear()
    before = len(chosen)
    used = peak(call)
    assert len(chosen) == before + 1, "one plan a call"
    assert all(x.grad is None or bool(x.grad.isfinite().all()) for x in case.leaves)
    case.clear()
    plan = chosen[-1]
    beside = workspace(plan, case.shape[1], case.dtype)
    return {"used": used, "planned": plan.temporary_bytes, "workspace": beside}


def main() -> None:
    dtype, backend = getattr(torch, sys.argv[1]), sys.argv[2]
    chosen: list[memory.Plan] = []
    choose = memory.choose

    def spy(call: memory.Call, *given: int | None) -> memory.Plan:
        chosen.append(choose(call, *given))
        return chosen[-1]

    memory.choose = spy
    with fastrl.use_backend(backend):
        for line in sys.stdin:
            print(json.dumps([measured(Case(**given, dtype=dtype), chosen) for given in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
