"""Replaces the head with which TRL's trainers score tokens, and TRL's functions of logits, by fastrl's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from fastrl import linear_token_logprobs, token_logprobs
from fastrl.base import checks
from fastrl.base.dependencies import how_to_install
from fastrl.integrations.patching import exchange, say_once
from fastrl.integrations.trl.limits import TESTED, log, why_not_fused
from fastrl.models.patching import replaced
from fastrl.planning.announce import active, announces_plan
from fastrl.planning.budget import parse_budget

try:
    import trl
    from trl.trainer import utils
except ImportError as error:
    raise ImportError(f"fastrl.integrations.trl needs trl ({error}): {how_to_install(['trl'])}") from error

from fastrl.integrations.trl import distillation, preferences

_HEAD = "_ChunkedLogProbFunction"
_HEAD_ARGUMENTS = (
    "ctx",
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
)
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_FUNCTIONS = {
    "selective_log_softmax": ("logits", "index", "temperature", "row_mask"),
    "selective_log_softmax_and_entropy": ("logits", "index", "entropy_requires_grad", "temperature", "row_mask"),
    "entropy_from_logits": ("logits", "chunk_size"),
}


class FusedHead:
    """Replaces TRL's chunked head: the same arguments and results, computed by `linear_token_logprobs`."""

    def __init__(self, original: Any, memory_budget: int | None) -> None:
        self.original, self.memory_budget = original, memory_budget

    @announces_plan("the head of TRL's trainers")
    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """hidden (N, H), weight (V, H), targets (N,) -> logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1.

        Results are (N,); those not named in `outputs` are None. fastrl chooses its own chunks and ignores `chunk_size`.
        """
        reason = why_not_fused(hidden, logit_scale)
        unknown = [name for name in outputs if name not in ("log_probs", *_OUTPUTS)]
        if unknown:  # a newer TRL's outputs
            reason = f"outputs {', '.join(unknown)} are not known"
        if reason is not None:
            say_once(log, f"TRL's own head is used: {reason}")
            result: tuple[Tensor | None, ...] = self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
            return result
        stats = linear_token_logprobs(
            hidden,
            weight.to(hidden.dtype),
            targets,
            bias=None if bias is None else bias.to(hidden.dtype),
            temperature=temperature,
            entropy="entropy" in outputs,
            logit_scale=logit_scale,
            softcap=final_logit_softcapping,
            memory_budget=self.memory_budget,
            extras=tuple(name for name in _OUTPUTS[1:] if name in outputs),
        )
        return stats.logprobs, stats.entropy, stats.log_sum_sq_probs, stats.mean_logits, stats.is_top1


def _fused_selective_log_softmax(original: Callable[..., Any]) -> Callable[..., Any]:
    def selective_log_softmax(
        logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
    ) -> Tensor:
        if not _takes(logits, index):
            result: Tensor = original(logits, index, temperature, row_mask)
            return result
        return _stats(logits, index, temperature, row_mask, entropy=False)[0]

    return selective_log_softmax


