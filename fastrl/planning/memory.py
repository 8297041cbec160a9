"""`plan_memory`: which plan a linear loss takes within a memory budget, and what the others cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastrl.base import checks
from fastrl.base.devices import CPU, H100
from fastrl.objectives.objective import Objective
from fastrl.objectives.presets import GRPO
from fastrl.objectives.row_local import ANY, TOKEN, Given, scope, slopes
from fastrl.planning.budget import default_budget, parse_budget, text
from fastrl.planning.plans import Plan, applicable, choose, least_budget, within
from fastrl.planning.prices import plan_seconds
from fastrl.planning.tiling import NO_TEACHER, Call, Needs, Teacher, invariant_rows

#: The dtypes of hidden states and weight, by name.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INPUTS = ("hidden", "weight", "bias")
_USUAL = GRPO()


@dataclass(frozen=True)
class MemoryPlans:
    """The plans for one call; printing it shows them as a table."""

    budget: int
    """The memory budget in bytes."""
    chosen: Plan
    """The plan that the call takes: `name`, `units` (products over N x V x H), `flops`, `temporary_bytes`, `tiles`."""
    fitting: tuple[Plan, ...]
    """All plans that fit the budget."""
    least: dict[str, int]
    """For each plan that can compute the call: the smallest budget in bytes that it needs."""
    seconds: dict[str, float]
    """For each plan that fits: its time as modelled for an H100, or on a CPU for two cores."""

    @property
    def smallest_budget(self) -> int:
        """The smallest budget in bytes that any plan fits."""
        return min(self.least.values())

    def __str__(self) -> str:
        head = ("", "plan", "cost", "TFLOP", "time", "memory", "tiles (rows x vocabulary)")
        rows = [head, *(self._row(name) for name in self.least)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        least = f"{text(self.smallest_budget)} ({min(self.least, key=self.least.__getitem__)})"
        budget = f"budget {text(self.budget)} of temporary memory; the smallest possible is {least}"
        return "\n".join([*lines, "", budget])

    def _row(self, name: str) -> tuple[str, ...]:
        plan = next((plan for plan in self.fitting if plan.name == name), None)
        if plan is None:
            return ("", name, "", "", "", f"from {text(self.least[name])}", "")
        arrow, time = "->" if name == self.chosen.name else "", self.seconds[name] / self.seconds[self.chosen.name]
        tiles = ", ".join(f"{kind} {tile.rows} x {tile.columns}" for kind, tile in plan.tiles.items())
        costs = f"{plan.units}U", f"{plan.flops / 1e12:.3g}", f"{time:.2f}", text(plan.temporary_bytes)
        return (arrow, name, *costs, tiles)


def plan_memory(
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    budget: int | str | None = None,
    *,
    objective: Objective | Callable[..., Any] | None = _USUAL,
    gradients: Sequence[str] = ("hidden", "weight"),
    on_policy: bool = False,
    longest: int | None = None,
    kept: int = 0,
    unrecorded: int = 0,
    device: str | None = None,
    teacher_hidden: int | None = None,
    gathered: int = 0,
    logits_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> MemoryPlans:
    """Returns the plan that a loss from hidden states takes, and the cost of every plan.

    Args:
        tokens: number of unmasked tokens, N.
        hidden: width of the hidden states, H.
        vocab: vocabulary size, V.
        dtype: of the hidden states and the weight: float32, bfloat16 or float16.
        budget: bytes, or text such as "256MiB", as for `memory_budget`; None: a sixteenth of the device's memory, or
            what the plan that needs least takes if that is more.
        objective: the objective of `linear_policy_loss`, GRPO by default; None: `linear_token_logprobs`.
        gradients: which of "hidden", "weight" and "bias" need a gradient; ("hidden",): a frozen head; (): forward only.
        on_policy: True if the call has no `old_logprobs`.
        longest: number of tokens in the longest response; None: all tokens belong to one response.
        kept: number of ids that a `SamplingMask` records, over all tokens; 0: no sampling mask.
        unrecorded: number of tokens that take the dense kernels although others have a recorded support: tokens without
            a support, or with one wider than 1/10 of the vocabulary on a CPU (1/25 in 16 bits; on a GPU 1/40 and
            1/150).
        device: "cuda" or "cpu"; None: the GPU if there is one. "cuda" without one means an H100.
        teacher_hidden: width of the teacher's hidden states, of the same dtype: the call is `linear_divergence`, to
            which objective, on_policy, longest and kept do not apply.
        gathered: number of ids whose log-probabilities are asked for, over all tokens: if not 0, the call is
            `linear_gathered_logprobs`, to which objective, on_policy and longest do not apply.
        logits_dtype: None: logits are rounded to the head's dtype. torch.float32: they are the float32 sums of the
            products, as in an engine that computes its head in float32.
        batch_invariant: whether a row's log-probability and entropy have the same bits whatever else is computed, and
            so has the gradient of its hidden state for given dL/dlogp and dL/dentropy: `docs/batch_invariance.md`.

    Returns:
        MemoryPlans. U = 2 N V H floating-point operations. Its `seconds`, of products, their sums, the row kernels and
        launches, are modelled for an H100, or on a CPU for two cores; the table shows them relative to the chosen plan.
        Temporary memory is an upper bound in bytes, with 1 MiB of slack. On a CPU each of torch's threads may hold a
        row, so that the smallest budget depends on their number.

    Raises:
        TypeError, ValueError: if an argument is wrong; the message names it. If the budget is too small, the message
            gives the smallest possible one.
    """
    call = call_of(
        *(tokens, hidden, vocab, dtype, objective, gradients, on_policy, longest, kept, unrecorded, device),
        *(teacher_hidden, gathered, logits_dtype, batch_invariant),
    )
    return plans_of(call, parse_budget(budget, "budget"))


def plans_of(call: Call, budget: int | None, share: int | None = None) -> MemoryPlans:
    """The plans for a call. budget: in bytes, or None; share: what may be taken without one, by default here."""
    if share is None:
        here = call.device == "cuda" and torch.cuda.is_available()
        share = default_budget(call.device, torch.cuda.current_device() if here else None)
    chosen = choose(call, budget, share)
    # Without a budget, what the plan that needs least takes is allowed whatever that is.
    size = max(share, chosen.temporary_bytes) if budget is None else budget
    least = {name: least_budget(call, name) for name in applicable(call)}
    fitting = tuple(filter(None, (within(call, name, size, budget is not None)[0] for name in least))) or (chosen,)
    priced = H100 if call.device == "cuda" else CPU
    return MemoryPlans(size, chosen, fitting, least, {plan.name: plan_seconds(call, plan, priced) for plan in fitting})


def call_of(
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    objective: Objective | Callable[..., Any] | None,
    gradients: Sequence[str],
    on_policy: bool,
    longest: int | None,
    kept: int,
    unrecorded: int,
    device: str | None,
    teacher_hidden: int | None = None,
    gathered: int = 0,
    logits_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Call:
    """What the planner knows of a call with these arguments of `plan_memory`, which are checked."""
    counts = {"tokens": tokens, "hidden": hidden, "vocab": vocab}
    counts |= {name: n for name, n in (("longest", longest), ("teacher_hidden", teacher_hidden)) if n is not None}
    totals = {"kept": kept, "unrecorded": unrecorded, "gathered": gathered}
    for name, value in (counts | totals).items():
        lowest = 1 if name in counts else 0
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < lowest:
            raise ValueError(f"{name} must be at least {lowest}, got {value}")
    if unrecorded > tokens or (unrecorded and not kept):
        raise ValueError(f"unrecorded must be at most tokens, {tokens}, and 0 without kept ids, got {unrecorded}")
    if dtype not in DTYPES.values():
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES.values()))}, got {dtype}")
    unknown = [name for name in gradients if name not in _INPUTS]
    if unknown or isinstance(gradients, str):
        raise ValueError(f"gradients must be some of {', '.join(_INPUTS)}, got {gradients!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device must be 'cuda' or 'cpu', got {device!r}")
    if teacher_hidden is not None and (kept or on_policy or longest):
        raise ValueError("teacher_hidden is of a divergence, which takes no kept, on_policy or longest")
    if gathered and (on_policy or longest or teacher_hidden is not None):
        raise ValueError("gathered is of linear_gathered_logprobs, which takes no on_policy, longest or teacher_hidden")
    float32_logits = checks.float32_logits(logits_dtype, dtype)
    teacher = NO_TEACHER if teacher_hidden is None else Teacher(teacher_hidden, dtype.itemsize, float32_logits)
    return Call(
        rows=unrecorded if kept else tokens,
        hidden=hidden,
        vocab=vocab,
        dtype=dtype,
        device=device,
        needs=Needs(*(name in gradients for name in _INPUTS)),
        longest=longest or tokens,
        all_rows=tokens,
        support_entries=kept,
        teacher=teacher,
        gathered=gathered,
        float32_logits=float32_logits,
        block=invariant_rows(device) if batch_invariant else 0,
        **({"scope": TOKEN} if teacher.hidden else _objective(None if gathered else objective, on_policy)),
    )


def _objective(objective: Objective | Callable[..., Any] | None, on_policy: bool) -> dict[str, Any]:
    if objective is None:
        return {"scope": ANY}
    if not callable(objective) and not isinstance(objective, Objective):
        raise TypeError(f"objective must be an Objective, a callable or None, got {type(objective).__name__}")
    return {"scope": scope(objective, Given(old=not on_policy)), "slopes": slopes(objective)}
