"""Losses from logits whose vocabulary lies over ranks, against one process that holds the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from head_cases import OPTIONS
from objectives import OBJECTIVES
from problem import CLOSE, Problem
from ranks import Ranks, group_of
from torch.nn.functional import linear
from vocabulary import Truth, assert_as_good_as_torch, token_stats

import fastrl
from fastrl.backend.choice import kernels
from fastrl.backend.contract import Transform
from fastrl.base import checks
from fastrl.operators.combined import Combined

B, T, VOCAB = 2, 3, 507
EVEN, UNEVEN, EMPTY, PADDED = (254, 253), (128, 127, 126, 126), (300, 0, 200, 7), (200, 0, 300, 64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: What `token_logprobs` is to be compared under; the entropy and the log-probability have gradients of their own.
STATS = "token_logprobs"


class Case(NamedTuple):
    """One call of one function."""

    shards: tuple[int, ...]  # columns by rank, padding included
    function: str = STATS  # or the name of an objective
    option: str = "plain"
    sets: str = ""  # how wide the recorded supports are
    dtype: torch.dtype = torch.float32
    backend: str = "torch"
    inplace: bool = False
    cut: bool = False  # logits are [:, :-1] of a longer tensor
    vocab: int = VOCAB


class Found(NamedTuple):
    """The results of a call by name, and the gradient of its logits."""

    results: dict[str, torch.Tensor]
    gradient: torch.Tensor


def sets_of(kind: str, targets: torch.Tensor, g: torch.Generator) -> fastrl.SamplingMask:
    """Narrow ones are gathered; "one shard": no entry outside the target's neighbourhood; some rows are unrecorded."""
    rows = []
    for i, y in enumerate(targets.flatten().tolist()):
        narrow, wide = 1 + 5 * (i % 3), 70 + 30 * (i % 3)
        size = {"narrow": narrow, "wide": wide, "mixed": (0, 1, 90, 5, 0, VOCAB)[i % 6]}.get(kind, 0)
        ids = torch.randperm(VOCAB, generator=g)[:size].tolist()
        if kind == "one side":  # more than 64 are wide; the other half of the vocabulary has none
            ids = [*range(0, 100 - 95 * (i % 2))] if y < VOCAB // 2 else [*range(VOCAB - 100 + 95 * (i % 2), VOCAB)]
        rows.append([y, *ids] if ids else [])
    return fastrl.SamplingMask.from_lists(rows)


def posed(case: Case) -> tuple[torch.Tensor, dict[str, Any], tuple[torch.Tensor, torch.Tensor]]:
    """Whole logits, the arguments, and by what log-probabilities and entropies are multiplied."""
    sets = (lambda targets, g: sets_of(case.sets, targets, g)) if case.sets else None
    problem = Problem("cpu", size=(B, T, 8, case.vocab), mask=MASK, sets=sets)
    logits = linear(*problem.head.values()).to(case.dtype)
    logits[0, 1, : case.vocab // 2] = -torch.inf  # whole shards, and the target's logit at times
    logits[0, 1, problem.targets[0, 1]] = 3.0
    arguments = {k: x for k, x in problem.arguments.items() if case.function != STATS or k in ("targets", "mask")}
    arguments |= {k: x for k, x in problem.arguments.items() if k == "sampling_mask"}
    return logits, arguments | options_of(case), (torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.5, 0.5]]), torch.rand(B, T))


def options_of(case: Case) -> dict[str, Any]:
    options = {
        "plain": {},
        "all": {"temperature": 0.7, "logit_scale": 1.5, "softcap": 8.0},
        "per token": {"temperature": 0.5 + torch.arange(B * T).view(B, T) / 8},
    }
    return dict(options[case.option])


def called(case: Case, logits: torch.Tensor, arguments: dict[str, Any], upstream: Any, **group: Any) -> Found:
    """One call and its backward."""
    leaf = logits.clone().requires_grad_()
    given = leaf * 1
    if case.cut:
        given = torch.cat([leaf, torch.full_like(leaf[:, :1], torch.nan)], 1)[:, :-1]
    with fastrl.use_backend(case.backend):
        if case.function == STATS:
            out: Any = fastrl.token_logprobs(given, entropy=True, inplace=case.inplace, **arguments, **group)
            loss = (upstream[0] * out.logprobs + upstream[1] * out.entropy).sum()
        else:
            objective = OBJECTIVES[case.function].replace(entropy_coef=0.01)
            out = fastrl.logits_policy_loss(given, objective=objective, inplace=case.inplace, **arguments, **group)
            loss = out.loss
        loss.backward()
    results = {"loss": loss.detach(), "logprobs": out.logprobs.detach(), "entropy": out.entropy.detach()}
    return Found(results | getattr(out, "metrics", {}), leaf.grad)


def over_ranks(cases: Sequence[Case]) -> list[tuple[Found | None, int, int]]:
    """What each case gives on this rank, None if it is not in the group, and the collectives of forward + backward."""
    found = []
    for case in cases:
        torch.manual_seed(0)
        group = group_of(*range(len(case.shards)))
        if group is None:
            found.append(None)
            continue
        logits, arguments, upstream = posed(case)
        held = torch.full((B, T, sum(case.shards)), torch.nan, dtype=case.dtype)  # padding is not read
        held[..., : case.vocab] = logits
        rank = dist.get_rank()
        own = held.split(case.shards, -1)[rank]
        padded = {"vocab_size": case.vocab} if sum(case.shards) > case.vocab else {}
        found.append(called(case, own, arguments, upstream, tp_group=group, **padded))
    return found


