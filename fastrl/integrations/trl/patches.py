"""Puts fastrl in the place of the head that TRL's trainers score tokens with, and of its functions of logits."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastrl import linear_token_logprobs, token_logprobs
from fastrl.base import checks
from fastrl.base.dependencies import how_to_install
from fastrl.integrations.patching import exchange, say_once
from fastrl.planning.budget import parse_budget

try:
    import trl
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from trl.trainer import utils
except ImportError as error:
    raise ImportError(f"fastrl.integrations.trl needs trl ({error}): {how_to_install(['trl'])}") from error


log = logging.getLogger("fastrl.trl")
#: The versions that the tests have run against; others are taken as they come if they are laid out in the same way.
TESTED = "1.16.0"

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
    """What stands in the place of TRL's chunked head: the same arguments and results, by `linear_token_logprobs`."""

    def __init__(self, original: Any, memory_budget: int | None) -> None:
        self.original, self.memory_budget = original, memory_budget

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
        """hidden (N, H), weight (V, H), targets (N,): logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1, (N,).

        Those not named in `outputs` are None. `chunk_size` is fastrl's to choose.
        """
        reason = why_not_fused(hidden, weight, logit_scale)
        unknown = [name for name in outputs if name not in ("log_probs", *_OUTPUTS)]
        if unknown:  # of a TRL that knows more
            reason = f"outputs {', '.join(unknown)} are not known"
        if reason is not None:
            say_once(log, f"TRL's own head is used: {reason}")
            found: tuple[Tensor | None, ...] = self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
            return found
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


def why_not_fused(hidden: Tensor, weight: Tensor, logit_scale: float) -> str | None:
    """Why fastrl cannot take this head, or None."""
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if not autocast and hidden.dtype not in checks.LOGIT_DTYPES:
        return f"the hidden states are {hidden.dtype}"
    if not logit_scale > 0:
        return f"the model scales its logits by {logit_scale}"
    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3 shards the head, which is whole in the forward only"
    return None


def _fused_selective_log_softmax(original: Callable[..., Any]) -> Callable[..., Any]:
    def selective_log_softmax(
        logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
    ) -> Tensor:
        if not _takes(logits, index):
            found: Tensor = original(logits, index, temperature, row_mask)
            return found
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
            found: tuple[Tensor, Tensor] = original(logits, index, entropy_requires_grad, temperature, row_mask)
            return found
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
    """One target a row, of a dtype that fastrl knows; several a row (top-K) and float64 are TRL's."""
    return logits.dtype in checks.LOGIT_DTYPES and index.shape == logits.shape[:-1] and logits.shape[-1] > 0


def _stats(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    if temperature <= 0:
        raise ValueError("temperature must be positive")
    mask = None if row_mask is None else row_mask != 0
    found = token_logprobs(logits, index.long(), mask=mask, temperature=float(temperature), entropy=entropy)
    return found.logprobs, found.entropy


@dataclass
class _Enabled:
    """What was put in place: TRL's own object -> fastrl's, for the three functions, and the head."""

    head: FusedHead
    functions: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # name -> (TRL's, fastrl's)


_now: _Enabled | None = None


def check_layout() -> None:
    """RuntimeError where the installed TRL is not laid out as the one that this adapter was written for."""
    missing = [name for name in (_HEAD, "add_fused_lm_head", *_FUNCTIONS) if not hasattr(utils, name)]
    wrong = [f"trl.trainer.utils.{name} is not there" for name in missing]
    if not missing:
        head = getattr(utils, _HEAD)
        head = head.original if isinstance(head, FusedHead) else head
        found = {_HEAD: _parameters(getattr(head, "forward", None))}
        found |= {name: _parameters(getattr(utils, name)) for name in _FUNCTIONS}
        expected = {_HEAD: _HEAD_ARGUMENTS, **_FUNCTIONS}
        wrong += [f"{name} takes {', '.join(found[name])}" for name in expected if found[name] != tuple(expected[name])]
        if not _mentions(utils.add_fused_lm_head, _HEAD):
            wrong.append(f"add_fused_lm_head does not look {_HEAD} up when it is called")
    if wrong:
        raise RuntimeError(
            f"fastrl.integrations.trl knows TRL {TESTED} and versions laid out like it, not {trl.__version__}:"
            f" {'; '.join(wrong)}. Nothing was changed"
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
    """Let TRL's trainers score tokens with fastrl, those made before too, until `disable()`.

    The chunked head behind `add_fused_lm_head` (GRPO, RLOO, DPO, KTO and SFT trainers) becomes `linear_token_logprobs`;
    `selective_log_softmax`, `selective_log_softmax_and_entropy` and `entropy_from_logits` become `token_logprobs`,
    wherever TRL's modules hold them. A second call only changes the budget.

    Args:
        memory_budget: as in `fastrl.linear_token_logprobs`, for each call of the head.

    Raises:
        RuntimeError: before anything is changed, for a TRL of another layout.
    """
    global _now
    budget = parse_budget(memory_budget)
    disable()
    check_layout()
    made = {
        "selective_log_softmax": _fused_selective_log_softmax,
        "selective_log_softmax_and_entropy": _fused_selective_log_softmax_and_entropy,
        "entropy_from_logits": _fused_entropy_from_logits,
    }
    now = _Enabled(FusedHead(getattr(utils, _HEAD), budget))
    now.functions = {name: (getattr(utils, name), make(getattr(utils, name))) for name, make in made.items()}
    for name, (old, new) in now.functions.items():
        exchange("trl", name, old, new)
    setattr(utils, _HEAD, now.head)
    _now = now


def disable() -> None:
    """Put back what `enable()` replaced, in modules imported since then too; nothing where nothing was replaced."""
    global _now
    if _now is None:
        return
    for name, (old, new) in _now.functions.items():
        exchange("trl", name, new, old)
    setattr(utils, _HEAD, _now.head.original)
    _now = None


@contextmanager
def enabled(*, memory_budget: int | str | None = None) -> Iterator[None]:
    """`enable()` inside the block; afterwards TRL is as it was before, enabled or not."""
    before = _now
    enable(memory_budget=memory_budget)
    try:
        yield
    finally:
        disable()
        if before is not None:
            enable(memory_budget=before.head.memory_budget)


@contextmanager
def replaced_head(head: Any) -> Iterator[None]:
    """Inside the block TRL's fused head calls `head.apply`; not for several threads at once."""
    before = getattr(utils, _HEAD)
    setattr(utils, _HEAD, head)
    try:
        yield
    finally:
        setattr(utils, _HEAD, before)
