"""Replaces the losses of TRL's distillation trainers that have hidden states and heads, and no logits, by fastrl's."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastrl import linear_divergence, linear_gathered_logprobs, linear_token_logprobs, topk_divergence
from fastrl.integrations.distillation_options import divergence_of
from fastrl.integrations.patching import say_once
from fastrl.integrations.trl.limits import TESTED, log, why_not_fused
from fastrl.planning.announce import announces_plan

_DISTILLATION = "trl.trainer.distillation_trainer"
#: Used only if it is imported already: importing TRL's experimental modules warns.
_ASYNC_DISTILLATION = "trl.experimental.async_distillation.async_distillation_trainer"


class _NotHere(Exception):
    """The reason why fastrl cannot compute this loss."""


class _Head(NamedTuple):
    """A model's last hidden states and its head, with what happens to the logits."""

    hidden: Tensor  # (..., H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    logit_scale: float
    softcap: float | None

    def check(self) -> None:
        """Raise _NotHere if fastrl cannot compute this head."""
        reason = why_not_fused(self.hidden, self.logit_scale)
        if self.softcap is not None and not self.softcap > 0:
            reason = f"the model caps its logits at {self.softcap}"
        if reason is not None:
            raise _NotHere(reason)

    def whole(self, dtype: torch.dtype) -> _Head:
        """All in this dtype; a head that FSDP2 shards is gathered."""

        def plain(x: Tensor) -> Tensor:
            return (x.full_tensor() if isinstance(x, DTensor) else x).to(dtype)

        bias = None if self.bias is None else plain(self.bias)
        return self._replace(hidden=self.hidden.to(dtype), weight=plain(self.weight), bias=bias)

    def options(self) -> dict[str, Any]:
        """Arguments that fastrl's functions of hidden states share. TRL forms these logits in float32."""
        return {
            "bias": self.bias,
            "logit_scale": self.logit_scale,
            "softcap": self.softcap,
            "logits_dtype": torch.float32,
        }

    @torch.no_grad()
    def entropy_sum(self, mask: Tensor | None, **options: Any) -> Tensor:
        """The sum of the entropies of the next token, which TRL logs."""
        targets = torch.zeros(self.hidden.shape[:-1], dtype=torch.int64, device=self.hidden.device)
        stats = linear_token_logprobs(
            self.hidden, self.weight, targets, mask=mask, entropy=True, **self.options(), **options
        )
        assert stats.entropy is not None
        return stats.entropy.sum()


