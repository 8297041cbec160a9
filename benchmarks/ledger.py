"""The ledger of a call: what it launches on a GPU, counted and priced without data and without a GPU.

    python benchmarks/ledger.py --tokens 8192 --hidden 4096 --vocab 151936 --objective PPO --device h100

prints the plans of a linear loss, as `fastrl plan` does, and below them the kernel launches of the chosen plan and its
backward, with their bytes, operations and modelled times. docs/performance.md says how to read them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from ledger_record import GPU, Launch, Ledger, record
from torch import Tensor

from fastrl.base.devices import Device
from fastrl.losses.divergence import linear_divergence
from fastrl.losses.gathered import linear_gathered_logprobs
from fastrl.losses.logprobs import linear_token_logprobs
from fastrl.losses.policy import linear_policy_loss, logits_policy_loss
from fastrl.objectives.objective import Objective
from fastrl.planning.budget import parse_budget, text
from fastrl.planning.command import NAMED_GPUS, call_arguments, call_parser
from fastrl.planning.memory import call_of, plans_of
from fastrl.planning.plans import Plan, use_plan
from fastrl.sampling_mask.mask import SamplingMask, _Facts

#: Kernels and operations that take a smaller share of the time share a line.
_SMALL = 0.01


def _empty(*shape: int, dtype: torch.dtype = torch.float32, needs: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=GPU, requires_grad=needs)


def linear(
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    device: Device,
    *,
    objective: Any,
    gradients: Sequence[str] = ("hidden", "weight"),
    on_policy: bool = False,
    longest: int | None = None,
    kept: int = 0,
    masked: bool = False,
    budget: int | str | None = None,
    teacher_hidden: int | None = None,
    gathered: int = 0,
    logits_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    plan: str | None = None,
) -> Ledger:
    """The ledger of `linear_policy_loss` and the backward of its loss, or of another call of the same inputs.

    Without an objective it is `linear_token_logprobs`; with a teacher's width the forward KL of `linear_divergence`;
    with a number of gathered ids `linear_gathered_logprobs`.

    Args: those of `plan_memory`, and
        device: whose memory holds nothing but the inputs and their gradients.
        masked: whether the call has a mask, so that the host does not know how many tokens count.
        plan: to take whatever it costs; None: the one that the call chooses.
    """
    responses = _responses(tokens, longest)
    rows = (responses, tokens // responses)

    def call() -> Callable[[], object]:
        x = _empty(*rows, hidden, dtype=dtype, needs="hidden" in gradients)
        w = _empty(vocab, hidden, dtype=dtype, needs="weight" in gradients)
        bias = _empty(vocab, dtype=dtype, needs=True) if "bias" in gradients else None
        wanted = [t for t in (x, w, bias) if t is not None and t.requires_grad]
        given: dict[str, Any] = {"bias": bias, "logits_dtype": logits_dtype, "memory_budget": budget}
        given["batch_invariant"] = batch_invariant
        if teacher_hidden is not None:
            teacher = (_empty(*rows, teacher_hidden, dtype=dtype), _empty(vocab, teacher_hidden, dtype=dtype))
        else:
            given["sampling_mask"] = _supports(tokens, vocab, kept)
        ids = _ids(rows, vocab, gathered)
        batch = _batch(objective, responses, tokens, on_policy)
        targets = batch.pop("targets")
        if masked:
            given["mask"] = _empty(*rows, dtype=torch.bool)

        def result() -> Tensor:
            if teacher_hidden is not None:
                return linear_divergence(x, w, *teacher, **given).loss
            if ids is not None:
                return linear_gathered_logprobs(x, w, ids, **given)
            if objective is None:
                return linear_token_logprobs(x, w, targets, entropy=False, **given).logprobs
            return linear_policy_loss(x, w, targets, objective=objective, **batch, **given).loss

        def run() -> object:
            with nullcontext() if plan is None else use_plan(plan):
                results = result()
            if not wanted:
                return results
            return torch.autograd.grad(results, wanted, torch.empty_like(results) if results.dim() else None)

        return run

    return record(call, device, _answer(tokens, responses))


def logits(
    tokens: int,
    vocab: int,
    dtype: torch.dtype,
    device: Device,
    *,
    objective: Any,
    on_policy: bool = False,
    longest: int | None = None,
    inplace: bool = True,
) -> Ledger:
    """The ledger of `logits_policy_loss` and the backward of its loss."""
    responses = _responses(tokens, longest)

    def call() -> Callable[[], object]:
        x = _empty(responses, tokens // responses, vocab, dtype=dtype, needs=True)
        batch = _batch(objective, responses, tokens, on_policy)
        targets = batch.pop("targets")

        def run() -> object:
            loss = logits_policy_loss(x, targets, objective=objective, inplace=inplace, **batch).loss
            return torch.autograd.grad(loss, (x,))

        return run

    return record(call, device, _answer(tokens, responses))


def _responses(tokens: int, longest: int | None) -> int:
    """How many responses of equal length: of the longest's if that divides the tokens, else one."""
    return tokens // longest if longest and tokens % longest == 0 else 1


