"""The torch.library side: schemas, fakes and autograd registrations hold, and whole graphs compile."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

import fastrl
from fastrl import passes
from fastrl.backend.contract import Divergence, Entries, PairStatistics, Support, Transform
from fastrl.objectives.rows import Numbers, RowInputs, RowObjective
from fastrl.passes import forward_gradient, gathered, linear, logits, pairs
from fastrl.passes.head import Head, Run
from fastrl.passes.operator import Operator
from fastrl.passes.supports import RowOptions, Supports
from fastrl.planning.plans import Plan
from fastrl.planning.tiling import Call, Needs, Teacher

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
    x = tensors["logits"][:, :-1]
    y, m = tensors["targets"].reshape(-1), tensors["mask"].reshape(-1)
    transform, everything = Transform(0.9, None, 1.1, 5.0), Needs(True, True, True)
    stats = logits.row_statistics(x, y, RowOptions(m, transform), V, backend, False)
    upstream = (stats.logprobs, stats.entropy)
    head = Head(tensors["hidden"].reshape(-1, H), tensors["weight"], tensors["bias"], V)
    leaves = Head.of((t.clone().requires_grad_() for t in head[:3] if t is not None), V)
    frozen = head.unpadded()._replace(hidden=leaves.hidden)
    teacher = Head(head.hidden.repeat(1, 2), head.unpadded().weight.repeat(1, 2), None)
    call = Call(B * T, H, V, torch.float32, x.device.type, everything, slopes=2, teacher=Teacher(2 * H, 4))

    def plan(name: str, one_chunk: bool = False) -> Plan:
        own = call if name.startswith("pair") else call._replace(teacher=Teacher(0, 0))
        return Plan(name.removeprefix("pair "), own, 1 << 20, 1 << 20, one_chunk=one_chunk)

    a = torch.linspace(-1, 1, y.numel(), device=y.device)
    inputs = RowInputs(a, a.abs(), stats.logprobs - 0.1, entropy_weights=a.abs())
    objective = RowObjective("clip", numbers=Numbers(0.2, 0.2, 1e30, 1e30))
    row, two = (y, RowOptions(m, transform)), Needs(True, True, False)

    def run(name: str, one_chunk: bool = False, num_rows: int = -1) -> Run:
        return Run(backend, num_rows, plan(name, one_chunk))

    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (logits.row_statistics, (x.clone().requires_grad_(), *row, V, backend, False)),
        (logits.row_gradient, (x, *row, V, stats, *upstream, backend)),
        (linear.linear_statistics, (leaves, *row, run("recompute"), True, False)),
        *(
            (linear.linear_statistics, (frozen, *row, run("frozen-head"), True, all_statistics))
            for all_statistics in (False, True)
        ),
        # Without a graph: its backward takes over the gradients that are outputs here, which opcheck would compare.
        *(
            (
                forward_gradient.linear_forward_gradient,
                (head, y, m, transform, inputs, objective, run("forward-gradient", one_chunk), -1),
            )
            for one_chunk in (False, True)
        ),
        (linear.linear_gradient, (head, *row, stats, *upstream, two, run("two-pass"))),
        (linear.combine_slopes, ([head.hidden, 2 * head.hidden], list(upstream))),
    ]
    pair = (teacher, m, transform, Transform(1.1), Divergence("jsd", 0.3))
    pair_stats = pairs.divergence_statistics(head, *pair, run("pair recompute"), True)
    assert isinstance(pair_stats, PairStatistics)
    calls += [
        (pairs.divergence_statistics, (leaves, *pair, run("pair recompute"), True)),
        (pairs.divergence_gradient, (head, *pair, pair_stats, a, two, run("pair recompute"))),
        *(
            (pairs.divergence_forward_gradient, (head, *pair, a, run("pair forward-gradient", one_chunk), -1))
            for one_chunk in (False, True)
        ),
    ]
    # The second row has no set, and the third a wide one; the others' entries are gathered.
    ids = [[int(t)] if i not in (1, 2) else [] for i, t in enumerate(y)]
    narrow = fastrl.SamplingMask.from_lists(ids, y.device)
    whole = fastrl.SamplingMask.from_lists([[int(y[2]), 3, 9] if i == 2 else ids[i] for i in range(6)], y.device)
    dense = torch.tensor([0, 1, 1, 0, 0, 0], dtype=torch.bool, device=y.device)
    entries = Support(narrow.token_ids, narrow.offsets, ~dense)
    supports = Supports(entries, dense, Entries(whole.token_ids, whole.offsets), dense.nonzero()[:, 0])
    wide = RowOptions(None, transform, supports)
    sparse = logits.row_statistics(x, y, wide, V, backend, False)
    over = (sparse.logprobs, sparse.entropy)
    calls += [
        *(
            (logits.row_statistics, (x.clone().requires_grad_(), y, options, V, backend, False))
            for options in (wide, wide._replace(supports=supports._replace(wide=None)))
        ),
        (logits.row_gradient, (x, y, wide, V, sparse, *over, backend)),
        (linear.linear_statistics, (leaves, y, wide, run("recompute", num_rows=2), True, False)),
        (linear.linear_gradient, (head, y, wide, sparse, *over, Needs(True, False, True), run("two-pass"))),
        (linear.support_linear_loss, (leaves, y, transform, entries, inputs, objective, backend)),
        (
            linear.support_linear_products,
            (head, entries, sparse.values, sparse.values.new_tensor(0.5), everything, backend),
        ),
    ]
    two_each = 2 * torch.arange(7, device=y.device)
    free, members = (Entries(torch.stack([y, t], 1).int().view(-1), two_each) for t in ((y + 1) % V, y * 0 - 1))
    for given in ((free, RowOptions(m, transform)), (members, wide)):
        results = gathered.gathered_rows(x, *given, V, backend, False)
        calls += [
            (gathered.gathered_rows, (x.clone().requires_grad_(), *given, V, backend, False)),
            (gathered.gathered_rows_gradient, (x, *given, V, backend, results, results.logprobs)),
        ]
    one_slope = plan("frozen-head")._replace(call=plan("").call._replace(slopes=1))
    for its_run, its_head, options, wanted in (
        (run("recompute"), leaves, wide, members),
        (Run(backend, -1, one_slope), frozen, RowOptions(None, transform), free),
    ):
        of_head = (wanted, options, its_run)
        found = gathered.linear_gathered(head, *of_head)
        calls += [
            (gathered.linear_gathered, (its_head, *of_head)),
            (gathered.linear_gathered_gradient, (head, *of_head, found, found.logprobs, Needs(True, False, False))),
        ]
    assert every_operator() == {operator for operator, _ in calls}
    for operator, arguments in calls:
        overload = getattr(torch.ops.fastrl, operator.__name__).default
        torch.library.opcheck(overload, tuple(operator.unpacked(dict(zip(operator._names, arguments, strict=True)))))


def every_operator() -> set[Operator[..., Any]]:
    names = [f"{passes.__name__}.{m.name}" for m in iter_modules(passes.__path__)]
    return {x for name in names for x in vars(import_module(name)).values() if isinstance(x, Operator)}


def test_cuda_graphs_leave_out_what_may_wait_for_the_gpu() -> None:
    made = [getattr(torch.ops.fastrl, operator.__name__).default for operator in every_operator()]
    waiting = {op._opname for op in made if torch.Tag.cudagraph_unsafe in op.tags}
    assert waiting == {
        *("linear_statistics", "linear_gradient", "linear_forward_gradient", "linear_gathered"),
        *("linear_gathered_gradient", "divergence_statistics"),
        *("divergence_gradient", "divergence_forward_gradient"),
    }


def test_operators_take_tuples_by_order_or_by_name() -> None:
    x, targets = torch.randn(2, 3, 5), torch.randint(5, (6,))
    options = RowOptions(None, Transform())
    by_order = logits.row_statistics(x, targets, options, 5, "torch", False)
    by_name = logits.row_statistics(x, targets, options=options, vocab=5, backend="torch", consume=False)
    assert isinstance(by_name, logits.RowStatistics) and all(map(torch.equal, by_name, by_order))
    names = "logits, targets, options, vocab, backend, consume"
    with pytest.raises(TypeError, match=f"takes {names}; got 3 in order"):
        logits.row_statistics(x, targets, options)  # type: ignore[call-arg]
    arguments = torch.ops.fastrl.row_statistics.default._schema.arguments
    fields = ["mask", *(f"transform_{name}" for name in Transform._fields)]
    fields += [f"supports_support_{name}" for name in ("token_ids", "offsets", "valid")]
    fields += ["supports_dense", "supports_wide_token_ids", "supports_wide_offsets", "supports_dense_rows"]
    options_fields = [f"options_{name}" for name in fields]
    assert [x.name for x in arguments] == ["logits", "targets", *options_fields, "vocab", "backend", "consume"]


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