@announces_plan("TRL's distillation")
def _chunked_divergence_loss(
    student_hidden_states: Tensor,  # (B, T, H)
    teacher_hidden_states: Tensor,  # (B, T, H_t)
    student_lm_head_weight: Tensor,  # (V, H)
    teacher_lm_head_weight: Tensor,  # (V, H_t)
    completion_mask: Tensor,  # (B, T)
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
    *,
    memory_budget: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's loss of DistillationTrainer: the loss, and the sum of the student's entropies over that many tokens."""
    student = _Head(
        student_hidden_states,
        student_lm_head_weight,
        student_lm_head_bias,
        student_logit_scale,
        student_final_logit_softcapping,
    )
    teacher = _Head(
        teacher_hidden_states,
        teacher_lm_head_weight,
        teacher_lm_head_bias,
        teacher_logit_scale,
        teacher_final_logit_softcapping,
    )
    student.check()
    teacher.check()
    if student.weight.shape[0] != teacher.weight.shape[0]:  # TRL reads as much of the teacher's as the student has
        raise _NotHere(f"the heads have {student.weight.shape[0]} and {teacher.weight.shape[0]} entries")
    if isinstance(num_items_in_batch, Tensor) and num_items_in_batch.dim():
        raise _NotHere(f"num_items_in_batch has shape {tuple(num_items_in_batch.shape)}")
    if isinstance(num_items_in_batch, int) and num_items_in_batch <= 0:
        raise _NotHere(f"num_items_in_batch is {num_items_in_batch}")
    student, teacher = student.whole(student.hidden.dtype), teacher.whole(teacher.hidden.dtype)
    mask = completion_mask != 0
    count = mask.sum()
    options: dict[str, Any] = {"temperature": temperature, "memory_budget": memory_budget}
    loss = linear_divergence(
        student.hidden,
        student.weight,
        teacher.hidden.detach(),
        teacher.weight,
        mask=mask,
        teacher_bias=teacher.bias,
        teacher_logit_scale=teacher.logit_scale,
        teacher_softcap=teacher.softcap or 0,
        denominator=count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch,
        **divergence_of(beta),
        **student.options(),
        **options,
    ).loss
    return loss, student.entropy_sum(mask, **options), count


@announces_plan("TRL's asynchronous distillation")
def _chunked_jsd_loss(
    hidden_valid: Tensor,  # (N, H)
    lm_head_weight: Tensor,  # (V, H)
    lm_head_bias: Tensor | None,
    logit_scale: float,
    final_logit_softcapping: float | None,
    target_ids: Tensor,  # (N, K), like the next two
    teacher_target_logps: Tensor,
    valid_candidate_mask: Tensor,
    beta: float,
    temperature: float,
    add_tail_bucket: bool,
    teacher_id_idx: Tensor | None,  # (N,)
    num_teachers: int,
    chunk_size: int,
    *,
    memory_budget: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """TRL's loss of AsyncDistillationTrainer: sums of the divergence, with and without graph, and of both entropies.

    The last result are the tokens, divergence and teacher's entropy of each teacher. `chunk_size` has no effect.
    """
    head = _Head(hidden_valid, lm_head_weight, lm_head_bias, logit_scale, final_logit_softcapping)
    head.check()
    # TRL multiplies float32 copies, so a float32 head must not be rounded to the hidden states' dtype.
    head = head.whole(torch.promote_types(hidden_valid.dtype, lm_head_weight.dtype))
    options: dict[str, Any] = {"temperature": temperature, "memory_budget": memory_budget}
    ids = target_ids.masked_fill(~valid_candidate_mask, -1)
    student = linear_gathered_logprobs(head.hidden, head.weight, ids, **head.options(), **options)
    teacher = teacher_target_logps.float().masked_fill(~valid_candidate_mask, -torch.inf)
    if not add_tail_bucket:  # the distributions over the candidates alone
        student = student.masked_fill(~valid_candidate_mask, -torch.inf).log_softmax(-1)
        teacher = teacher.log_softmax(-1)
    each = topk_divergence(student, teacher, tail=add_tail_bucket, mask=valid_candidate_mask, **divergence_of(beta))
    loss = each.sum()
    with torch.no_grad():
        q = teacher.exp()
        if add_tail_bucket:
            q = torch.cat([q, (1 - q.sum(-1, keepdim=True)).clamp(min=0)], -1)
        teacher_entropies = torch.special.entr(q).sum(-1)
        sums = each.new_zeros(3 * num_teachers)
        if teacher_id_idx is not None:
            of_teacher = teacher_id_idx == torch.arange(num_teachers, device=each.device)[:, None]
            columns = torch.stack([torch.ones_like(each), each, teacher_entropies], -1)
            sums = (of_teacher.float() @ columns).flatten()
    return loss, loss.detach(), head.entropy_sum(None, **options), teacher_entropies.sum(), sums


def _or_trls(ours: Callable[..., Any], original: Callable[..., Any], memory_budget: int | None) -> Callable[..., Any]:
    """Ours, and TRL's where fastrl cannot compute it."""

    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        try:
            return ours(*args, **kwargs, memory_budget=memory_budget)
        except _NotHere as error:
            say_once(log, f"TRL's own {original.__name__} is used: {error}")
            return original(*args, **kwargs)

    return loss


def replacements(memory_budget: int | None) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """The names of the functions to replace, with TRL's functions and what replaces them.

    A function that takes other arguments than TRL 1.16.0's stays TRL's, and one line in the log says so.
    """
    try:
        import_module(_DISTILLATION)
    except ImportError as error:
        say_once(log, f"TRL's own distillation is used: {error}")
    for path, ours in ((_DISTILLATION, _chunked_divergence_loss), (_ASYNC_DISTILLATION, _chunked_jsd_loss)):
        if path not in sys.modules:
            continue
        name = ours.__name__
        original = getattr(sys.modules[path], name, None)
        known = [parameter for parameter in inspect.signature(ours).parameters if parameter != "memory_budget"]
        if original is None or [*inspect.signature(original).parameters] != known:
            say_once(log, f"TRL's own {name} is used: {path} is not laid out as in TRL {TESTED}")
            continue
        yield name, original, _or_trls(ours, original, memory_budget)
