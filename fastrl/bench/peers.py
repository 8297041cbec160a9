"""Other packages' implementations of the same workloads, with their own defaults; each raises if it cannot run.

PPO's clip with beta = 0 and loss_type "bnpo" (the mean over tokens) is what both Liger losses and fastrl compute here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from fastrl.bench import plain
from fastrl.bench.contenders import Outcome, Run, Unavailable
from fastrl.bench.problems import LinearProblem, LogitsProblem, Tokens
from fastrl.bench.workloads import Head, HeadLoss

#: The chunk size that TRL's trainers pass to its head.
_TRL_HEAD_CHUNK = 32768


def _needs_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("its Triton kernels need a GPU")


def liger_logits_loss(problem: LogitsProblem) -> Run:
    """Liger's one-kernel GRPO loss; its backward overwrites the logits with the gradient."""
    _needs_gpu(problem.logits.device)
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    tokens = problem.tokens
    # It requires T + 1 positions and ignores the last one.
    buffer = problem.logits.new_zeros(tokens.responses, tokens.length + 1, problem.logits.shape[1]).requires_grad_()
    old, targets = tokens.padded(tokens.old), tokens.padded(tokens.targets)

    @torch.no_grad()
    def restore() -> None:
        buffer[:, :-1] = tokens.padded(problem.logits)

    def call() -> Outcome:
        loss, _ = triton_grpo_loss(
            buffer,
            old,
            None,
            targets,
            tokens.per_response,
            temperature=1.0,
            beta=0.0,
            eps_low=plain.CLIP,
            eps_high=plain.CLIP,
            loss_type="bnpo",
            reduce=True,
        )
        (gradient,) = torch.autograd.grad(loss, buffer)
        return Outcome(loss.detach(), None, None, {"logits": gradient[:, :-1]})

    return Run(call, restore)


def liger_policy_head(tokens: Tokens) -> Head:
    """Liger's chunked GRPO loss, one response per chunk."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    old, targets = tokens.padded(tokens.old), tokens.padded(tokens.targets)
    mask = torch.ones_like(old)
    loss_of = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=plain.CLIP, epsilon_high=plain.CLIP, loss_type="bnpo"
    )

    def head(hidden: Tensor, weight: Tensor) -> HeadLoss:
        loss, _ = loss_of(tokens.padded(hidden), weight, targets, mask, tokens.per_response, old_per_token_logps=old)
        return HeadLoss(loss)

    return head


def _trl_statistics(problem: LogitsProblem, kernel: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """TRL's function for logits: its Triton kernel, or the torch code that its trainers use elsewhere."""
    if kernel:
        _needs_gpu(problem.logits.device)
    elif problem.logits.device.type == "cuda":
        raise Unavailable("on a GPU this function of TRL calls its kernel")
    module = import_module("trl.kernels" if kernel else "trl.trainer.utils")
    function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = module.selective_log_softmax_and_entropy
    return function


def trl_statistics(problem: LogitsProblem, kernel: bool, backward: bool) -> Run:
    """TRL's log-probabilities and entropies of logits, with or without their gradients."""
    function, tokens = _trl_statistics(problem, kernel), problem.tokens
    targets = tokens.padded(tokens.targets)
    logits = tokens.padded(problem.logits).detach().requires_grad_(backward)
    upstream = tuple(tokens.padded(u) for u in tokens.upstream)

    def call() -> Outcome:
        with torch.set_grad_enabled(backward):
            outputs = function(logits, targets)
        gradients = {"logits": torch.autograd.grad(outputs, logits, upstream)[0]} if backward else {}
        return Outcome(None, outputs[0].detach(), outputs[1].detach(), gradients)

    return Run(call)


