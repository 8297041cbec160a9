"""Divergences between a student's distribution over the vocabulary and a teacher's, from hidden states and heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend.choice import forced
from fastrl.backend.contract import Divergence
from fastrl.base import checks
from fastrl.losses.request import TensorParallel, checked_transform, head_arguments, linear_request, planned
from fastrl.objectives.row_local import TOKEN
from fastrl.passes.head import Head, Run, counted
from fastrl.passes.pairs import divergence_forward_gradient, divergence_statistics, weighted_sum
from fastrl.planning import plans
from fastrl.planning.tiling import Teacher

KINDS = ("forward_kl", "reverse_kl", "jsd")
_ROWS = "hidden.shape[:-1]"


class DivergenceLoss(NamedTuple):
    """A mean divergence."""

    loss: Tensor
    """0-dim; call backward() on it."""
    per_token: Tensor
    """Detached float32 nats, shaped like mask: the divergence of each token, without its weight; 0 where masked."""


def checked_divergence(kind: object, beta: object) -> Divergence:
    """The divergence with this name; beta, the teacher's weight in the mixture, is read for "jsd" alone."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    beta = checks.number("beta", beta)
    if kind == "jsd" and not 0 < beta < 1:
        raise ValueError(
            f"beta must be between 0 and 1, both excluded, got {beta!r}: there the divergence is 0 (what other packages"
            " call beta=0 and beta=1 are kind='forward_kl' and kind='reverse_kl')"
        )
    return Divergence(str(kind), beta)


def linear_divergence(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    teacher_hidden: Tensor,  # (..., H_t)
    teacher_weight: Tensor,  # (V, H_t)
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    bias: Tensor | None = None,  # (V,)
    teacher_bias: Tensor | None = None,  # (V,)
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_temperature: float | Tensor | None = None,
    teacher_logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    token_weights: Tensor | None = None,  # (...)
    denominator: float | Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    memory_budget: int | str | None = None,
    batch_invariant: bool = False,
    num_tokens: int | None = None,
    vocab_size: int | None = None,
) -> DivergenceLoss:
    """Computes the mean divergence between the vocabulary distributions of two heads, without holding all logits.

    With p the student's distribution of a token, q the teacher's and `m = beta q + (1 - beta) p`:

        forward_kl    KL(q||p) = sum_j q_j log(q_j / p_j)
        reverse_kl    KL(p||q) = sum_j p_j log(p_j / q_j)
        jsd           beta KL(q||m) + (1 - beta) KL(p||m)    (Agarwal et al., 2024, arXiv:2306.13649, eq. 2)

    The loss is the sum of the tokens' divergences, times their weights, over `denominator`. It is differentiable once,
    in the student's hidden, weight and bias; the teacher's are constants, even if they are the student's own. Tiles of
    both logits are formed side by side, and the forward forms the gradients with them: three products of the student,
    3U, and one of the teacher. With a smaller `memory_budget` the backward forms both logits again (4U or 5U, two or
    three products of the teacher). Masked rows enter no product, and rows of weight 0 none of the gradients' products.

    hidden, weight, bias, temperature, logit_scale and softcap are the student's. At beta = 0 and 1 the formula of "jsd"
    is 0 (TRL and Liger compute forward_kl at their beta = 0 and reverse_kl at 1). The loss is not multiplied by
    temperature^2, as some authors do. vocab_size is of both heads, which may then have different numbers of rows.

    Args:
        hidden: (..., H) float32, bfloat16 or float16. Under autocast, hidden, weight and bias are cast to its dtype.
        weight: (V, H), the output head, with hidden's dtype. One that needs no gradient costs no product for it.
        teacher_hidden: (..., H_t) float32, bfloat16 or float16; H_t and the dtype may differ from the student's. It
            must not require a gradient.
        teacher_weight: (V, H_t), the teacher's output head, with teacher_hidden's dtype; it gets no gradient.
        kind: "forward_kl", "reverse_kl" or "jsd".
        beta: for "jsd", the teacher's weight in the mixture, between 0 and 1, both excluded; otherwise not read.
        bias: (V,) with hidden's dtype; None: no bias.
        teacher_bias: (V,) with teacher_hidden's dtype; None: no bias.
        mask: (...) bool or 0/1: 1 = valid; None: all are. What is masked is not read; its result and gradient are 0.
        temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the logits.
        logit_scale: above 0, multiplies the logits, before the softcap (Cohere, Granite).
        softcap: above 0, bounds the logits smoothly (Gemma 2); None: no bound.
        teacher_temperature: above 0: a number, or a floating tensor, 0-dim or one per token (no gradient); divides the
            teacher's logits. None: the student's.
        teacher_logit_scale: above 0, multiplies the teacher's logits. None: the student's.
        teacher_softcap: above 0, bounds the teacher's logits smoothly; 0: no bound. None: the student's.
        token_weights: (...) floating point, detached; multiply a token's divergence in the loss, not the denominator.
            None: 1.
        denominator: above 0, a number or a 0-dim tensor: replaces the local number of valid tokens, so that
            micro-batches and ranks add up.
        logits_dtype: None: logits are rounded to the head's dtype. torch.float32: they are the float32 sums of the
            products, as in an engine that computes its head in float32.
        memory_budget: bytes, or text such as "256MiB", for temporary memory beyond inputs, outputs and their gradients.
            None: a sixteenth of the device's memory, or what the plan that needs least takes if that is more.
        batch_invariant: whether a row's log-probability and entropy have the same bits whatever else is computed, and
            so has the gradient of its hidden state for given dL/dlogp and dL/dentropy: `docs/batch_invariance.md`.
        num_tokens: the number of valid tokens (of this rank), if known: saves a GPU with a mask the host
            synchronisations for counting them. A wrong number is an error on a CPU, and a loss of NaN on a GPU.
        vocab_size: the size of the whole vocabulary: rows of the head, or columns of the logits, beyond it are padding,
            which has no probability and gradient 0. None: there is no padding.

    Returns:
        DivergenceLoss. The loss is float32. A token's forward KL is infinite if p is 0 for an entry for which q
        is not; its reverse KL is infinite, with a gradient of NaN, if q is 0 and p is not. A JSD is always finite. NaN
        in either side's logits gives that token NaN. No valid tokens: 0, with gradients of 0.

    Raises:
        TypeError, ValueError: a wrong argument, which is named: different numbers of rows or vocabulary entries, a
            teacher_hidden that requires a gradient, a budget too small for any plan (with the smallest that works).
    """
    divergence = checked_divergence(kind, beta)
    tp = TensorParallel(vocab_size=vocab_size)
    of_logits = (temperature, logit_scale, softcap)
    options = (of_logits, None, logits_dtype, memory_budget, batch_invariant, tp, num_tokens, _ROWS)
    request = linear_request(hidden, weight, bias, None, mask, *options)
    like = hidden[..., 0]
    head, valid = request.head, request.mask
    teacher, teacher_copied = _teacher(teacher_hidden, teacher_weight, teacher_bias, hidden, head, tp)
    teacher_transform = checked_transform(
        temperature if teacher_temperature is None else teacher_temperature,
        logit_scale if teacher_logit_scale is None else teacher_logit_scale,
        softcap if teacher_softcap is None else teacher_softcap or None,
        like,
        None if valid is None else valid.view(like.shape),
        _ROWS,
        "teacher_",
    )
    teacher_wide = checks.float32_logits(logits_dtype, teacher.weight.dtype)
    c = checks.nan_where_wrong(_weights(token_weights, denominator, like, valid, request.num_tokens), mask)

    rows = active = -1
    if valid is not None and request.may_synchronise and not torch.compiler.is_compiling():
        rows, active = counted(valid, c != 0)
    request = request._replace(copied=request.copied + teacher_copied)
    sizes = Teacher(teacher.hidden.shape[1], teacher.hidden.element_size(), teacher_wide)
    request, plan = planned(request, TOKEN, rows=rows, teacher=sizes)
    arguments = (head, teacher, valid, request.transform, teacher_transform, divergence)
    run = Run(forced(), request.num_rows, plan)
    with plans.run(plan):
        if plan.name == "forward-gradient":
            loss, per_row, *_ = divergence_forward_gradient(*arguments, c, run, active)
        else:
            stats = divergence_statistics(*arguments, run, request.may_synchronise)
            loss, per_row = weighted_sum(stats.divergence, c), stats.divergence
    return DivergenceLoss(loss, per_row.detach().view(like.shape))


