"""`plan_memory` and `fastrl plan`: which plan a linear loss would take within a budget, and what the others cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastrl.objectives.dependence import ANY, Given, scope, slopes
from fastrl.objectives.objective import Objective
from fastrl.objectives.presets import GRPO, PRESETS, any_numbers
from fastrl.planning.budget import default_budget, parse_budget, text
from fastrl.planning.plans import Call, Plan, applicable, choose, least_budget, possible_plans
from fastrl.planning.tiling import Needs

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INPUTS = ("hidden", "weight", "bias")
_USUAL = GRPO()


@dataclass(frozen=True)
class MemoryPlans:
    """The plans of one call; `print` shows them as a table."""

    budget: int
    """Bytes."""
    chosen: Plan
    """What the call would do: `name`, `units` (products over N x V x H), `flops`, `temporary_bytes`, `tiles`."""
    fitting: tuple[Plan, ...]
    """All plans within the budget."""
    least: dict[str, int]
    """The smallest budget in bytes of each plan that computes what is asked."""

    @property
    def smallest_budget(self) -> int:
        """Bytes below which no plan works."""
        return min(self.least.values())

    def __str__(self) -> str:
        head = ("", "plan", "cost", "TFLOP", "time", "memory", "tiles (rows x vocabulary)")
        rows = [head, *(self._row(name) for name in self.least)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        smallest = min(self.least, key=lambda name: self.least[name])
        least = f"{text(self.smallest_budget)} ({smallest})"
        return "\n".join(
            [*lines, "", f"budget {text(self.budget)} of temporary memory; the smallest possible is {least}"]
        )

    def _row(self, name: str) -> tuple[str, ...]:
        plan = next((plan for plan in self.fitting if plan.name == name), None)
        if plan is None:
            return ("", name, "", "", "", f"from {text(self.least[name])}", "")
        tiles = ", ".join(f"{kind} {tile.rows} x {tile.columns}" for kind, tile in plan.tiles.items())
        return (
            "->" if name == self.chosen.name else "",
            name,
            f"{plan.units}U",
            f"{plan.flops / 1e12:.3g}",
            f"{plan.cost / self.chosen.cost:.2f}",
            text(plan.temporary_bytes),
            tiles,
        )


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
) -> MemoryPlans:
    """Which plan `linear_policy_loss` or `linear_token_logprobs` would take, and what it and the others cost.

    Args:
        tokens, hidden, vocab: N unmasked tokens, H, V.
        dtype: of hidden states and weight: float32, bfloat16 or float16.
        budget: bytes, or text such as "256MiB", as `memory_budget=`; None: a quarter of the device's free memory.
        objective: of `linear_policy_loss` (GRPO where it is left out); None: `linear_token_logprobs`.
        gradients: which of "hidden", "weight" and "bias" need one; ("hidden",) is a frozen head, () forward only.
        on_policy: whether `old_logprobs` is left out.
        longest: tokens of the longest response; None: all belong to one.
        kept: ids that a `SamplingMask` records for all tokens together; 0: there is none.
        unrecorded: how many tokens take the dense kernels beside those: without a set, or with one wider than 1/10 of
            the vocabulary on a CPU (1/25 in 16 bits; on a GPU 1/40 and 1/150).
        device: "cuda" or "cpu"; None: the GPU if there is one.

    Returns:
        MemoryPlans. U = 2 N V H floating-point operations. Estimated times are relative to the chosen plan's: those of
        its products and of the memory that they read. Temporary memory is an upper bound in bytes.

    Raises:
        TypeError, ValueError: naming the argument; for a budget that is too small, with the smallest possible.
    """
    counts = (
        ("tokens", tokens),
        ("hidden", hidden),
        ("vocab", vocab),
        ("longest", tokens if longest is None else longest),
    )
    for name, value, lowest in (*((*x, 1) for x in counts), ("kept", kept, 0), ("unrecorded", unrecorded, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < lowest:
            raise ValueError(f"{name} must be at least {lowest}, got {value}")
    if unrecorded > tokens or (unrecorded and not kept):
        raise ValueError(f"unrecorded must be at most tokens, {tokens}, and 0 without kept ids, got {unrecorded}")
    if dtype not in _DTYPES.values():
        raise TypeError(f"dtype must be one of {', '.join(map(str, _DTYPES.values()))}, got {dtype}")
    unknown = [name for name in gradients if name not in _INPUTS]
    if unknown or isinstance(gradients, str):
        raise ValueError(f"gradients must be some of {', '.join(_INPUTS)}, got {gradients!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device must be 'cuda' or 'cpu', got {device!r}")
    call = Call(
        rows=unrecorded if kept else tokens,
        hidden=hidden,
        vocab=vocab,
        dtype=dtype,
        device=device,
        needs=Needs(*(name in gradients for name in _INPUTS)),
        longest=longest or tokens,
        all_rows=tokens,
        support_entries=kept,
        **_objective(objective, on_policy),
    )
    given = parse_budget(budget, "budget")
    chosen = choose(call, given)
    size = default_budget(device) if given is None else given
    least = {name: least_budget(call, name) for name in applicable(call)}
    return MemoryPlans(size, chosen, tuple(possible_plans(call, size, named=given is not None)), least)


def _objective(objective: Objective | Callable[..., Any] | None, on_policy: bool) -> dict[str, Any]:
    if objective is None:
        return {"scope": ANY}
    if not callable(objective) and not isinstance(objective, Objective):
        raise TypeError(f"objective must be an Objective, a callable or None, got {type(objective).__name__}")
    return {"scope": scope(objective, Given(old=not on_policy)), "slopes": slopes(objective)}


def main(argv: Sequence[str]) -> int:
    """Run `fastrl plan` with these arguments; the exit status."""
    options = _parser().parse_args(argv)
    name = options.objective
    try:
        found = plan_memory(
            options.tokens,
            options.hidden,
            options.vocab,
            _DTYPES[options.dtype],
            options.budget,
            objective=None if name == "logprobs" else any_numbers(name),
            gradients=[x for x in options.gradients.split(",") if x not in ("", "none")],
            on_policy=options.on_policy,
            longest=options.longest,
            kept=options.kept,
            unrecorded=options.unrecorded,
            device=options.device,
        )
    except ValueError as error:
        print(f"fastrl plan: {error}", file=sys.stderr)
        return 2
    print(found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastrl plan",
        description="Which plan a fused linear loss takes within a budget of temporary memory, and what the others"
        " cost: U = 2 x tokens x hidden x vocabulary floating-point operations (of tokens without a recorded support if"
        " others have one); estimated times are relative to the chosen plan's.",
    )
    add = parser.add_argument
    add("--tokens", type=int, required=True, help="unmasked tokens")
    add("--hidden", type=int, required=True, help="width of the hidden states")
    add("--vocab", type=int, required=True, help="entries of the vocabulary")
    add("--budget", help="such as 512MiB; default: a quarter of the free memory")
    add("--dtype", choices=_DTYPES, default="bfloat16")
    names = [*PRESETS, "logprobs"]
    add(
        "--objective",
        choices=names,
        default="GRPO",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)}; or logprobs, for log-probabilities alone; default: %(default)s",
    )
    add("--gradients", default="hidden,weight", help="some of hidden,weight,bias, or none; default: %(default)s")
    add("--on-policy", action="store_true", help="without old log-probabilities")
    add("--longest", type=int, help="tokens of the longest response; default: all")
    add("--kept", type=int, default=0, help="recorded ids of all tokens' sampling masks together; default: no masks")
    add(
        "--unrecorded",
        type=int,
        default=0,
        help="tokens without a recorded support (or with a very wide one) beside those that have one",
    )
    add("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    return parser
