"""The divergence between a student's head and a teacher's: inputs, float64 results, and who computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.bench import plain
from fastrl.bench.ceilings import products
from fastrl.bench.contenders import (
    COMPILED,
    EAGER,
    Contender,
    Function,
    Result,
    Run,
    Unavailable,
    Workload,
    differentiated,
    without_results,
)
from fastrl.bench.problems import Expected, Size, checked_rows, chunks, normal_head
from fastrl.planning.budget import BudgetTooSmall

_GIB = 1 << 30
_BUDGET = "64MiB"


@dataclass(frozen=True)
class DivergenceProblem:
    """Hidden states and heads of a student and of a wider or narrower teacher, over one vocabulary."""

    student: dict[str, Tensor]  # "hidden" (N, H) and "weight" (V, H)
    teacher: tuple[Tensor, Tensor]  # (N, W) and (V, W)

    @property
    def size(self) -> Size:
        """The student's size."""
        hidden, weight = self.student.values()
        return Size(hidden.shape[0], hidden.shape[1], len(weight), hidden.element_size())

    @property
    def flops(self) -> int:
        """The floating-point operations of the student's three products and the teacher's one."""
        size = self.size
        return 3 * size.product_flops + size._replace(hidden=self.teacher[0].shape[1]).product_flops

    def expected(self, kind: str, beta: float) -> Expected:
        """The mean divergence, and its gradients for some rows of the hidden states and of the weight."""
        hidden, weight = (x.double() for x in self.student.values())
        teacher_weight = self.teacher[1].double()
        count, vocab = len(hidden), len(weight)
        rows, entries = (checked_rows(n, hidden.device) for n in (count, vocab))
        total, d_hidden, d_weight = hidden.new_zeros(()), torch.zeros_like(hidden), weight[entries] * 0
        for part in chunks(count, vocab, hidden.device):
            logits = (hidden[part] @ weight.t()).requires_grad_()
            teacher_logits = self.teacher[0][part].double() @ teacher_weight.t()
            loss = plain.divergence(logits, teacher_logits, kind, beta).sum() / count
            (gradient,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            d_hidden[part] = gradient @ weight
            d_weight += gradient[:, entries].t() @ hidden[part]
        return Expected(total, None, None, {"hidden": (rows, d_hidden[rows]), "weight": (entries, d_weight)})


def divergence_problem(
    n: int, width: int, vocab: int, teacher_width: int, dtype: torch.dtype, device: str
) -> DivergenceProblem:
    """Normal hidden states and heads; deterministic for given arguments."""
    generator = torch.Generator(device).manual_seed(0)
    hidden, weight = normal_head(n, width, vocab, dtype, generator)
    teacher = normal_head(n, teacher_width, vocab, dtype, generator)
    return DivergenceProblem({"hidden": hidden, "weight": weight}, teacher)


def workloads(problem: DivergenceProblem) -> list[Workload]:
    """The mean divergence and its gradients for the student, by kind."""
    kinds = {"forward KL": ("forward_kl", 0.0), "reverse KL": ("reverse_kl", 1.0), "JSD": ("jsd", 0.5)}
    return [
        Workload(
            name,
            f"the mean {name} of a student's and a teacher's distribution, and its gradients for the student's hidden"
            " states and weight",
            [_contender(problem, *one, kind, beta) for one in _CONTENDERS],
            problem.expected(kind, beta),
            tuple(problem.student),
            workload_flops=problem.flops,
        )
        for name, (kind, beta) in kinds.items()
    ]


def head_products(problem: DivergenceProblem) -> Contender:
    """The student's three matrix products and the teacher's one alone."""
    size = problem.size

    def prepare() -> Run:
        student = products(problem.student["hidden"], problem.student["weight"], range(3))
        teacher = products(*problem.teacher, [0])
        return without_results(lambda: (student.call(), teacher.call()))

    return Contender("the four matrix products alone", prepare, 2 * size.once + 2 * size.gradients)


#: (kind, beta in Liger's and TRL's sense) -> a function of the student's hidden and weight, and the teacher's
_Make = Callable[[str, float], Function]


def _contender(
    problem: DivergenceProblem, name: str, make: _Make, needed: Callable[[Size], int], kind: str, beta: float
) -> Contender:
    def prepare() -> Run:
        function = make(kind, beta)
        inputs = {name: x.detach().requires_grad_() for name, x in problem.student.items()}
        return differentiated(lambda hidden, weight: function(hidden, weight, *problem.teacher), inputs)

    return Contender(name, prepare, needed(problem.size), ours=name.startswith("fastrl"))


def _ours(budget: str | None, kind: str, beta: float) -> Function:
    options: dict[str, Any] = {"kind": kind, "memory_budget": budget} | ({"beta": beta} if kind == "jsd" else {})

    def function(*inputs: Tensor) -> Result:
        try:
            return Result(fastrl.linear_divergence(*inputs, **options).loss)
        except BudgetTooSmall as error:
            raise Unavailable(str(error)) from None  # a valid result, not an error

    return function


def _plain(compile: bool, kind: str, beta: float) -> Function:
    def loss_of(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
        teacher_logits = torch.nn.functional.linear(teacher_hidden, teacher_weight)
        return plain.divergence(torch.nn.functional.linear(hidden, weight), teacher_logits, kind, beta).mean()

    function: Callable[..., Tensor] = loss_of
    if compile:
        torch.compiler.reset()  # earlier shapes would count towards the recompilation limit
        function = torch.compile(loss_of, fullgraph=True, dynamic=False)
    return lambda *inputs: Result(function(*inputs))


def _liger(kind: str, beta: float) -> Function:
    """Liger's chunked distillation loss without its cross-entropy, with its default chunks."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss_of = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta)

    def function(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Result:
        labels = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
        return Result(loss_of(hidden, weight, teacher_hidden, teacher_weight, labels))

    return function


def _trl(kind: str, beta: float) -> Function:
    """TRL's divergence in tiles of 4096 x 32768, which also computes the student's entropies."""
    divergence: Any = import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction

    def function(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Result:
        per_token, _ = divergence.apply(hidden, weight, None, teacher_hidden, teacher_weight, None, beta)
        return Result(per_token.mean())

    return function


_CONTENDERS: list[tuple[str, _Make, Callable[[Size], int]]] = [
    ("fastrl", partial(_ours, None), lambda s: 2 * s.gradients + 2 * _GIB),
    (f"fastrl, {_BUDGET}", partial(_ours, _BUDGET), lambda s: 2 * s.gradients),
    (EAGER, partial(_plain, False), lambda s: 2 * s.once + 8 * s.wide + s.gradients),
    (COMPILED, partial(_plain, True), lambda s: 2 * s.once + 4 * s.wide + s.gradients),
    ("Liger LigerFusedLinearJSDLoss", _liger, lambda s: 2 * s.gradients + 2 * _GIB),
    ("TRL chunked divergence", _trl, lambda s: 2 * s.gradients + 2 * _GIB),
]
