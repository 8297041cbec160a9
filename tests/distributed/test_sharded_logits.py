"""Losses from logits whose vocabulary lies over ranks, against one process that holds the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from objectives import OBJECTIVES
from problem import CLOSE, Problem
from ranks import Ranks, group_of
from torch.nn.functional import linear
from vocabulary import Truth, assert_as_good_as_torch, token_stats

import fastrl
from fastrl.backend.choice import row_functions
from fastrl.backend.contract import Transform
from fastrl.distributed import groups
from fastrl.passes.combined import Combined

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


def over_ranks(cases: Sequence[Case]) -> list[Found | None]:
    """What each case gives on this rank, None if it is not in the group."""
    found: list[Found | None] = []
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


def test_all_objectives_equal_those_of_one_process(ranks: Ranks) -> None:
    cases = [Case(UNEVEN, name, backend="cpp", inplace=i % 2 == 0) for i, name in enumerate(OBJECTIVES)]
    check_all(ranks, cases + [Case(EMPTY, name) for name in ("GRPO", "GSPO")])


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
    cases = [
        Case(x, option=option, dtype=dtype, backend=backend)
        for dtype in DTYPES
        for x in (UNEVEN, PADDED)
        for option in ("plain", "all")
    ]
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
    transform, row_kernels = Transform(0.7, None, 1.5, 8.0), row_functions("cpp", logits)
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


# --- what goes wrong, and what a call costs ---------------------------------------------------------------------------

Y = torch.tensor([3, 5, 1, 0])  # 5 is the first entry of the second rank


def shared(rank: int, width: int = 5) -> torch.Tensor:
    """Logits (4, 5) of a rank, of two."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(rank))


def counts() -> tuple[int, int, int] | None:
    """Collectives of a forward, of its backward, and of one without tokens."""
    group, calls = group_of(0, 1), []
    if group is None:
        return None
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (groups, "_all_gather"),
            *((dist, name) for name in ("all_gather", "all_reduce", "broadcast", "reduce_scatter")),
        ):
            original = getattr(module, name)
            patch.setattr(
                module, name, lambda *a, original=original, name=name, **k: calls.append(name) or original(*a, **k)
            )
        logits = shared(dist.get_rank()).requires_grad_()
        out = fastrl.token_logprobs(logits, Y, entropy=True, tp_group=group)
        forward = len(calls)
        (out.logprobs.sum() + out.entropy.sum()).backward()
        backward = len(calls) - forward
        none = fastrl.token_logprobs(logits[:0], Y[:0], entropy=True, tp_group=group)
        assert none.logprobs.shape == (0,) and none.entropy.shape == (0,)
    return forward, backward, len(calls) - forward - backward


def test_collectives(ranks: Ranks) -> None:
    """The exchange between the hosts and the gather of the statistics; without tokens the exchange alone."""
    assert ranks.run(counts) == [(2, 0, 1)] * 2 + [None] * 2


