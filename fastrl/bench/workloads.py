"""What each suite computes: the workloads as tables of their candidates, expected results and least costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

from torch import Tensor

import fastrl
from fastrl.bench import candidates, plain
from fastrl.bench.candidates import BOTH, Candidate, ours
from fastrl.bench.contenders import Contender, Run, Workload, without_results
from fastrl.bench.problems import Expected, Problem

_LOGITS = ("logits",)
_LOSS = "PPO's clipped loss (off-policy)"
MANY_TOKENS = 65536


@dataclass(frozen=True)
class Definition:
    """A workload without its inputs."""

    name: str
    description: str
    candidates: list[Candidate]
    expected: Callable[[Problem], Expected]
    gradients: tuple[str, ...]  # the inputs for which they are formed
    of_statistics: bool = False  # whether they are those of log-probabilities and entropies, for arbitrary upstream
    passes: int | None = None  # over the logits, reading or writing, at the least
    products: bool = False  # whether its least cost is the matrix products, of the logits and of each gradient

    def on(self, problem: Problem) -> Workload:
        """The workload on a problem's inputs."""
        upstream = problem.tokens.upstream if self.of_statistics else None
        return Workload(
            self.name,
            self.description,
            [candidate.on(problem, self.gradients, upstream) for candidate in self.candidates],
            self.expected(problem),
            self.gradients,
            workload_bytes=None if self.passes is None else self.passes * problem.size.once,
            workload_flops=(1 + len(self.gradients)) * problem.size.product_flops if self.products else None,
        )


LOGITS = [
    Definition(
        "statistics and gradients",
        "log-probabilities and entropies, and the gradient of both (arbitrary upstream) in a fresh buffer",
        candidates.STATISTICS,
        Problem.expected_statistics,
        _LOGITS,
        of_statistics=True,
        passes=3,
    ),
    Definition(
        "loss and gradient", f"{_LOSS} and its gradient", candidates.LOSS, Problem.expected_loss, _LOGITS, passes=2
    ),
    Definition(
        "statistics",
        "log-probabilities and entropies, forward only",
        candidates.STATISTICS,
        Problem.expected_forward,
        (),
        passes=1,
    ),
    Definition(
        "cross-entropy from logits",
        "the mean cross-entropy of the targets (no policy loss) and its gradient",
        candidates.LOGITS_CROSS_ENTROPY,
        Problem.expected_cross_entropy,
        _LOGITS,
        passes=2,
    ),
]
#: At a size where the work itself is negligible.
OVERHEAD = Definition(
    "issue loss and gradient",
    f"the host's time to issue {_LOSS} and its backward, without waiting for a GPU",
    candidates.LOSS,
    Problem.expected_loss,
    _LOGITS,
)
OVERHEAD_OF_HEAD = [
    Definition(
        "issue linear loss and gradients",
        "the same from hidden states and the weight, with the gradients of both",
        [c for c in candidates.POLICY if c.ours or c.name == candidates.EAGER],
        Problem.expected_loss,
        BOTH,
    ),
    Definition(
        "issue linear log-probabilities and gradients",
        "the same of the mean log-probability",
        candidates.LINEAR_LOGPROBS,
        Problem.expected_cross_entropy,
        BOTH,
    ),
]
LINEAR = [
    Definition(
        "loss and gradients",
        f"{_LOSS} and its gradients for the hidden states and the weight",
        [*candidates.POLICY, candidates.LIGER_HOPPER_POLICY, candidates.APPLE_POLICY],
        Problem.expected_loss,
        BOTH,
        products=True,
    ),
    Definition(
        "cross-entropy",
        "the mean cross-entropy of the targets and its gradients for the hidden states and the weight",
        candidates.CROSS_ENTROPY,
        Problem.expected_cross_entropy,
        BOTH,
        products=True,
    ),
    Definition(
        "statistics",
        "log-probabilities and entropies, forward only",
        candidates.LINEAR_STATISTICS,
        Problem.expected_forward,
        (),
        products=True,
    ),
]
BUDGETS = ("64MiB", "256MiB", "1GiB")
#: The linear suite's loss and gradients, without a budget and within each one; its name is the number of tokens.
MEMORY = replace(
    LINEAR[0],
    candidates=[
        ours("fastrl, no budget"),
        *(ours(f"fastrl, {budget}", budget=budget) for budget in BUDGETS),
        *candidates.POLICY[1:],
    ],
)
OVER_SETS = Definition(
    "loss over recorded sets",
    f"{_LOSS} over recorded sets and its gradients for hidden states and weight",
    candidates.SETS_POLICY,
    Problem.expected_loss,
    BOTH,
)
WITHOUT_SETS = replace(
    OVER_SETS,
    name="loss over the whole vocabulary",
    description="the same without sets: what the sets save",
    candidates=candidates.POLICY[:1],
)