def whole(found: Sequence[Found], case: Case) -> Found:
    """What all ranks found together: one result, which must have the same bits on all of them."""
    first = found[0]
    for other in found:
        for name, x in first.results.items():
            assert torch.equal(x.nan_to_num(), other.results[name].nan_to_num()), f"{name} differs between ranks"
    gradient = torch.cat([x.gradient for x in found], -1)
    assert not gradient[..., case.vocab :].any(), "padding"
    return Found(first.results, gradient[..., : case.vocab])


def check_all(ranks: Ranks, cases: Sequence[Case]) -> None:
    """Every case over ranks gives what one process gives."""
    by_rank = ranks.run(over_ranks, cases)
    for i, case in enumerate(cases):
        found = whole([x[i] for x in by_rank if x[i] is not None], case)
        torch.manual_seed(0)
        expected = called(case, *posed(case))

        def named(text: str, case: Case = case) -> str:
            return f"{case}: {text}"

        assert found.results.keys() == expected.results.keys()
        torch.testing.assert_close(found.results, expected.results, msg=named, equal_nan=True, **CLOSE)
        torch.testing.assert_close(found.gradient, expected.gradient, msg=named, **CLOSE)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_statistics_equal_those_of_one_process(ranks: Ranks, backend: str) -> None:
    shards = (EVEN, UNEVEN, EMPTY, PADDED, (VOCAB,))
    cases = [
        Case(x, option=option, backend=backend, inplace=inplace, cut=cut)
        for x in shards
        for option, inplace, cut in (("plain", False, True), ("all", True, False), ("per token", True, True))
    ]
    check_all(ranks, cases)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_all_presets_equal_those_of_one_process(ranks: Ranks, backend: str) -> None:
    check_all(ranks, [Case(UNEVEN if i % 2 else EMPTY, name, backend=backend) for i, name in enumerate(OBJECTIVES)])


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_sampling_masks_have_ids_of_the_whole_vocabulary(ranks: Ranks, backend: str) -> None:
    """Rows of which a rank has no entry, gathered and wide ones; rows that were not recorded among both."""
    cases = [
        Case(shards, function, option, sets, backend=backend, inplace=inplace)
        for shards in (EVEN, EMPTY, PADDED)
        for sets in ("narrow", "wide", "mixed", "one side")
        for function, option, inplace in ((STATS, "all", False), (STATS, "per token", True), ("GSPO", "plain", True))
    ]
    check_all(ranks, cases)


def test_kernels_equal_those_of_one_process(ranks: Ranks) -> None:
    """In Triton's interpreter, so few and small."""
    check_all(
        ranks,
        [
            Case((20, 0, 17, 4), backend="triton", vocab=37, option="all", inplace=True),
            Case((254, 253), "GRPO", "plain", "mixed", backend="triton"),
        ],
    )


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_half_precision_is_as_good_as_torch(ranks: Ranks, backend: str) -> None:
    cases = [Case(x, "token_logprobs", o, dtype=d, backend=backend) for d in DTYPES for x in (UNEVEN, PADDED) for o in ("plain", "all")]
    by_rank = ranks.run(over_ranks, cases)
    for i, case in enumerate(cases):
        found = whole([x[i] for x in by_rank], case)
        torch.manual_seed(0)
        logits, arguments, upstream = posed(case)
        mask = arguments["mask"]
        given = (logits, arguments["targets"].clamp_min(0), upstream, mask)
        truth, same = (token_stats(*given, dtype=x, **options_of(case)) for x in (torch.float64, torch.float32))
        check_as_good(found, truth, same, case.dtype)


def check_as_good(found: Found, truth: Truth, same: Truth, dtype: torch.dtype) -> None:
    """A handful of float32 roundings more than torch; one of a gradient to its own dtype, like torch's."""
    margin = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for name in ("logprobs", "entropy"):
        assert_as_good_as_torch(found.results[name], getattr(truth, name), getattr(same, name), 2e-6, name)
    assert_as_good_as_torch(found.gradient, truth.gradient, same.gradient.to(dtype), margin, "gradient")


@pytest.mark.parametrize("shards", [EVEN, UNEVEN, EMPTY], ids=str)
def test_the_bits_are_those_of_slices_on_one_device(ranks: Ranks, shards: tuple[int, ...]) -> None:
    case = Case(shards, backend="cpp", option="all")
    found = whole([x[0] for x in ranks.run(over_ranks, [case]) if x[0] is not None], case)
    torch.manual_seed(0)
    logits, arguments, (a, b) = posed(case)
    targets, valid = arguments["targets"].view(-1), arguments["mask"].bool().view(-1)
    transform, row_kernels = Transform(0.7, None, 1.5, 8.0), kernels("cpp", logits)
    combined, start, slices, here = Combined(targets), 0, [], []
    for size in filter(None, shards):
        columns = logits[..., start : start + size]
        slices.append(torch.stack(row_kernels.row_statistics(columns, targets - start, valid, transform)))
        here.append((targets >= start) & (targets < start + size))
        start += size
    combined.add(fastrl.backend.contract.Statistics(*torch.stack(slices, 1)), torch.stack(here))
    stats = combined.finish()
    for name in ("logprobs", "entropy"):
        assert torch.equal(found.results[name].view(-1), getattr(stats, name).where(valid, 0.0)), name
    out, start = torch.empty_like(logits), 0
    for size in filter(None, shards):
        part = slice(start, start + size)
        row_kernels.row_gradient(
            logits[..., part], targets - start, valid, transform, stats, a.view(-1), b.view(-1), out[..., part]
        )
        start += size
    assert torch.equal(found.gradient, out)