def raised(function: Any, *arguments: Any, **more: Any) -> str:
    try:
        function(*arguments, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_calls() -> dict[str, str] | None:
    """One mistake on rank 1 at a time, or one that both make; after each a good call still works."""
    group, rank = group_of(0, 1), dist.get_rank()
    if group is None:
        return None
    wrong, x = rank == 1, shared(rank)
    used = x.clone().requires_grad_() * 1
    if wrong:
        fastrl.token_logprobs(used, Y % 5, inplace=True).logprobs.sum().backward()
    across = (x.t().contiguous().t() if wrong else x.clone()).requires_grad_()
    mask, other = (fastrl.SamplingMask.from_lists([[y], [5], [1, 4], []]) for y in (3, 4))
    calls: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
        "integers": (x.long() if wrong else x, {}),
        "strides": (across * 1, {"inplace": True}),
        "consumed": (used.detach(), {}),
        "targets": (x, {"targets": Y + wrong}),
        "mask": (x, {"mask": torch.tensor([1, 1, 0, 1 - wrong])}),
        "temperature": (x, {"temperature": 1.0 + wrong}),
        "dtype": (x.bfloat16() if wrong else x, {}),
        "sampling mask": (x, {"sampling_mask": mask if wrong else None}),
        "other sampling mask": (x, {"sampling_mask": mask if wrong else other}),
        "start": (x, {"vocab_start": 4 if wrong else None}),
        "size": (x, {"vocab_size": 11}),
        "outside": (x, {"targets": Y + 5}),
        "unsupported": (x, {"sampling_mask": other}),
    }
    found = {}
    for name, (logits, changes) in calls.items():
        found[name] = raised(fastrl.token_logprobs, logits, **({"targets": Y, "tp_group": group} | changes))
        assert raised(fastrl.token_logprobs, x, Y, tp_group=group) == "nothing"
    loss = {"objective": fastrl.GRPO(kl_coef=0), "advantages": torch.ones(1), "tp_group": group}
    for name, changes in (
        ("objective", {"objective": fastrl.CISPO(cap=3.0)}),
        ("advantages", {"advantages": torch.ones(3)}),
    ):
        found[name] = raised(fastrl.logits_policy_loss, x, Y, **(loss | (changes if wrong else {})))
        assert raised(fastrl.logits_policy_loss, x, Y, **loss) == "nothing"
    return found


#: Errors of rank 1 alone; rank 0 is told.
ALONE = {
    "integers": "TypeError: logits must be one of torch.float32",
    "strides": "ValueError: inplace=True needs logits that are dense in the vocabulary",
    "consumed": "RuntimeError: the logits were consumed by an earlier call",
    "advantages": "ValueError: advantages",
}
SAME = "must be the same on every rank of tp_group, got"
BOTH = {
    "targets": f"ValueError: targets {SAME} shape (4,) with checksum",
    "mask": f"ValueError: mask {SAME} one with checksum",
    "temperature": f"ValueError: temperature {SAME} 1.0 on rank 0 and 2.0 on rank 1",
    "dtype": f"ValueError: dtype {SAME} torch.float32 on rank 0 and torch.bfloat16 on rank 1",
    "sampling mask": f"ValueError: sampling_mask {SAME} None on rank 0 and 4 rows with 4 ids",
    "other sampling mask": f"ValueError: sampling_mask {SAME} 4 rows with 4 ids with checksum",
    "start": "ValueError: vocab_start must be 5 on rank 1",
    "size": "ValueError: vocab_size must be from 1 to 10, the rows of all ranks, got 11",
    "outside": "IndexError: targets[1] is 10, outside [0, 10)",
    "unsupported": "ValueError: targets row 0 is 3, which is not in its sampling_mask set of 1 ids",
    "objective": f"ValueError: objective {SAME} Objective(gate=Clip(low=0.2, high=0.2,",
}


def test_an_error_on_one_rank_reaches_all_and_what_differs_is_named(ranks: Ranks) -> None:
    first, second, *_ = ranks.run(wrong_calls)
    assert first.keys() == second.keys() == {*ALONE, *BOTH}
    for name, text in ALONE.items():
        told = f"RuntimeError: rank 1 of tp_group raised {text}"
        assert second[name].startswith(text) and first[name].startswith(told), (name, first[name], second[name])
    for name, text in BOTH.items():
        assert first[name] == second[name] and first[name].startswith(text), (name, first[name], second[name])


def odd_values() -> Any:
    """A NaN on one rank, rows of -inf on one and on both, an invalid target where values are not read."""
    group, rank = group_of(0, 1), dist.get_rank()
    if group is None:
        return None
    x = shared(rank)
    x[0, 2] = torch.nan if rank == 0 else x[0, 2]
    x[1] = -torch.inf if rank == 1 else x[1]  # of which 5 is the target
    x[2] = -torch.inf if rank == 1 else x[2]
    leaf = x.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastrl.base.checks.values_are_checked", lambda x: False)  # as on a GPU
        out = fastrl.token_logprobs(leaf, Y.where(Y != 0, 10), entropy=True, tp_group=group)
    out.logprobs.sum().backward()
    return out.logprobs.detach(), out.entropy.detach(), leaf.grad