def trl_logits_loss(problem: LogitsProblem, kernel: bool) -> Run:
    """TRL's log-probabilities, and entropies for the log, followed by the clipped loss in torch."""
    function, tokens = _trl_statistics(problem, kernel), problem.tokens
    targets = tokens.padded(tokens.targets)
    logits = tokens.padded(problem.logits).detach().requires_grad_()

    def call() -> Outcome:
        logprobs, entropy = function(logits, targets)
        loss = _clipped(tokens, logprobs)
        (gradient,) = torch.autograd.grad(loss, logits)
        return Outcome(loss.detach(), logprobs.detach(), entropy.detach(), {"logits": gradient})

    return Run(call)


def _trl_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """TRL's chunked head: log-probabilities and entropies (N,)."""
    from trl.kernels import ChunkedLogProbFunction

    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, _TRL_HEAD_CHUNK, None, 1.0, ("entropy",)
    )
    return logprobs, entropy


def trl_policy_head(tokens: Tokens) -> Head:
    """TRL's chunked head, followed by the clipped loss in torch."""
    import_module("trl.kernels")

    def head(hidden: Tensor, weight: Tensor) -> HeadLoss:
        logprobs, entropy = _trl_head(hidden, weight, tokens.targets)
        return HeadLoss(_clipped(tokens, logprobs), logprobs.detach(), entropy.detach())

    return head


def trl_linear_statistics(problem: LinearProblem) -> Run:
    """TRL's chunked head, forward only."""
    import_module("trl.kernels")

    @torch.no_grad()
    def call() -> Outcome:
        return Outcome(None, *_trl_head(problem.hidden, problem.weight, problem.tokens.targets), {})

    return Run(call)


def apple_policy_head(tokens: Tokens) -> Head:
    """Apple's cut cross-entropy as a head (with its default gradient filter), followed by the clipped loss in torch."""
    _needs_gpu(tokens.targets.device)
    from cut_cross_entropy import linear_cross_entropy

    def head(hidden: Tensor, weight: Tensor) -> HeadLoss:
        logprobs = -linear_cross_entropy(hidden, weight, tokens.targets, reduction="none")
        return HeadLoss(_clipped(tokens, logprobs), logprobs.detach())

    return head


def apple_linear_statistics(problem: LinearProblem) -> Run:
    """Apple's cut cross-entropy, forward only; it returns no entropies."""
    _needs_gpu(problem.hidden.device)
    from cut_cross_entropy import linear_cross_entropy

    @torch.no_grad()
    def call() -> Outcome:
        losses = linear_cross_entropy(problem.hidden, problem.weight, problem.tokens.targets, reduction="none")
        return Outcome(None, -losses, None, {})

    return Run(call)


def apple_cross_entropy_head(tokens: Tokens) -> Head:
    """Apple's cut cross-entropy, with its default gradient filter."""
    _needs_gpu(tokens.targets.device)
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight: HeadLoss(linear_cross_entropy(hidden, weight, tokens.targets))


def apple_compiled_cross_entropy_head(tokens: Tokens) -> Head:
    """Apple's implementation for machines without its kernels: torch.compile of plain torch."""
    if tokens.targets.device.type == "cuda":
        raise Unavailable("on a GPU its kernels are measured")
    from cut_cross_entropy import linear_cross_entropy

    torch.compiler.reset()
    return lambda hidden, weight: HeadLoss(linear_cross_entropy(hidden, weight, tokens.targets, impl="torch_compile"))


def liger_cross_entropy_head(tokens: Tokens) -> Head:
    """Liger's fused linear cross-entropy."""
    _needs_gpu(tokens.targets.device)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss_of = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight: HeadLoss(loss_of(weight, hidden, tokens.targets))


def torch_cross_entropy_head(tokens: Tokens) -> Head:
    """torch's own cross-entropy, chunked with its default options (without options it computes the logits)."""
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        raise Unavailable(f"torch {torch.__version__} has no chunked torch.nn.functional.linear_cross_entropy")
    chosen = options()
    return lambda hidden, weight: HeadLoss(function(hidden, weight, tokens.targets, options=chosen))


def _clipped(tokens: Tokens, logprobs: Tensor) -> Tensor:
    return plain.clipped_loss(logprobs.reshape(-1), tokens.old, tokens.advantages, tokens.count)
