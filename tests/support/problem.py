"""A problem for all entry points: hidden states, a head, targets and what an objective reads beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vocabulary import assert_as_good_as_torch, target_stats, transformed

import fastrl

# Two float32 routes to a sum of some dozen terms of size about 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

B, T, V, H = 3, 4, 37, 8
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
#: The loss and its gradients by the names of their inputs.
Found = tuple[fastrl.PolicyLoss, dict[str, Tensor]]


class Problem:
    """Random hidden states, a head and everything that a loss may read, off-policy unless told."""

    def __init__(
        self,
        device: str,
        on_policy: bool = False,
        per_token: bool = False,
        seed: int = 0,
        size: tuple[int, int, int, int] = (B, T, H, V),
        mask: Tensor | None = MASK,
        dtype: torch.dtype = torch.float32,
        sets: Callable[[Tensor, torch.Generator], fastrl.SamplingMask] | None = None,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        *shape, width, vocab = size

        def normal(*count: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*count, generator=g)).to(device)

        head = {"hidden": normal(*shape, width), "weight": normal(vocab, width, scale=2 * width**-0.5)}
        self.head = {k: x.to(dtype) for k, x in (head | {"bias": normal(vocab)}).items()}
        self.targets = targets = torch.randint(vocab, shape, generator=g)
        recorded = sets(targets, g).to(device) if sets else None
        self.support = recorded.to_dense(vocab).view(*shape, vocab) if recorded else None
        if mask is not None:
            self.targets = targets.where(mask.bool(), -100)
        self.targets = self.targets.to(device)
        with torch.no_grad():
            logp = self.stats(self.leaves(torch.float64))[0].float()
        #: What the entry points take beside logits or a head.
        self.arguments: dict[str, Any] = {
            "targets": self.targets,
            "advantages": normal(*shape) if per_token else normal(shape[0]),
            "group_ids": (torch.arange(shape[0]) % 2).to(device),
            "old_logprobs": None if on_policy else logp + normal(*shape, scale=0.3),
            "ref_logprobs": logp + normal(*shape, scale=0.3),
            "rollout_logprobs": logp + normal(*shape, scale=0.3),
        }
        self.arguments |= {} if mask is None else {"mask": mask.to(device)}
        self.arguments |= {"sampling_mask": recorded} if recorded else {}

    def of_policy_loss(self) -> dict[str, Any]:
        """Those of the arguments that `policy_loss` takes."""
        return {k: x for k, x in self.arguments.items() if k not in ("targets", "sampling_mask")}

    def leaves(self, dtype: torch.dtype | None = None, frozen: bool = False) -> dict[str, Tensor]:
        """Copies that take a gradient: of the hidden states alone if the head is frozen."""
        return {
            k: x.detach().to(dtype, copy=True).requires_grad_(k == "hidden" or not frozen) for k, x in self.head.items()
        }

    def stats(self, leaves: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies by torch, in float32 or wider, of whole logits of the leaves' dtype."""
        logits = linear(*leaves.values())
        z = transformed(logits.to(torch.promote_types(logits.dtype, torch.float32)), **options)
        z = z if self.support is None else z.masked_fill(~self.support, -torch.inf)
        return target_stats(z, self.targets)

    def plain(self, objective: Any, dtype: torch.dtype, frozen: bool = False, **options: Any) -> Found:
        """By torch from whole logits in `dtype`, with statistics in float32 or wider."""
        leaves = self.leaves(dtype, frozen)
        logp, entropy = self.stats(leaves, **options)
        given = self.of_policy_loss()
        floats = {k: x.to(logp.dtype) for k, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()}
        return _found(fastrl.policy_loss(logp, objective=objective, entropy=entropy, **(given | floats)), leaves)

    def by_logprobs(self, objective: Any, **more: Any) -> Found:
        leaves = self.leaves()
        stats = fastrl.token_logprobs(linear(*leaves.values()), self.targets, mask=self.arguments["mask"], entropy=True)
        given = self.of_policy_loss() | more
        out = fastrl.policy_loss(stats.logprobs, objective=objective, entropy=stats.entropy, **given)
        return _found(out, leaves)

    def by_logits(self, objective: Any, inplace: bool = False, upstream: float = 1.0, **more: Any) -> Found:
        leaves = self.leaves()
        logits = linear(*leaves.values())
        out = fastrl.logits_policy_loss(logits, objective=objective, inplace=inplace, **self.arguments, **more)
        return _found(out, leaves, upstream)

    def by_hidden(self, objective: Any, upstream: float = 1.0, frozen: bool = False, **more: Any) -> Found:
        leaves = self.leaves(frozen=frozen)
        return _found(
            fastrl.linear_policy_loss(**leaves, objective=objective, **self.arguments, **more), leaves, upstream
        )


def _found(out: fastrl.PolicyLoss, leaves: dict[str, Tensor], upstream: float = 1.0) -> Found:
    """Gradients are divided by `upstream`, which scaled the loss, in float32 or wider: a GradScaler's fit float16."""
    wanted = {k: x for k, x in leaves.items() if x.requires_grad}
    gradients = dict(zip(wanted, torch.autograd.grad(upstream * out.loss, list(wanted.values())), strict=True))
    assert all(x.dtype == wanted[k].dtype for k, x in gradients.items())
    return out, {k: x.to(torch.promote_types(x.dtype, torch.float32)) / upstream for k, x in gradients.items()}


def assert_same(actual: Found, expected: Found, what: str) -> None:
    """Losses, statistics per token, gradients and metrics."""

    def named(text: str) -> str:
        return f"{what}: {text}"

    (out, gradients), (truth, expected_gradients) = actual, expected
    tensors, expected_tensors = ({k: getattr(x, k) for k in ("loss", "logprobs", "entropy")} for x in (out, truth))
    torch.testing.assert_close(tensors | gradients, expected_tensors | expected_gradients, msg=named, **CLOSE)
    torch.testing.assert_close(out.metrics, truth.metrics, msg=named, equal_nan=True, **CLOSE)


def assert_loss_as_good_as_torch(
    found: Found, truth: Found, same_dtype: Found, margin: float, smallest: float = 0.0
) -> None:
    """The loss's error, and each gradient's relative to its largest entry, or to `smallest` if that is larger."""
    losses = (x.loss.detach()[None] for x, _ in (found, truth, same_dtype))
    assert_as_good_as_torch(*losses, margin, "loss")
    assert found[1].keys() == truth[1].keys()
    for name, exact in truth[1].items():
        scale = exact.abs().max().clamp_min(smallest)
        gradients = (x[name] / scale for _, x in (found, truth, same_dtype))
        assert_as_good_as_torch(*gradients, margin, f"d_{name}")