def _fused_selective_log_softmax_and_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    def selective_log_softmax_and_entropy(
        logits: Tensor,
        index: Tensor,
        entropy_requires_grad: bool = True,
        temperature: float = 1.0,
        row_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not _takes(logits, index):
            result: tuple[Tensor, Tensor] = original(logits, index, entropy_requires_grad, temperature, row_mask)
            return result
        logprobs, entropy = _stats(logits, index, temperature, row_mask, entropy=True)
        assert entropy is not None
        return logprobs, entropy if entropy_requires_grad else entropy.detach()

    return selective_log_softmax_and_entropy


def _fused_entropy_from_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
        index = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        entropy = _stats(logits, index, 1.0, None, entropy=True)[1] if _takes(logits, index) else None
        return original(logits, chunk_size) if entropy is None else entropy

    return entropy_from_logits


def _takes(logits: Tensor, index: Tensor) -> bool:
    """Whether there is one target per row and fastrl supports the dtype; several (top-K) and float64 go to TRL."""
    return logits.dtype in checks.LOGIT_DTYPES and index.shape == logits.shape[:-1] and logits.shape[-1] > 0


def _stats(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    if temperature <= 0:
        raise ValueError("temperature must be positive")
    mask = None if row_mask is None else row_mask != 0
    stats = token_logprobs(logits, index.long(), mask=mask, temperature=float(temperature), entropy=entropy)
    return stats.logprobs, stats.entropy


_FACTORIES = {
    "selective_log_softmax": _fused_selective_log_softmax,
    "selective_log_softmax_and_entropy": _fused_selective_log_softmax_and_entropy,
    "entropy_from_logits": _fused_entropy_from_logits,
}
_head: FusedHead | None = None  # while enabled
_replaced: dict[str, tuple[Any, Any]] = {}  # function -> TRL's own and fastrl's
_methods: list[tuple[type, str, Any]] = []  # class, name, TRL's own


def check_layout() -> None:
    """Raise RuntimeError if the installed TRL does not have the layout that this adapter supports."""
    missing = [name for name in (_HEAD, "add_fused_lm_head", *_FUNCTIONS) if not hasattr(utils, name)]
    problems = [f"trl.trainer.utils.{name} is not there" for name in missing]
    if not missing:
        head = getattr(utils, _HEAD)
        head = head.original if isinstance(head, FusedHead) else head
        parameters = {_HEAD: _parameters(getattr(head, "forward", None))}
        parameters |= {name: _parameters(getattr(utils, name)) for name in _FUNCTIONS}
        expected = {_HEAD: _HEAD_ARGUMENTS, **_FUNCTIONS}
        problems += [
            f"{name} takes {', '.join(parameters[name])}"
            for name in expected
            if parameters[name] != tuple(expected[name])
        ]
        if not _mentions(utils.add_fused_lm_head, _HEAD):
            problems.append(f"add_fused_lm_head does not look {_HEAD} up when it is called")
    if problems:
        raise RuntimeError(
            f"fastrl.integrations.trl knows TRL {TESTED} and versions laid out like it, not {trl.__version__}:"
            f" {'; '.join(problems)}. Nothing was changed"
        )


def _parameters(function: Any) -> tuple[str, ...]:
    return () if function is None else tuple(inspect.signature(function).parameters)


def _mentions(function: Any, name: str) -> bool:
    """Whether the function, or one defined in it, reads this global."""
    codes = [function.__code__]
    for code in codes:
        if name in code.co_names:
            return True
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return False


def enable(*, memory_budget: int | str | None = None) -> None:
    """Make TRL's trainers, existing ones too, score tokens with fastrl until `disable()`.

    `linear_token_logprobs` replaces the chunked head behind `add_fused_lm_head` (GRPO, RLOO, DPO, KTO and SFT
    trainers); `token_logprobs` replaces `selective_log_softmax`, `selective_log_softmax_and_entropy` and
    `entropy_from_logits` in all of TRL's modules; `linear_divergence` replaces DistillationTrainer's chunked
    divergence; `linear_gathered_logprobs` and `topk_divergence` replace AsyncDistillationTrainer's, if its module is
    imported already. CPO and ORPO trainers, if their modules are imported already, score their pairs with
    `linear_token_logprobs` instead of forming logits. A second call only changes the budget, and adds such modules.

    Args:
        memory_budget: as in `fastrl.linear_token_logprobs`, for each call of the head, and for each divergence.

    Raises:
        RuntimeError: if TRL has another layout, before anything is changed.
    """
    global _head
    budget = parse_budget(memory_budget)
    disable()
    check_layout()
    for name, factory in _FACTORIES.items():
        original = getattr(utils, name)
        _replaced[name] = original, factory(original)
    for name, original, fused in distillation.replacements(budget):
        _replaced[name] = original, fused
    for name, pair in _replaced.items():
        exchange("trl", name, *pair)
    for owner, name, original, fused in preferences.replacements(budget):
        _methods.append((owner, name, original))
        setattr(owner, name, fused)
    _head = FusedHead(getattr(utils, _HEAD), budget)
    setattr(utils, _HEAD, _head)
    active(f"TRL {trl.__version__}")


def disable() -> None:
    """Restore what `enable()` replaced, also in modules imported since; no effect if nothing was replaced."""
    global _head
    if _head is None:
        return
    for name, (old, new) in _replaced.items():
        exchange("trl", name, new, old)
    for owner, name, original in _methods:
        setattr(owner, name, original)
    setattr(utils, _HEAD, _head.original)
    _head = None
    _replaced.clear()
    _methods.clear()


@contextmanager
def enabled(*, memory_budget: int | str | None = None) -> Iterator[None]:
    """`enable()` inside the block; restores the previous state afterwards, enabled or not."""
    before = _head
    enable(memory_budget=memory_budget)
    try:
        yield
    finally:
        disable()
        if before is not None:
            enable(memory_budget=before.memory_budget)


def replaced_head(head: Any) -> AbstractContextManager[None]:
    """Make TRL's fused head call `head.apply` inside the block. Not thread-safe."""
    return replaced(utils, _HEAD, head)