def plans(tokens: int) -> list[Definition]:
    """The loss by each plan; of many tokens, whose calls take a second, without and with the largest budget only."""

    def definition(name: str, description: str, *chosen: Candidate, gradients: tuple[str, ...] = BOTH) -> Definition:
        return Definition(name, description, [*chosen], Problem.expected_loss, gradients, products=True)

    both_gradients = "PPO's clipped loss (off-policy, nothing clipped) and its gradients for hidden states and weight"
    unlimited, largest = ours("fastrl, no budget"), ours("fastrl, budget 1GiB", budget="1GiB")
    if tokens >= MANY_TOKENS:
        return [definition("loss and gradients", both_gradients, unlimited, largest)]
    # A response's gradient needs the log-probabilities of the whole response first.
    gspo = ours("fastrl, whole-response", forced="whole-response", objective=fastrl.GSPO(plain.CLIP, plain.CLIP))
    ratios = definition("loss of sequence ratios and gradients", "GSPO's clipped loss and the same gradients", gspo)
    return [
        definition(
            "loss and gradients",
            both_gradients,
            unlimited,
            ours("fastrl, recompute", forced="recompute"),
            ours("fastrl, two-pass", forced="two-pass"),
            ours("fastrl, budget 512MiB", budget="512MiB"),
            largest,
        ),
        replace(ratios, expected=Problem.expected_sequence_loss),
        definition(
            "loss, frozen head",
            "PPO's clipped loss and its gradient for the hidden states alone",
            ours("fastrl, frozen head, no budget"),
            ours("fastrl, frozen head, frozen-head", forced="frozen-head"),
            gradients=("hidden",),
        ),
        definition(
            "forward only",
            "PPO's clipped loss without gradients, and log-probabilities and entropies alone",
            ours("fastrl, loss under no_grad"),
            ours("fastrl, linear_token_logprobs with entropy", objective=None),
            gradients=(),
        ),
    ]


TOP_P, TOP_K = 0.95, 50


def sampler_sets(logits: Tensor) -> list[Workload]:
    """The support that a truncating sampler keeps of logits (N, V): top-p alone, and top-k with top-p."""
    size, rows = logits.numel(), logits.shape[0]
    return [
        Workload(
            name,
            f"which entries of {rows} rows a sampler keeps",
            [
                Contender("fastrl SamplingMask.from_logits", partial(_sets, logits, top_k), 4 * size, ours=True),
                Contender("transformers' warpers", partial(_warpers, logits, top_k), 40 * size),
            ],
            None,
        )
        for name, top_k in ((f"top-p {TOP_P}", 0), (f"top-k {TOP_K}, top-p {TOP_P}", TOP_K))
    ]


def _sets(logits: Tensor, top_k: int) -> Run:
    return without_results(partial(fastrl.SamplingMask.from_logits, logits, top_p=TOP_P, top_k=top_k))


def _warpers(logits: Tensor, top_k: int) -> Run:
    transformers = import_module("transformers")
    warpers = [*([transformers.TopKLogitsWarper(top_k)] if top_k else []), transformers.TopPLogitsWarper(TOP_P)]
    wide = logits.float()  # like the scores in transformers' generate

    def warp() -> None:
        scores = wide
        for warper in warpers:
            scores = warper(None, scores)

    return without_results(warp)
