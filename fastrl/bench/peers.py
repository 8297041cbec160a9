"""Other packages' implementations of the same workloads, with their own defaults; each raises if it cannot run.

PPO's clip with beta = 0 and loss_type "bnpo" (the mean over tokens) is what both Liger losses and fastrl compute here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fastrl.bench import plain
from fastrl.bench.contenders import Function, Result, Unavailable
from fastrl.bench.problems import Tokens

#: The chunk size that TRL's trainers pass to its head.
_TRL_HEAD_CHUNK = 32768


def _needs_gpu(tokens: Tokens) -> None:
    if tokens.targets.device.type != "cuda":
        raise Unavailable("its Triton kernels need a GPU")


def _needs_hopper(tokens: Tokens) -> None:
    _needs_gpu(tokens)
    capability = torch.cuda.get_device_capability(tokens.targets.device)
    if torch.version.hip or capability != (9, 0):
        raise Unavailable(f"its kernels need a Hopper GPU (compute capability 9.0), this one has {capability}")


def _needs_cpu(tokens: Tokens, reason: str) -> None:
    if tokens.targets.device.type == "cuda":
        raise Unavailable(reason)


def clipped(make: Callable[[Tokens], Function], tokens: Tokens) -> Function:
    """A peer's log-probabilities, and entropies for the log, followed by the clipped loss in torch."""
    statistics = make(tokens)

    def function(*inputs: Tensor) -> Result:
        _, logprobs, entropy = statistics(*inputs)
        assert logprobs is not None
        loss = plain.clipped_loss(logprobs.reshape(-1), tokens.old, tokens.advantages, tokens.count)
        return Result(loss, logprobs, entropy)

    return function


