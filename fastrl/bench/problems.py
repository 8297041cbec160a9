"""The inputs that all contenders of a workload share, and the float64 results expected from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.bench import plain

#: Standard deviation of the logits: rows are neither flat nor nearly one-hot.
_SPREAD = 3.0
#: The number of rows whose gradients are checked. All rows' log-probabilities and entropies and the loss are checked.
_SAMPLED_ROWS = 64
#: Bytes of one float64 chunk of logits while expected results are computed.
_CHUNK_BYTES = 256 << 20


class Expected(NamedTuple):
    """Expected results in float64; gradients by name, each as (indices into the first dimension, values at them)."""

    loss: Tensor | None
    logprobs: Tensor
    entropy: Tensor
    gradients: dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Tokens:
    """What the losses read besides logits: B responses of T tokens, flattened to N = B T."""

    responses: int
    targets: Tensor  # (N,) int64
    per_response: Tensor  # (B,) float32 advantages
    advantages: Tensor  # (N,) float32, per_response repeated per token
    old: Tensor  # (N,) float32, off-policy log-probabilities
    upstream: tuple[Tensor, Tensor]  # 2 x (N,) float32: arbitrary gradients of log-probabilities and entropies

    @property
    def count(self) -> int:
        """The number of tokens, N."""
        return self.targets.shape[0]

    @property
    def length(self) -> int:
        """The length of a response, T."""
        return self.count // self.responses

    def padded(self, tensor: Tensor) -> Tensor:
        """A view of (N, ...) as (B, T, ...)."""
        return tensor.view(self.responses, self.length, *tensor.shape[1:])

    def sampled(self) -> Tensor:
        """Indices of the rows whose gradients are checked, evenly spaced from first to last."""
        return torch.linspace(
            0, self.count - 1, min(self.count, _SAMPLED_ROWS), device=self.targets.device, dtype=torch.float64
        ).long()


@dataclass(frozen=True)
class LogitsProblem:
    """Logits (N, V) and their tokens."""

    logits: Tensor
    tokens: Tokens
    logprobs: Tensor  # (N,) float64
    entropy: Tensor  # (N,) float64

    def expected_statistics(self) -> Expected:
        """The expected log-probabilities and entropies, and the gradient for the tokens' upstream."""
        rows = self.tokens.sampled()
        c, h = (u[rows].double() for u in self.tokens.upstream)
        x = self.logits[rows].double().requires_grad_()
        logprobs, entropy = plain.statistics(x, self.tokens.targets[rows])
        (gradient,) = torch.autograd.grad((c * logprobs + h * entropy).sum(), x)
        return Expected(None, self.logprobs, self.entropy, {"logits": (rows, gradient)})

    def expected_loss(self) -> Expected:
        """The expected results of the clipped loss."""
        rows = self.tokens.sampled()
        x = self.logits[rows].double().requires_grad_()
        loss, *_ = plain.policy_loss(x, *_loss_inputs(self.tokens, rows))
        (gradient,) = torch.autograd.grad(loss, x)
        return Expected(_loss(self.tokens, self.logprobs), self.logprobs, self.entropy, {"logits": (rows, gradient)})


