"""The calls that a ledger is made of: a loss with its gradients, at a shape, from tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fastrl.base.devices import Device
from fastrl.ledger.record import GPU, Ledger, record
from fastrl.losses.divergence import linear_divergence
from fastrl.losses.gathered import linear_gathered_logprobs
from fastrl.losses.logprobs import linear_token_logprobs
from fastrl.losses.policy import linear_policy_loss, logits_policy_loss
from fastrl.objectives.objective import Objective
from fastrl.planning.plans import use_plan
from fastrl.sampling_mask.mask import SamplingMask, _Facts


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
    budget: int | str | None = None,
    teacher_hidden: int | None = None,
    gathered: int = 0,
    logits_dtype: torch.dtype | None = None,
    plan: str | None = None,
) -> Ledger:
    """The ledger of `linear_policy_loss` and the backward of its loss, or of another call of the same inputs.

    Without an objective it is `linear_token_logprobs`; with a teacher's width the forward KL of `linear_divergence`;
    with a number of gathered ids `linear_gathered_logprobs`.

    Args: those of `plan_memory`, and
        device: whose memory holds nothing but the inputs and their gradients.
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
        if teacher_hidden is not None:
            teacher = (_empty(*rows, teacher_hidden, dtype=dtype), _empty(vocab, teacher_hidden, dtype=dtype))
        else:
            given["sampling_mask"] = _supports(tokens, vocab, kept)
        ids = _ids(rows, vocab, gathered)
        batch = _batch(objective, responses, tokens, on_policy)
        targets = batch.pop("targets")

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