def liger_logits_loss(tokens: Tokens) -> Function:
    """Liger's one-kernel GRPO loss of logits (B, T + 1, V); its backward overwrites them with the gradient."""
    _needs_gpu(tokens)
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    old, targets = tokens.padded(tokens.old), tokens.padded(tokens.targets)

    def function(logits: Tensor) -> Result:
        loss, _ = triton_grpo_loss(
            logits,
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
        return Result(loss)

    return function


def liger_policy_head(tokens: Tokens) -> Function:
    """Liger's chunked GRPO loss, one response per chunk."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    old, targets = tokens.padded(tokens.old), tokens.padded(tokens.targets)
    mask = torch.ones_like(old)
    loss_of = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=plain.CLIP, epsilon_high=plain.CLIP, loss_type="bnpo"
    )

    def function(hidden: Tensor, weight: Tensor) -> Result:
        loss, _ = loss_of(tokens.padded(hidden), weight, targets, mask, tokens.per_response, old_per_token_logps=old)
        return Result(loss)

    return function


def liger_cross_entropy(tokens: Tokens) -> Function:
    """Liger's fused linear cross-entropy."""
    _needs_gpu(tokens)
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss_of = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight: Result(loss_of(weight, hidden, tokens.targets))


def liger_logits_cross_entropy(tokens: Tokens) -> Function:
    """Liger's cross-entropy of logits (B, T, V); its forward overwrites them with the gradient."""
    _needs_gpu(tokens)
    from liger_kernel.transformers import LigerCrossEntropyLoss

    loss_of = LigerCrossEntropyLoss()
    return lambda logits: Result(loss_of(logits.flatten(0, 1), tokens.targets))


def liger_hopper_cross_entropy(tokens: Tokens) -> Function:
    """Liger's fused linear cross-entropy for Hopper, which is called by name: nothing of Liger's chooses it."""
    _needs_hopper(tokens)
    cross_entropy: Any = import_module(
        "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    ).liger_fused_linear_cross_entropy_sm90
    return lambda hidden, weight: Result(cross_entropy(hidden, weight, tokens.targets))


def liger_hopper_head(entropy: bool, tokens: Tokens) -> Function:
    """Liger's fused scaled cross-entropy as a head, which elsewhere than on Hopper would be plain torch."""
    _needs_hopper(tokens)
    head: Any = import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction

    def function(hidden: Tensor, weight: Tensor) -> Result:
        found = head.apply(hidden, weight, tokens.targets, return_entropy=entropy)
        nll, entropies = found if entropy else (found, None)
        return Result(None, -nll, entropies)

    return function


def mean_cross_entropy(make: Callable[[Tokens], Function], tokens: Tokens) -> Function:
    """A peer's log-probabilities, averaged in torch."""
    statistics = make(tokens)

    def function(*inputs: Tensor) -> Result:
        _, logprobs, _ = statistics(*inputs)
        assert logprobs is not None
        return Result(-logprobs.mean())

    return function


def quack_logits_cross_entropy(tokens: Tokens) -> Function:
    """quack's cross-entropy of logits (B, T, V); its backward overwrites them with the gradient."""
    _needs_gpu(tokens)
    cross_entropy: Any = import_module("quack.cross_entropy").cross_entropy
    return lambda logits: Result(cross_entropy(logits.flatten(0, 1), tokens.targets, inplace_backward=True))


def quack_cross_entropy(tokens: Tokens) -> Function:
    """quack's chunked linear cross-entropy; on Hopper in bfloat16 it takes its fused path if V is a multiple of 128.

    Its base path without a search for the best kernels, which takes minutes.
    """
    _needs_gpu(tokens)
    cross_entropy: Any = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda hidden, weight: Result(cross_entropy(hidden, weight, tokens.targets, tuned=False))


def trl_statistics(kernel: bool, tokens: Tokens) -> Function:
    """TRL's function of logits (B, T, V): its Triton kernel, or the torch code that its trainers use elsewhere."""
    if kernel:
        _needs_gpu(tokens)
    else:
        _needs_cpu(tokens, "on a GPU this function of TRL calls its kernel")
    module = import_module("trl.kernels" if kernel else "trl.trainer.utils")
    targets = tokens.padded(tokens.targets)
    return lambda logits: Result(None, *module.selective_log_softmax_and_entropy(logits, targets))


def trl_head(tokens: Tokens) -> Function:
    """TRL's chunked head: log-probabilities and entropies."""
    head: Any = import_module("trl.kernels").ChunkedLogProbFunction

    def function(hidden: Tensor, weight: Tensor) -> Result:
        logprobs, entropy, *_ = head.apply(
            hidden, weight, None, tokens.targets, 1.0, _TRL_HEAD_CHUNK, None, 1.0, ("entropy",)
        )
        return Result(None, logprobs, entropy)

    return function


def apple_head(tokens: Tokens) -> Function:
    """Apple's cut cross-entropy as a head; it returns no entropies."""
    _needs_gpu(tokens)
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight: Result(None, -linear_cross_entropy(hidden, weight, tokens.targets, reduction="none"))


def apple_cross_entropy(kernels: bool, tokens: Tokens) -> Function:
    """Apple's cut cross-entropy, with its default gradient filter; for machines without its kernels torch.compile's."""
    if kernels:
        _needs_gpu(tokens)
    else:
        _needs_cpu(tokens, "on a GPU its kernels are measured")
        torch.compiler.reset()
    from cut_cross_entropy import linear_cross_entropy

    options = {} if kernels else {"impl": "torch_compile"}
    return lambda hidden, weight: Result(linear_cross_entropy(hidden, weight, tokens.targets, **options))


def torch_cross_entropy(tokens: Tokens) -> Function:
    """torch's own cross-entropy, chunked with its default options (without options it computes the logits)."""
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if function is None or options is None:
        raise Unavailable(f"torch {torch.__version__} has no chunked torch.nn.functional.linear_cross_entropy")
    chosen = options()
    return lambda hidden, weight: Result(function(hidden, weight, tokens.targets, options=chosen))