def _teacher(
    teacher_hidden: object, teacher_weight: object, teacher_bias: object, hidden: Tensor, head: Head, tp: TensorParallel
) -> tuple[Head, int]:
    """The teacher's checked head, without a graph, and the bytes copied."""
    if isinstance(teacher_hidden, Tensor) and teacher_hidden.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "teacher_hidden must not require a gradient, which this loss does not form: run the teacher under"
            " torch.no_grad(), or pass teacher_hidden.detach()"
        )
    states, teacher, copied = head_arguments(teacher_hidden, teacher_weight, teacher_bias, tp, "teacher_")
    checks.same_device("teacher_hidden", states, hidden, "hidden")
    checks.shape("teacher_hidden", states, (*hidden.shape[:-1], states.shape[-1]), "the rows of hidden")
    teacher = teacher.unpadded()
    if teacher.entries != head.entries:
        raise ValueError(
            f"teacher_weight must have weight's vocabulary, {head.entries} entries, got {teacher.entries}"
            " (vocab_size= leaves out the padding of both)"
        )
    return Head.of(None if x is None else x.detach() for x in teacher[:3]), copied


def _weights(token_weights: object, denominator: object, like: Tensor, mask: Tensor | None, num_tokens: int) -> Tensor:
    """c (N,) float32: the weight of each token's divergence in the loss, 0 where masked."""
    c = torch.ones(like.numel(), dtype=torch.float32, device=like.device)
    if token_weights is not None:
        weights = checks.tensor("token_weights", token_weights)
        checks.shape("token_weights", weights, like.shape, f"the shape of {_ROWS}")
        checks.same_device("token_weights", weights, like, "hidden")
        checks.values("token_weights", weights, mask)
        c = weights.detach().float().reshape(-1)
    total = like.numel() if mask is None else mask.sum()
    divisor = checks.divisor("denominator", denominator, total)
    c = c / (divisor.to(device=like.device, dtype=torch.float32) if isinstance(divisor, Tensor) else divisor)
    if mask is None:
        return c
    c = c.masked_fill(~mask, 0.0)
    if num_tokens >= 0 and not checks.values_are_checked(mask):  # a wrong count must not train silently
        c = c.masked_fill_(mask & (total != num_tokens), torch.nan)
    return c.contiguous()
