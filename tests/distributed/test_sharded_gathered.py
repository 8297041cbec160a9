"""Log-probabilities of several entries per row over shards of the vocabulary, against one process without any."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, group_of
from shards import EVEN, LAYOUTS, Shards, told, whole
from torch import Tensor

import fastrl
from fastrl.losses import request as calls
from fastrl.planning import tiling
from fastrl.planning.plans import use_plan

N, H, V, K = 6, 8, 37, 5
MASK = torch.tensor([1, 1, 0, 1, 1, 1])
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
ALL = ("hidden", "weight", "bias")
#: Of bfloat16 logits, gradients and their parts on each rank, which are rounded once each.
NARROW = {"rtol": 3 * 2**-7, "atol": 3 * 2**-7}


class Case(NamedTuple):
    """One call on every rank."""

    shards: Shards = EVEN
    plan: str | None = None
    needs: tuple[str, ...] = ALL
    sets: str = ""  # "narrow": every row has a recorded support; "some": one has none, and one is wide
    ragged: bool = False
    dtype: torch.dtype = torch.float32
    reduces: bool = True
    temperature: float = 0.7
    k: int = K


def ids_of(case: Case) -> Tensor:
    ids = torch.randint(V, (N, case.k), generator=torch.Generator().manual_seed(2))
    if case.k:
        ids[0, 3], ids[3, 1:], ids[5] = ids[0, 1], -1, torch.arange(case.k)  # the last: all on the first ranks
    return ids


def lists_of(ids: Tensor) -> list[list[int]]:
    return [sorted({x for x in row if x >= 0}) for row in ids.tolist()]


def arguments_of(case: Case) -> dict[str, Any]:
    ids = ids_of(case)
    given: dict[str, Any] = {"mask": MASK, "temperature": case.temperature, "ids": ids}
    if case.sets:
        g = torch.Generator().manual_seed(7)
        sizes = {1: 0, 4: 200} if case.sets == "some" else {}
        kept = [
            row + torch.randint(V, (sizes.get(i, 4),), generator=g).tolist() if sizes.get(i, 4) else []
            for i, row in enumerate(lists_of(ids))
        ]
        given["sampling_mask"] = fastrl.SamplingMask.from_lists(kept)
    if case.ragged:
        given["ids"] = fastrl.SamplingMask.from_lists(lists_of(ids))
    return given


def head_of(case: Case) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    made = {"hidden": torch.randn(N, H, generator=g), "weight": torch.randn(V, H, generator=g) / 2}
    return {k: x.to(case.dtype) for k, x in (made | {"bias": torch.randn(V, generator=g)}).items()}


def results(case: Case, leaves: dict[str, Tensor], **group: Any) -> dict[str, Any]:
    given = arguments_of(case)
    reduces = {"reduce_hidden_grad": case.reduces} if group else {}
    wanted = {k: x for k, x in leaves.items() if x.requires_grad}
    with pytest.MonkeyPatch.context() as patch, use_plan(case.plan) if case.plan else nullcontext():
        patch.setattr(calls, "gathers", lambda *_: False)
        for name, value in (("_LEAST_ROWS", 2), ("_LEAST_COLUMNS", 4)):
            patch.setattr(tiling, name, value)  # slices of the shards, and chunks of rows
        for sizes in (tiling.TILE_BYTES, tiling.SLICED_BYTES):
            patch.setitem(sizes, "cpu", 0)
        out = fastrl.linear_gathered_logprobs(**leaves, **given, **group, **reduces)
        u, found = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)), []
        for _ in range(2 if wanted else 0):
            found = list(torch.autograd.grad(out, list(wanted.values()), u, retain_graph=True))
    return {"logprobs": out, "gradients": dict(zip(wanted, found, strict=True))}


def of_logits(case: Case, logits: Tensor, **group: Any) -> dict[str, Any]:
    leaf = logits.clone().requires_grad_()
    found = []
    for inplace in (False, True):
        out = fastrl.gathered_logprobs(leaf * 1, **arguments_of(case), **group, inplace=inplace)
        u = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        found.append((out, *torch.autograd.grad(out, leaf, u)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return {"logprobs": found[0][0], "gradients": {"weight": found[0][1].t()}}  # columns, which lie as a head's rows do


def over_ranks(cases: list[Case], from_logits: bool) -> list[Any]:
    return [_over_ranks(case, from_logits) for case in cases]


def _over_ranks(case: Case, from_logits: bool) -> Any:
    group = group_of(*case.shards.members)
    if group is None:
        return None
    rank = dist.get_rank(group)
    options = {"tp_group": group, **case.shards.options(rank)}
    if from_logits:
        return told(of_logits(case, case.shards.own(logits_of(case).t(), rank).t().contiguous(), **options))
    return told(results(case, case.shards.leaves(head_of(case), rank, case.needs), **options))


def logits_of(case: Case) -> Tensor:
    head = head_of(case)
    return torch.nn.functional.linear(head["hidden"], head["weight"], head["bias"])


CASES = [Case(shards, plan) for shards in LAYOUTS.values() for plan in ("recompute", "two-pass")]
CASES += [Case(plan="recompute", needs=("hidden",)), Case(plan="forward", needs=()), Case(reduces=False), Case(k=0)]
CASES += [Case(k=0, sets="some")]
CASES += [Case(shards, sets=sets) for shards in (EVEN, LAYOUTS["padded"]) for sets in ("narrow", "some")]
CASES += [Case(ragged=True), Case(LAYOUTS["empty in the middle"], sets="some", ragged=True, reduces=False)]
CASES += [
    Case(dtype=dtype, plan=plan) for dtype in (torch.bfloat16, torch.float16) for plan in ("recompute", "two-pass")
]
CASES += [Case(dtype=torch.bfloat16, sets="some")]


@pytest.mark.parametrize("from_logits", [False, True], ids=["hidden", "logits"])
def test_shards_give_what_one_process_gives(ranks: Ranks, from_logits: bool) -> None:
    """Every layout by every plan, with supports, ragged ids, none at all, and in 16 bits."""
    cases = [case for case in CASES if not from_logits or (case.plan in (None, "recompute") and case.reduces)]
    found = ranks.run(over_ranks, cases, from_logits)
    for case, parts in zip(cases, zip(*found, strict=True), strict=True):
        ours = whole(case.shards, parts, case.reduces)
        head = {k: x.requires_grad_(k in case.needs) for k, x in head_of(case).items()}
        alone = of_logits(case, logits_of(case).detach()) if from_logits else results(case, head)
        close = CLOSE if case.dtype == torch.float32 else NARROW
        for k, x in alone["gradients"].items():
            scale = x.abs().max().double().clamp_min(1e-9)
            torch.testing.assert_close(
                ours["gradients"][k].double() / scale, x.double() / scale, msg=f"{case}: {k}", **close
            )
        torch.testing.assert_close(ours["logprobs"].float(), alone["logprobs"].detach(), msg=str(case), **close)


def confident(_: None) -> Any:
    group = group_of(0, 1, 2, 3)
    logits = torch.full((1, 37), -26.0)
    logits[0, 20] = 0.0
    leaf = EVEN.own(logits.t(), dist.get_rank(group)).t().clone().requires_grad_()
    out = fastrl.gathered_logprobs(leaf, torch.tensor([[2, 20]]), tp_group=group)
    out[0, 1].backward()
    return out.tolist(), leaf.grad.tolist()


def test_a_confident_token_keeps_its_digits(ranks: Ranks) -> None:
    """Whichever rank has it: -1.8e-10, not 0, and its own gradient is as large."""
    others = 36 * math.exp(-26)
    for rank, (out, gradient) in enumerate(ranks.run(confident, None)):
        assert out[0] == pytest.approx([-26 - others, -math.log1p(others)], rel=2e-5, abs=0)
        if rank == 2:
            assert gradient[0][1] == pytest.approx(others / (1 + others), rel=2e-5, abs=0)


def refused(_: None) -> list[str]:
    group = group_of(0, 1, 2, 3)
    rank, words = dist.get_rank(group), []
    weight, hidden = EVEN.own(torch.ones(37, 4), rank), torch.ones(2, 4)
    for ids in (torch.tensor([[1, 37], [0, 0]]), torch.full((2, 2), rank), torch.zeros(2, 2 + rank).long(), "ids"):
        try:
            fastrl.linear_gathered_logprobs(hidden, weight, ids, tp_group=group)
        except (IndexError, ValueError, TypeError, RuntimeError) as error:
            words.append(f"{type(error).__name__}: {error}")
    return words


def test_wrong_ids_are_refused_by_all_ranks(ranks: Ranks) -> None:
    for words in ranks.run(refused, None):
        assert "IndexError: ids row 0 has at place 1 the id 37 outside [0, 37)" in words[0]
        assert "ids must be the same on every rank of tp_group" in words[1]
        assert "ids must be the same on every rank of tp_group" in words[2]
        assert "ids must be a tensor" in words[3]
