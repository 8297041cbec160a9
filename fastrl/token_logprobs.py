"""Log-probabilities and entropies of given tokens, from logits or from hidden states and the output head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .memory import ANY, Call, Plan, choose, parse_budget
from .ops.backend import forced, resolved
from .ops.contract import Transform
from .ops.linear import linear_statistics
from .ops.products import Head, Needs
from .ops.rows import as_rows, row_statistics


class TokenStats(NamedTuple):
    """What the vocabulary work gives per token."""

    logprobs: Tensor
    """float32, the shape of targets: log-probability of each target, in nats; 0 where masked."""
    entropy: Tensor | None
    """float32, the shape of targets: entropy in nats; 0 where masked; None unless asked for."""


class VocabularyArguments(NamedTuple):
    """Checked arguments of an entry point, flattened for the operators."""

    targets: Tensor  # (N,) int64
    mask: Tensor | None  # (N,) bool
    transform: Transform


def vocabulary_arguments(
    targets: Tensor, mask: object, temperature: object, logit_scale: object, softcap: object
) -> VocabularyArguments:
    """Check what both entry points share and flatten it."""
    checked = checks.mask(mask, targets)
    scalar, per_token = checks.temperature(temperature, targets, checked)
    transform = Transform(
        scalar, per_token, checks.number("logit_scale", logit_scale, positive=True), checks.softcap(softcap)
    )
    return VocabularyArguments(
        targets.reshape(-1).contiguous(), None if checked is None else checked.reshape(-1).contiguous(), transform
    )


def checked_logits(logits: object, targets: object, inplace: object) -> tuple[Tensor, Tensor]:
    """Logits (..., V) and their targets (...), or an error that names what is wrong."""
    logits = checks.tensor("logits", logits, checks.LOGIT_DTYPES)
    if logits.dim() < 1 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape (..., V) with V >= 1, got {tuple(logits.shape)}")
    if not isinstance(inplace, bool):
        raise TypeError(f"inplace must be a bool, got {type(inplace).__name__}")
    return logits, checks.targets(targets, logits.shape[:-1], "logits.shape[:-1]", logits, "logits")


def consumes(logits: Tensor, inplace: bool) -> bool:
    """Whether the logits' memory is taken for their gradient: asked for, and they need one.

    Never in a graph of torch.compile, which plans memory itself.
    """
    return inplace and logits.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def checked_head(hidden: object, weight: object, bias: object, targets: object) -> tuple[Head, Tensor, int]:
    """A head whose hidden states are flattened to (N, H), the targets (...), and the bytes copied; or an error.

    Under autocast the three are cast to its dtype, as torch.nn.functional.linear would cast them.
    """
    hidden = checks.tensor("hidden", hidden)
    weight = checks.tensor("weight", weight)
    bias = None if bias is None else checks.tensor("bias", bias)
    given = (hidden, weight, bias)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    checks.tensor("hidden", hidden, checks.LOGIT_DTYPES)
    if hidden.dim() < 1 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or 0 in weight.shape:
        raise ValueError(
            "hidden must have shape (..., H) and weight (V, H) with V, H >= 1,"
            f" got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            checks.same_device(name, value, hidden, "hidden")
            if value.dtype != hidden.dtype:
                raise TypeError(f"{name} must be {hidden.dtype} like hidden, got {value.dtype}")
    if bias is not None:
        checks.shape("bias", bias, weight.shape[:1], "one a vocabulary entry")
    targets = checks.targets(targets, hidden.shape[:-1], "hidden.shape[:-1]", hidden, "hidden")
    head = Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    return head, targets, _copied_bytes(given, head)


def _copied_bytes(given: tuple[Tensor | None, ...], head: Head) -> int:
    """Memory of casts with their gradients', of hidden states that allow no view (N, H), and of irregular leaves.

    Gradients are contiguous here, and autograd copies them into a leaf's own layout.
    """
    total = 0
    for before, after in zip(given, head, strict=True):
        if before is None or after is None:
            continue
        copies = 2 if before.dtype != after.dtype else 0
        if not before.is_contiguous():
            copies += (before.dim() > 2) + ((before.requires_grad and before.is_leaf) or before.dim() == 2)
        total += copies * after.numel() * after.element_size()
    return total


def token_logprobs(
    logits: Tensor,  # (..., V)
    targets: Tensor,  # (...)
    *,
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    sampling_mask: object = None,
    entropy: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    inplace: bool = False,
) -> TokenStats:
    """Log-probabilities of targets, and entropies, from logits, without an (N, V) float32 tensor.

    With `z = softcap * tanh(logit_scale * logits / softcap) / temperature` (no tanh without a softcap):
    `logprobs = z[target] - logsumexp(z)` and `entropy = -sum_j p_j log p_j`, in nats. Both are differentiable.
    `-inf` logits have probability 0, with a softcap too. `logits[t]` predicts `targets[t]`: nothing is shifted.

    Args:
        logits: (..., V) float32, bfloat16 or float16, any leading strides.
        targets: (...) int64 in [0, V); not read where the mask is 0.
        mask: (...) bool or 0/1, 1 = counts. Masked outputs and gradients are 0.
        temperature: a float > 0, or a floating tensor shaped like targets (not differentiated).
        sampling_mask: not built yet.
        entropy: whether to return entropies.
        logit_scale: multiplies the logits (Cohere, Granite).
        softcap: bounds the logits smoothly (Gemma 2), > 0.
        inplace: the backward writes the gradient over the logits, if they need one; a second backward raises
            RuntimeError. Nothing else may read the logits after the backward. Under torch.compile it changes nothing.

    Returns:
        TokenStats of float32 tensors shaped like targets.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or option.
        IndexError: on the CPU, or inside `check_inputs()`, an unmasked target outside [0, V); on a GPU its
            log-probability is NaN.
    """
    logits, targets = checked_logits(logits, targets, inplace)
    checks.unsupported(sampling_mask=sampling_mask)
    args = vocabulary_arguments(targets, mask, temperature, logit_scale, softcap)
    consume = consumes(logits, inplace)
    rows = as_rows(logits, consume)
    transform = args.transform
    logprobs, entropies, *_ = row_statistics(
        rows, args.targets, args.mask, transform.temperatures, transform.temperature, transform.logit_scale,
        transform.softcap, forced(), consume,
    )  # fmt: skip
    return TokenStats(logprobs.view(targets.shape), entropies.view(targets.shape) if entropy else None)


def linear_token_logprobs(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    targets: Tensor,  # (...)
    *,
    bias: Tensor | None = None,  # (V,)
    mask: Tensor | None = None,  # (...)
    temperature: float | Tensor = 1.0,
    sampling_mask: object = None,
    entropy: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    memory_budget: int | str | None = None,
    tp_group: Any = None,
    extras: tuple[str, ...] = (),
) -> TokenStats:
    """`token_logprobs` of the logits `hidden @ weight.T + bias`, a chunk of rows at a time: no (N, V) tensor exists.

    Differentiable in hidden, weight and bias, by the cheapest plan that fits `memory_budget` (`fastrl.plan_memory`
    shows them): nothing that needs a gradient costs U = 2 N V H operations, a frozen head 2U (3U with the entropy), and
    otherwise the backward forms the logits again (4U, or 5U where memory is least). Gradients of weight and bias are
    summed in float32. Masked rows never enter a matrix product, and rows without an upstream gradient none of the
    backward's: each costs one host synchronisation on a GPU.

    Args:
        hidden: (..., H) float32, bfloat16 or float16. Under autocast, hidden, weight and bias are cast to its dtype.
        weight: (V, H), the output head, of hidden's dtype; a weight that needs no gradient costs no product for it.
        targets: (...) int64 in [0, V); not read where the mask is 0.
        bias: (V,) of hidden's dtype.
        mask, temperature, entropy, logit_scale, softcap: as in `token_logprobs`.
        memory_budget: bytes, or text such as "256MiB": the most temporary memory that the call and its backward may
            use beyond inputs, outputs and their gradients (a matrix library's own workspace is not counted). None: a
            quarter of the free memory.
        sampling_mask, tp_group, extras: not built yet.

    Returns, raises: as `token_logprobs`; ValueError too for a budget that is too small for any plan, which names the
    smallest possible.
    """
    head, targets, copied = checked_head(hidden, weight, bias, targets)
    checks.unsupported(sampling_mask=sampling_mask, tp_group=tp_group, extras=extras)
    budget = parse_budget(memory_budget)
    args = vocabulary_arguments(targets, mask, temperature, logit_scale, softcap)
    call = _call(head, args, slopes=1 + entropy, copied=copied)
    plan = choose(call, budget)
    logprobs, entropies = linear_stats(head, args, plan, call.slopes, -1, waits=True)
    return TokenStats(logprobs.view(targets.shape), entropies.view(targets.shape) if entropy else None)


def _call(head: Head, args: VocabularyArguments, slopes: int, copied: int) -> Call:
    """What the plan of log-probabilities depends on."""
    needs = Needs(*(torch.is_grad_enabled() and x is not None and x.requires_grad for x in head))
    total = args.targets.shape[0]
    vocab, width = head.weight.shape
    return Call(
        rows=counted_rows(args), hidden=width, vocab=vocab, dtype=head.weight.dtype, device=head.weight.device.type,
        needs=needs, scope=ANY, slopes=slopes, all_rows=total, copied=copied,
        backend=resolved(forced(), head.weight.device.type),
    )  # fmt: skip


def counted_rows(args: VocabularyArguments) -> int:
    """The number of unmasked tokens where the host may look, else of all."""
    if args.mask is not None and checks.values_are_checked(args.mask):
        return int(args.mask.sum())
    return args.targets.shape[0]


def linear_stats(
    head: Head, args: VocabularyArguments, plan: Plan, slopes: int, num_tokens: int, waits: bool
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probabilities and entropies (N,) by a plan.

    num_tokens is -1 where unknown; `waits` says whether the backward may ask the GPU which rows have turned out idle.
    """
    transform = args.transform
    logprobs, entropies, *_ = linear_statistics(
        head.hidden, head.weight, head.bias, args.targets, args.mask, transform.temperatures, transform.temperature,
        transform.logit_scale, transform.softcap, forced(), num_tokens, waits, plan.name,
        slopes if plan.name == "frozen-head" else 0, plan.limits,
    )  # fmt: skip
    return logprobs, entropies