def test_what_is_not_finite_is_the_same_on_all_ranks(ranks: Ranks) -> None:
    (logprobs, entropy, gradient), second = ranks.run(odd_values)[:2]
    torch.testing.assert_close((logprobs, entropy), second[:2], rtol=0, atol=0, equal_nan=True)
    assert logprobs[0].isnan() and entropy[0].isnan(), "a NaN on rank 0, the target on rank 0"
    assert logprobs[1] == -torch.inf and entropy[1].isfinite(), "the target is -inf"
    expected = fastrl.token_logprobs(shared(0)[2:3], Y[2:3], entropy=True)
    torch.testing.assert_close((logprobs[2:3], entropy[2:3]), (expected.logprobs, expected.entropy), **CLOSE)
    assert logprobs[3].isnan(), "10 is outside the vocabulary"
    for part in (gradient, second[2]):
        assert part[0].isnan().all() and part[3].isnan().all() and part[2].isfinite().all()
    assert not second[2][2].any(), "columns of -inf"


def second_uses() -> list[str] | None:
    """What a second backward and a graph of the backward do."""
    group = group_of(0, 1)
    if group is None:
        return None
    leaf, found = shared(dist.get_rank()).requires_grad_(), []
    kept = fastrl.token_logprobs(leaf * 1, Y, tp_group=group).logprobs.sum()
    first = torch.autograd.grad(kept, leaf, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(kept, leaf, retain_graph=True)[0], first)
    found.append(raised(torch.autograd.grad, kept, leaf, create_graph=True))
    given = leaf * 1
    used = fastrl.token_logprobs(given, Y, inplace=True, tp_group=group).logprobs.sum()
    assert torch.equal(torch.autograd.grad(used, leaf, retain_graph=True)[0], first)
    assert torch.equal(given, first), "the gradient lies in the memory of the logits"
    found.append(raised(used.backward))
    with torch.no_grad():
        out = fastrl.token_logprobs(leaf, Y, inplace=True, tp_group=group)
    assert not out.logprobs.requires_grad and out.entropy is None
    return found


def compiled() -> list[str] | None:
    """A call under torch.compile, and one that is kept out of it; in one process, as it takes seconds to import."""
    alone = group_of(0)
    if alone is None:
        return None

    def scored(x: torch.Tensor) -> torch.Tensor:
        return fastrl.token_logprobs(x, Y % 5, tp_group=alone).logprobs

    apart = torch.compiler.disable(scored)
    return [raised(torch.compile(f, backend="eager"), shared(0)) for f in (scored, lambda x: 2 * apart(x))]


def test_a_second_backward(ranks: Ranks) -> None:
    first, second, *_ = ranks.run(second_uses)
    assert first == second
    assert first[0].startswith("RuntimeError: this function is differentiable once")
    assert first[1].startswith("RuntimeError: the first backward used up what this loss had kept")


def test_a_compiled_call(ranks: Ranks) -> None:
    error, kept_out = ranks.run(compiled)[0]
    assert error.startswith("NotImplementedError: tp_group is not built for torch.compile")
    assert kept_out == "nothing"


def test_options_go_with_a_group() -> None:
    with pytest.raises(ValueError, match="vocab_start goes with tp_group, got 0 without one"):
        fastrl.token_logprobs(shared(0), Y % 5, vocab_start=0)
    with pytest.raises(TypeError, match=r"tp_group must be a torch\.distributed\.ProcessGroup, got object"):
        fastrl.token_logprobs(shared(0), Y % 5, tp_group=object())
    plain = fastrl.token_logprobs(shared(0), Y % 5)
    assert torch.equal(fastrl.token_logprobs(shared(0), Y % 5, reduce_hidden_grad=False).logprobs, plain.logprobs)
