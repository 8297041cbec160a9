"""One loss from hidden states and the head, at several token counts and within several memory budgets."""

from __future__ import annotations

from dataclasses import replace

import fastrl
from fastrl.bench import heads, plain
from fastrl.bench.measure import Row
from fastrl.bench.problems import LinearProblem
from fastrl.bench.workloads import Workload

BUDGETS = ("64MiB", "256MiB", "1GiB")
_NO_BUDGET = "fastrl, no budget"
#: With fewer tokens, fixed costs hide what grows with the number of tokens.
_FEWEST_TOKENS = 256


def token_counts(most: int) -> list[int]:
    """An eighth, a quarter, a half and all of `most` tokens, ascending; none below 256 except `most` itself."""
    fewest = min(most, _FEWEST_TOKENS)
    return sorted({max(most // part, fewest) for part in (8, 4, 2, 1)})


def workload(problem: LinearProblem) -> Workload:
    """The linear suite's loss and gradients: fastrl without a budget and within each one, and the other contenders."""
    first, *others = heads.policy_candidates()
    candidates = [replace(first, name=_NO_BUDGET), *(heads.ours(budget) for budget in BUDGETS), *others]
    return Workload(
        f"{problem.tokens.count} tokens",
        "PPO's clipped loss (off-policy) and its gradients for the hidden states and the weight",
        [heads.contender(problem, candidate) for candidate in candidates],
        problem.expected_loss(),
        workload_flops=6 * problem.hidden.numel() * problem.weight.shape[0],
    )


def add_plans(rows: list[Row], problem: LinearProblem) -> None:
    """Fill in the plan that each measured row of fastrl took."""
    size = heads.size_of(problem)
    budgets = {_NO_BUDGET: None, **{heads.ours(budget).name: budget for budget in BUDGETS}}
    for row in rows:
        if row.contender in budgets and row.skipped is None:
            plans = fastrl.plan_memory(
                size.tokens,
                size.hidden,
                size.vocab,
                problem.weight.dtype,
                budgets[row.contender],
                objective=fastrl.PPO(clip=plain.CLIP),
                device=problem.weight.device.type,
            )
            row.plan = plans.chosen.name