def _batch(objective: Any, responses: int, tokens: int, on_policy: bool) -> dict[str, Any]:
    """Targets, and of the other inputs those that the objective needs."""
    shape = (responses, tokens // responses)
    batch: dict[str, Any] = {"targets": _empty(*shape, dtype=torch.int64), "advantages": _empty(responses)}
    if not on_policy:
        batch["old_logprobs"] = _empty(*shape)
    if isinstance(objective, Objective) and objective.kl is not None and objective.kl.needs_reference:
        batch["ref_logprobs"] = _empty(*shape)
    if isinstance(objective, Objective) and objective.rollout_correction is not None:
        batch["rollout_logprobs"] = _empty(*shape)
    if getattr(objective, "aggregate", None) == "prompt-mean":
        batch["group_ids"] = _empty(responses, dtype=torch.int64)
    return batch


def _supports(tokens: int, vocab: int, entries: int) -> SamplingMask | None:
    if not entries:
        return None
    offsets = _empty(tokens + 1, dtype=torch.int64)
    return SamplingMask._made(_empty(entries, dtype=torch.int32), offsets, _Facts(vocab - 1, -(-entries // tokens), 0))


def _ids(rows: tuple[int, int], vocab: int, gathered: int) -> Tensor | SamplingMask | None:
    """The ids that are asked for: as many in each row, if that is possible."""
    tokens = rows[0] * rows[1]
    if not gathered or gathered % tokens:
        return _supports(tokens, vocab, gathered)
    return _empty(*rows, gathered // tokens, dtype=torch.int64)


def _answer(tokens: int, responses: int) -> Callable[[int], int]:
    """What the host reads: the number of tokens that count, or (for more than two numbers) that of each response."""
    return lambda count: tokens if count <= 2 else tokens // responses


def floor(plan: Plan, device: Device, itemsize: int) -> float:
    """The seconds below which no computation of its products can be: their operations, and the supports' bytes."""
    return plan.flops / device.peak(itemsize) + device.seconds(plan.support_bytes)


def text_of(ledger: Ledger, plan: Plan, device: Device, itemsize: int) -> str:
    """The ledger of a call that takes this plan, for operands of `itemsize` bytes."""
    total, least = ledger.seconds(device), floor(plan, device, itemsize)
    by_name: dict[str, list[Launch]] = {}
    for launch in ledger.launches:
        by_name.setdefault(launch.name, []).append(launch)
    seconds = {name: Ledger(launches, []).seconds(device) for name, launches in by_name.items()}
    large = sorted((name for name in by_name if seconds[name] >= _SMALL * total), key=lambda name: -seconds[name])
    others = [launch for name in by_name if name not in large for launch in by_name[name]]
    groups = [*((name, by_name[name]) for name in large), ("others", others), ("all", ledger.launches)]
    return "\n".join(
        [
            f"modelled on an {device.name}: {device.bytes_a_second / 1e12:g} TB/s copy,"
            f" {device.peak(itemsize) / 1e12:g} TFLOP/s, {device.launch * 1e6:g} us a launch; nothing is measured",
            _ROW.format("launches", "kernel or operation of torch", "read", "written", "TFLOP", "ms"),
            *(_row(name, Ledger(launches, []), device) for name, launches in groups),
            "",
            f"the host waits: {', '.join(f'for {wait}' for wait in ledger.syncs) or 'none'}",
            f"{plan.name}: {total * 1e3:.4g} ms modelled, {total / least:.3f} x its floor of {least * 1e3:.4g} ms",
        ]
    )


_ROW = "{:>8}  {:<55}  {:>9}  {:>9}  {:>6}  {:>7}"


def _row(name: str, part: Ledger, device: Device) -> str:
    read, written, flops = (sum(getattr(x.traffic, key) for x in part.launches) for key in ("read", "written", "flops"))
    tera = f"{flops / 1e12:.3g}" if flops else ""
    return _ROW.format(part.count, name, text(read), text(written), tera, f"{part.seconds(device) * 1e3:.3f}")


def main(argv: Sequence[str]) -> None:
    parser = call_parser("benchmarks/ledger.py", "The plans of a linear loss, and the launches of the chosen one.")
    parser.add_argument("--device", type=str.lower, choices=NAMED_GPUS, default="h100", help="default: %(default)s")
    options = parser.parse_args(argv)
    device, given = NAMED_GPUS[options.device], call_arguments(options)
    try:
        call = call_of(**given, unrecorded=0, device="cuda")
        plans = plans_of(call, parse_budget(options.budget, "budget"), device.memory // 16)
    except ValueError as error:
        parser.error(str(error))
    ledger = linear(**given, device=device, budget=options.budget)
    print(plans, text_of(ledger, plans.chosen, device, call.dtype.itemsize), sep="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
