"""The torch.library side: schemas, fakes and autograd registrations hold, and whole graphs compile."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

import fastrl
from fastrl import linear as linear_folder
from fastrl import operators
from fastrl.backend.contract import Divergence, Entries, PairStatistics, Statistics, Support, Transform
from fastrl.linear import divergence, forward_gradient
from fastrl.linear import gathered as linear_entries
from fastrl.linear import operators as linear
from fastrl.linear import supports as support_linear
from fastrl.linear.head import Head
from fastrl.objectives.rows import RowInputs, RowObjective
from fastrl.operators import gathered, rows, support
from fastrl.operators.dense_support import DenseSupport
from fastrl.operators.operator import Operator
from fastrl.planning.tiling import Needs, PassBudget

SLOW = pytest.mark.slow
# A graph is the same whatever backend its operators call, and the interpreter takes its time.
TRITON = pytest.param("triton", marks=() if torch.cuda.is_available() else SLOW)
# The smallest sizes at which a batch, a shifted view, a mask and a vocabulary with padding differ from each other.
B, T, V, PADDING, H = 2, 3, 33, 2, 16


@pytest.fixture
def tensors(backend_device: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    made = {
        "logits": torch.randn(B, T + 1, V + PADDING, generator=g),
        "hidden": torch.randn(B, T, H, generator=g),
        "weight": torch.randn(V + PADDING, H, generator=g),
        "bias": torch.randn(V + PADDING, generator=g),
        "targets": torch.randint(V, (B, T), generator=g),
        "mask": torch.rand(B, T, generator=g) > 0.3,
    }
    return {k: v.to(backend_device) for k, v in made.items()}


@pytest.mark.parametrize("backend", ["cpp", pytest.param("torch", marks=SLOW), TRITON], indirect=True)
def test_opcheck(backend: str, tensors: dict[str, torch.Tensor]) -> None:
    logits = tensors["logits"][:, :-1]
    y, m = tensors["targets"].reshape(-1), tensors["mask"].reshape(-1)
    transform, budget = Transform(0.9, None, 1.1, 5.0), PassBudget(1 << 20, 1 << 20)
    stats = rows.row_statistics(logits, y, m, transform, V, backend, False)
    upstream = (stats.logprobs, stats.entropy)
    head = Head(tensors["hidden"].reshape(-1, H), tensors["weight"], tensors["bias"], V)
    leaves = Head.of((x.clone().requires_grad_() for x in head.tensors if x is not None), V)
    frozen = head.unpadded()._replace(hidden=leaves.hidden)
    a = torch.linspace(-1, 1, y.numel(), device=y.device)
    inputs = RowInputs(a, a.abs(), stats.logprobs - 0.1, entropy_weights=a.abs())
    objective = RowObjective("clip", (0.2, 0.2, 1e30, 1e30))
    row = (y, m, transform)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (rows.row_statistics, (logits.clone().requires_grad_(), *row, V, backend, False)),
        (rows.row_gradient, (logits, *row, V, stats, *upstream, backend)),
        (rows.row_gradient_, (logits.clone(), *row, V, stats, *upstream, backend)),
        (linear.linear_statistics, (leaves, *row, backend, -1, True, "recompute", budget, 0, False)),
        (linear.linear_statistics, (frozen, *row, backend, -1, True, "frozen-head", budget, 2, False)),
        (linear.linear_statistics, (frozen, *row, backend, -1, True, "frozen-head", budget, 2, True)),
        # Without a graph: its backward takes over the gradients that are outputs here, which opcheck would compare.
        *(
            (
                forward_gradient.linear_forward_gradient,
                (head, *row, inputs, objective, Needs(True, True, True), backend, -1, -1, budget, one_chunk),
            )
            for one_chunk in (False, True)
        ),
        (
            linear.linear_gradient,
            (head, *row, stats, *upstream, Needs(True, True, False), backend, -1, True, "two-pass", budget),
        ),
        (linear.combine_slopes, ([head.hidden, 2 * head.hidden], list(upstream))),
    ]
    entries_of = head.unpadded().weight
    teacher = Head(torch.cat([head.hidden, head.hidden], 1), torch.cat([entries_of, entries_of], 1), None)
    pair = (teacher, m, transform, Transform(1.1), Divergence("jsd", 0.3))
    passes = (False, backend, -1, True, "recompute", budget)
    pair_stats = divergence.divergence_statistics(head, *pair, *passes)
    assert isinstance(pair_stats, PairStatistics)
    calls += [
        (divergence.divergence_statistics, (leaves, *pair, *passes)),
        (divergence.divergence_gradient, (head, *pair, pair_stats, a, Needs(True, True, False), *passes)),
        *(
            (
                divergence.divergence_forward_gradient,
                (head, *pair, a, Needs(True, True, True), False, backend, -1, -1, budget, one_chunk),
            )
            for one_chunk in (False, True)
        ),
    ]
    # The second row has no set, and the third a wide one; the others' entries are gathered.
    ids = [[int(t)] if i not in (1, 2) else [] for i, t in enumerate(y)]
    narrow = fastrl.SamplingMask.from_lists(ids, y.device)
    whole = fastrl.SamplingMask.from_lists([[int(y[2]), 3, 9] if i == 2 else [] for i in range(6)], y.device)
    dense = torch.tensor([0, 1, 1, 0, 0, 0], dtype=torch.bool, device=y.device)
    entries = Support(narrow.token_ids, narrow.offsets, ~dense)
    all_rows = torch.arange(6, device=y.device)
    from_logits, wide = (DenseSupport(whole.token_ids, whole.offsets, r) for r in (dense.nonzero()[:, 0], all_rows))
    *sparse, values = support.support_row_statistics(
        logits, y, None, transform, entries, from_logits, V, backend, False
    )
    gradient = (y, None, transform, entries, from_logits, V, values, Statistics(*sparse), *upstream, backend)
    calls += [
        *(
            (
                support.support_row_statistics,
                (logits.clone().requires_grad_(), y, d, transform, entries, w, V, backend, False),
            )
            for d, w in ((None, from_logits), (dense, None))
        ),
        (support.support_row_gradient, (logits, *gradient)),
        (support.support_row_gradient_, (logits.clone(), *gradient)),
        (
            support_linear.support_linear_statistics,
            (leaves, y, dense, transform, entries, wide, backend, 2, "recompute", budget),
        ),
        (
            support_linear.support_linear_gradient,
            (
                *(head, y, dense, transform, entries, wide, values, Statistics(*sparse), *upstream),
                *(Needs(True, False, True), backend, "two-pass", budget),
            ),
        ),
        (support_linear.support_linear_loss, (leaves, y, transform, entries, inputs, objective, backend)),
        (
            support_linear.support_linear_products,
            (head, entries, values, values.new_tensor(0.5), Needs(True, True, True), backend),
        ),
    ]
    pairs = 2 * torch.arange(7, device=y.device)
    free, members = (Entries(torch.stack([y, x], 1).int().view(-1), pairs) for x in ((y + 1) % V, y * 0 - 1))
    for row_supports in ((None, None, None), (None, entries, from_logits)):
        wanted, valid = (free, m) if row_supports[1] is None else (members, None)
        given = (wanted, valid, transform, *row_supports)
        found = gathered.gathered_rows(logits, *given, V, backend, False)
        again = (*given, V, backend, found, found.logprobs)
        calls += [
            (gathered.gathered_rows, (logits.clone().requires_grad_(), *given, V, backend, False)),
            (gathered.gathered_rows_gradient, (logits, *again)),
            (gathered.gathered_rows_gradient_, (logits.clone(), *again)),
        ]
    plans = (("recompute", leaves, (dense, entries, wide)), ("frozen-head", frozen, (None, None, None)))
    for plan, given_head, row_supports in plans:
        given = (free if row_supports[1] is None else members, None, transform, *row_supports, backend)
        results = linear_entries.linear_gathered(head, *given, -1, plan, budget)
        upstreams = (plan, budget, results, results.logprobs, Needs(True, False, False))
        calls += [
            (linear_entries.linear_gathered, (given_head, *given, -1, plan, budget)),
            (linear_entries.linear_gathered_gradient, (head, *given, *upstreams)),
        ]
    assert every_operator() == {operator for operator, _ in calls}
    for operator, arguments in calls:
        overload = getattr(torch.ops.fastrl, operator.__name__).default
        torch.library.opcheck(overload, tuple(operator.unpacked(*arguments)))


def every_operator() -> set[Operator[..., Any]]:
    names = [f"{p.__name__}.{m.name}" for p in (operators, linear_folder) for m in iter_modules(p.__path__)]
    return {x for name in names for x in vars(import_module(name)).values() if isinstance(x, Operator)}


def test_cuda_graphs_leave_out_what_may_wait_for_the_gpu() -> None:
    made = [getattr(torch.ops.fastrl, operator.__name__).default for operator in every_operator()]
    waiting = {op._opname for op in made if torch.Tag.cudagraph_unsafe in op.tags}
    assert waiting == {
        *("linear_statistics", "linear_gradient", "linear_forward_gradient", "linear_gathered"),
        *("linear_gathered_gradient", "support_linear_statistics", "support_linear_gradient"),
        *("divergence_statistics", "divergence_gradient", "divergence_forward_gradient"),
    }


def test_operators_take_tuples_by_order_or_by_name() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (6,))
    by_order = rows.row_statistics(logits, targets, None, Transform(), 5, "torch", False)
    by_name = rows.row_statistics(
        logits, targets, mask=None, transform=Transform(), vocab=5, backend="torch", consume=False
    )
    assert isinstance(by_name, Statistics) and all(map(torch.equal, by_name, by_order))
    with pytest.raises(
        TypeError, match="takes logits, targets, mask, transform, vocab, backend, consume; got 3 in order"
    ):
        rows.row_statistics(logits, targets, None)  # type: ignore[call-arg]
    arguments = torch.ops.fastrl.row_statistics.default._schema.arguments
    fields = ["transform_temperature", "transform_temperatures", "transform_logit_scale", "transform_softcap"]
    assert [x.name for x in arguments] == ["logits", "targets", "mask", *fields, "vocab", "backend", "consume"]


# Code of torch's own, whose vectors are not the subject: to try which the processor has takes as long as to compile it.
@inductor.patch({"cpp.vec_isa_ok": False})
@pytest.mark.parametrize("backend", ["cpp", pytest.param("torch", marks=SLOW), TRITON], indirect=True)
def test_fullgraph_compile(backend: str, tensors: dict[str, torch.Tensor]) -> None:
    """One graph, the numbers of eager, forward and backward; new temperatures do not break it."""
    torch.compiler.reset()  # graphs of the other backends count towards the limit of recompilations
    targets, mask = tensors["targets"], tensors["mask"]
    signs = torch.tensor([1.0, -1.0], device=targets.device)

    def from_logits(logits: torch.Tensor, temperature: float) -> torch.Tensor:
        s = fastrl.token_logprobs(
            logits[:, :-1], targets, mask=mask, entropy=True, temperature=temperature, softcap=5.0, vocab_size=V
        )
        assert s.entropy is not None
        return (1.3 * s.logprobs).sum() + s.entropy.square().sum()

    def from_hidden(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"mask": mask, "entropy": True, "temperature": 0.7, "vocab_size": V}
        s = fastrl.linear_token_logprobs(hidden, weight, targets, bias=bias, **options)
        assert s.entropy is not None
        return (1.3 * s.logprobs).sum() + s.entropy.square().sum()

    def logits_loss(logits: torch.Tensor, inplace: bool) -> torch.Tensor:
        return fastrl.logits_policy_loss(
            (2 * logits)[:, :-1],
            targets,
            objective=fastrl.SAPO(),
            advantages=signs,
            mask=mask,
            inplace=inplace,
            vocab_size=V,
        ).loss

    def hidden_loss(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, objective: Any, budget: str | None
    ) -> torch.Tensor:
        given: dict[str, Any] = {"objective": objective, "advantages": signs, "mask": mask, "memory_budget": budget}
        out = fastrl.linear_policy_loss(hidden, weight, targets, bias=bias, vocab_size=V, **given)
        return 3 * out.loss

    sets = fastrl.SamplingMask.from_lists([[int(y), 3] if i else [] for i, y in enumerate(targets.flatten())])
    sets = sets.to(targets.device)

    def masked_losses(logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        options: dict[str, Any] = {"objective": fastrl.SAPO(), "advantages": signs, "mask": mask, "vocab_size": V}
        options["sampling_mask"] = sets
        one = fastrl.logits_policy_loss(logits[:, :-1], targets, **options)
        return one.loss + 2 * fastrl.linear_policy_loss(hidden, weight, targets, bias=bias, **options).loss

    def divergence_of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, budget: str | None) -> Any:
        teacher = (2 * hidden.detach(), weight.detach() + 0.1)
        options: dict[str, Any] = {
            "kind": "jsd",
            "mask": mask,
            "softcap": 5.0,
            "memory_budget": budget,
            "vocab_size": V,
        }
        out = fastrl.linear_divergence(hidden, weight, *teacher, bias=bias, teacher_temperature=1.3, **options)
        return 3 * out.loss + 0 * out.per_token.sum()

    ids = torch.stack([targets, targets.roll(1), targets], -1)

    def several(logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        one = fastrl.gathered_logprobs(logits[:, :-1], ids, mask=mask, softcap=5.0, vocab_size=V)
        within = fastrl.gathered_logprobs(logits[:, :-1], ids[..., :1], sampling_mask=sets)
        other = fastrl.linear_gathered_logprobs(hidden, weight, ids, bias=bias, temperature=0.7, vocab_size=V)
        return (
            one.square().sum()
            + within.sum()
            + other.square().sum()
            + fastrl.linear_gathered_logprobs(hidden.detach() * 2, weight, sets, bias=bias).sum()
        )

    leaves = {k: tensors[k].requires_grad_() for k in ("logits", "hidden", "weight", "bias")}
    head = (leaves["hidden"], leaves["weight"], leaves["bias"])
    # Whole code for one loss from logits and one from hidden states; for the others the graph, in a tenth of the time.
    for function, arguments, compiler in (
        (from_logits, (leaves["logits"], 0.9), "aot_eager"),
        (from_hidden, head, "aot_eager"),
        (logits_loss, (leaves["logits"], False), "aot_eager"),
        (logits_loss, (leaves["logits"], True), "inductor"),
        (hidden_loss, (*head, fastrl.SAPO(entropy_coef=0.1), None), "inductor"),
        (hidden_loss, (*head, fastrl.SAPO(entropy_coef=0.1), "16MiB"), "aot_eager"),
        (hidden_loss, (*head, fastrl.DeepSeekV32(kl_coef=0.0, off_policy_delta=0.1), None), "aot_eager"),
        (hidden_loss, (*head, fastrl.FIPO(), None), "aot_eager"),
        (hidden_loss, (*head, fastrl.KLCov(fraction=0.3), None), "aot_eager"),
        (masked_losses, (leaves["logits"], *head), "aot_eager"),
        (divergence_of, (*head, None), "aot_eager"),
        (divergence_of, (*head, "16MiB"), "aot_eager"),
        (several, (leaves["logits"], *head), "aot_eager"),
    ):
        wanted = [x for x in arguments if isinstance(x, torch.Tensor)]
        compiled = torch.compile(function, fullgraph=True, backend=compiler)
        eager, value = function(*arguments), compiled(*arguments)
        torch.testing.assert_close(value, eager)
        for actual, expected in zip(
            torch.autograd.grad(value, wanted), torch.autograd.grad(eager, wanted), strict=True
        ):
            torch.testing.assert_close(actual, expected)
    again = torch.compile(from_logits, fullgraph=True, backend="aot_eager")
    for temperature in (0.8, 0.7):
        torch.testing.assert_close(again(leaves["logits"], temperature), from_logits(leaves["logits"], temperature))


def test_autocast_casts_the_head_as_linear_does(backend: str, tensors: dict[str, torch.Tensor]) -> None:
    hidden, weight = tensors["hidden"].requires_grad_(), tensors["weight"].requires_grad_()
    with torch.autocast(hidden.device.type, torch.bfloat16):
        out = fastrl.linear_token_logprobs(hidden, weight, tensors["targets"])
        loss = fastrl.linear_policy_loss(
            hidden, weight, tensors["targets"], objective=fastrl.SAPO(), advantages=torch.ones(B, device=hidden.device)
        )
    same = fastrl.linear_token_logprobs(hidden.bfloat16(), weight.bfloat16(), tensors["targets"])
    assert torch.equal(out.logprobs, same.logprobs) and torch.equal(loss.logprobs, same.logprobs)
    loss.loss.backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32 and weight.grad.abs().sum() > 0


def test_linear_losses_compile_whole_without_a_forced_backend(device: str) -> None:
    """As users call them: nothing is looked up, imported or read from the machine in the graph."""
    torch.compiler.reset()
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(2, 3, 8, generator=g).to(device), torch.randn(33, 8, generator=g).to(device)
    targets, signs = torch.randint(33, (2, 3), generator=g).to(device), torch.tensor([1.0, -1.0], device=device)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, objective: Any, budget: str | None) -> torch.Tensor:
        stats = fastrl.linear_token_logprobs(hidden, weight, targets, memory_budget=budget)
        out = fastrl.linear_policy_loss(
            hidden, weight, targets, objective=objective, advantages=signs, memory_budget=budget
        )
        return out.loss + stats.logprobs.sum() + fastrl.linear_cross_entropy(hidden, weight, targets)

    for objective, budget in ((fastrl.DAPO(), None), (fastrl.GSPO(), "32MiB")):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        eager = loss(*leaves, objective, budget)
        value = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves, objective, budget)
        torch.testing.assert_close(value, eager)
        for a, e in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(eager, leaves), strict=True):
            torch.testing.assert_close(a, e)