@dataclass(frozen=True)
class LinearProblem:
    """Hidden states (N, H), an output head (V, H) and their tokens."""

    hidden: Tensor
    weight: Tensor
    tokens: Tokens
    logprobs: Tensor  # (N,) float64
    entropy: Tensor  # (N,) float64

    def expected_statistics(self) -> Expected:
        """The expected log-probabilities and entropies, forward only."""
        return Expected(None, self.logprobs, self.entropy, {})

    def expected_loss(self) -> Expected:
        """The expected results of the clipped loss."""
        return self._expected_loss(_loss)

    def expected_sequence_loss(self) -> Expected:
        """The expected results of the clipped loss of sequence ratios."""
        return self._expected_loss(_sequence_loss)

    def _expected_loss(self, loss_of: Callable[[Tokens, Tensor], Tensor]) -> Expected:
        logp = self.logprobs.clone().requires_grad_()
        loss = loss_of(self.tokens, logp)
        (c,) = torch.autograd.grad(loss, logp)
        return Expected(loss.detach(), self.logprobs, self.entropy, self._gradients(c))

    def expected_cross_entropy(self) -> Expected:
        """The expected results of the mean cross-entropy of the targets."""
        c = torch.full_like(self.logprobs, -1 / self.tokens.count)
        return Expected(-self.logprobs.mean(), self.logprobs, self.entropy, self._gradients(c))

    def _gradients(self, c: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The gradients of sum_t c_t logp_t for sampled rows of the hidden states and of the weight."""
        tokens, weight = self.tokens, self.weight.double()
        rows = tokens.sampled()
        x = self.hidden[rows].double().requires_grad_()
        logprobs, _ = plain.linear_statistics(x, weight, tokens.targets[rows])
        (d_hidden,) = torch.autograd.grad((c[rows] * logprobs).sum(), x)

        # d loss / d z_v = c (1[v = y] - p_v) for all tokens, but only for a few entries v, targets and others
        entries = checked_entries(tokens, weight.shape[0])
        hidden = self.hidden.double()
        target_logit = (hidden * weight[tokens.targets]).sum(-1)
        log_p = hidden @ weight[entries].t() - (target_logit - self.logprobs)[:, None]
        is_target = (tokens.targets[:, None] == entries).double()
        d_weight = (c[:, None] * (is_target - log_p.exp())).t() @ hidden
        return {"hidden": (rows, d_hidden), "weight": (entries, d_weight)}


def checked_entries(tokens: Tokens, vocab: int) -> Tensor:
    """Vocabulary entries whose rows of the head's gradient are checked: 16 targets and 16 evenly spaced entries."""
    spaced = torch.linspace(0, vocab - 1, 16, device=tokens.targets.device, dtype=torch.float64).long()
    return torch.cat([tokens.targets[tokens.sampled()[:16]], spaced])


def _loss_inputs(tokens: Tokens, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    return tokens.targets[rows], tokens.old[rows].double(), tokens.advantages[rows].double(), tokens.count


def _loss(tokens: Tokens, logprobs: Tensor) -> Tensor:
    return plain.clipped_loss(logprobs, tokens.old.double(), tokens.advantages.double(), tokens.count)


def _sequence_loss(tokens: Tokens, logprobs: Tensor) -> Tensor:
    log_ratio = tokens.padded(logprobs - tokens.old.double())
    return plain.sequence_clipped_loss(log_ratio, tokens.per_response.double())


def chunks(count: int, vocab: int) -> Iterator[slice]:
    """Slices that cover `count` rows; the float64 logits of each fit a chunk."""
    size = max(1, _CHUNK_BYTES // (8 * vocab))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def make_tokens(
    targets: Tensor, logprobs: Tensor, generator: torch.Generator, responses: int | None = None, clipped: float = 0.05
) -> Tokens:
    """Off-policy tokens, of which a share (one in twenty by default) is far enough off to be clipped on one side.

    Log-ratios keep away from the clip's bounds, where rounding would decide whether a token has a gradient.
    """
    n, device = targets.shape[0], targets.device

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n, device=device).uniform_(low, high, generator=generator)

    size = uniform(0.05, 0.15).where(uniform(0, 1) > clipped, uniform(0.35, 0.45))
    log_ratio = size * uniform(-1, 1).sign()
    responses = responses or math.gcd(n, 8)
    advantages = torch.randn(responses, device=device, generator=generator)
    return Tokens(
        responses=responses,
        targets=targets,
        per_response=advantages,
        advantages=advantages.repeat_interleave(n // responses),
        old=(logprobs - log_ratio).float(),
        upstream=(
            torch.randn(n, device=device, generator=generator),
            torch.randn(n, device=device, generator=generator),
        ),
    )


def logits_problem(n: int, vocab: int, dtype: torch.dtype, device: str) -> LogitsProblem:
    """Normal logits, uniform targets; deterministic for given arguments."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(n, vocab, device=device, dtype=dtype, generator=generator).mul_(_SPREAD)
    targets = torch.randint(vocab, (n,), device=device, generator=generator)
    parts = [plain.statistics(logits[rows].double(), targets[rows]) for rows in chunks(n, vocab)]
    logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    return LogitsProblem(logits, make_tokens(targets, logprobs, generator), logprobs, entropy)


def linear_problem(
    n: int, width: int, vocab: int, dtype: torch.dtype, device: str, clipped: float = 0.05
) -> LinearProblem:
    """Normal hidden states and head, uniform targets; deterministic for given arguments."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n, width, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(vocab, width, device=device, dtype=dtype, generator=generator).mul_(_SPREAD / width**0.5)
    targets = torch.randint(vocab, (n,), device=device, generator=generator)
    wide = weight.double()
    parts = [plain.linear_statistics(hidden[rows].double(), wide, targets[rows]) for rows in chunks(n, vocab)]
    logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    tokens = make_tokens(targets, logprobs, generator, clipped=clipped)
    return LinearProblem(hidden, weight, tokens, logprobs, entropy)
