"""The inputs that all contenders of a workload share, and the float64 results expected from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import fastrl
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
    logprobs: Tensor | None
    entropy: Tensor | None
    gradients: dict[str, tuple[Tensor, Tensor]]


class Size(NamedTuple):
    """A problem's size, and numbers of bytes that follow from it."""

    tokens: int
    hidden: int  # 0 if the problem starts from logits
    vocab: int
    element_size: int

    @property
    def once(self) -> int:
        """One tensor of the logits' shape in the problem's dtype."""
        return self.tokens * self.vocab * self.element_size

    @property
    def wide(self) -> int:
        """One tensor of the logits' shape in float32."""
        return self.tokens * self.vocab * 4

    @property
    def gradients(self) -> int:
        """The gradients of hidden states and weight, in float32."""
        return 4 * self.hidden * (self.tokens + self.vocab)

    @property
    def product_flops(self) -> int:
        """The floating-point operations of one of the head's matrix products."""
        return 2 * self.tokens * self.hidden * self.vocab


@dataclass(frozen=True)
class Tokens:
    """What the losses read besides logits: B responses of T tokens, flattened to N = B T."""

    responses: int
    targets: Tensor  # (N,) int64
    per_response: Tensor  # (B,) float32 advantages
    advantages: Tensor  # (N,) float32, per_response repeated per token
    old: Tensor  # (N,) float32, off-policy log-probabilities
    upstream: tuple[Tensor, Tensor]  # 2 x (N,) float32: arbitrary gradients of log-probabilities and entropies
    sets: fastrl.SamplingMask | None = None  # the recorded support of each token; None: the whole vocabulary

    @property
    def count(self) -> int:
        """The number of tokens, N."""
        return self.targets.shape[0]

    def padded(self, tensor: Tensor) -> Tensor:
        """A view of (N, ...) as (B, T, ...)."""
        return tensor.view(self.responses, -1, *tensor.shape[1:])

    def sampled(self) -> Tensor:
        """Indices of the rows whose gradients are checked."""
        return checked_rows(self.count, self.targets.device)

    def checked_entries(self, vocab: int) -> Tensor:
        """Vocabulary entries whose rows of the head's gradient are checked: 16 targets and 16 evenly spaced entries."""
        return torch.cat([self.targets[self.sampled()[:16]], _spaced(vocab, 16, self.targets.device)])


def checked_rows(count: int, device: torch.device) -> Tensor:
    """Indices of the rows, of `count`, whose gradients are checked, evenly spaced from first to last."""
    return _spaced(count, min(count, _SAMPLED_ROWS), device)


def _spaced(count: int, chosen: int, device: torch.device) -> Tensor:
    return torch.linspace(0, count - 1, chosen, device=device, dtype=torch.float64).long()


@dataclass(frozen=True)
class Problem:
    """Logits, or hidden states and an output head, with their tokens; expected results from all of them."""

    inputs: dict[str, Tensor]  # "logits" (N, V), or "hidden" (N, H) and "weight" (V, H)
    tokens: Tokens
    logprobs: Tensor  # (N,) float64, like entropy over the sets if there are any
    entropy: Tensor

    @property
    def size(self) -> Size:
        """The problem's size."""
        (first, *weight), count = self.inputs.values(), self.tokens.count
        hidden, vocab = (first.shape[1], weight[0].shape[0]) if weight else (0, first.shape[1])
        return Size(count, hidden, vocab, first.element_size())

    def expected_forward(self) -> Expected:
        """The expected log-probabilities and entropies alone."""
        return Expected(None, self.logprobs, self.entropy, {})

    def expected_statistics(self) -> Expected:
        """The expected log-probabilities and entropies, and the gradient of the logits for the tokens' upstream."""
        rows = self.tokens.sampled()
        gradient = self.row_gradients(rows, *(u.double() for u in self.tokens.upstream))
        return self.expected_forward()._replace(gradients={"logits": (rows, gradient)})

    def expected_loss(self) -> Expected:
        """The expected results of the clipped loss."""
        return self.expected(self.loss)

    def loss(self, logprobs: Tensor) -> Tensor:
        """The clipped loss of log-probabilities (N,) in float64."""
        tokens = self.tokens
        return plain.clipped_loss(logprobs, tokens.old.double(), tokens.advantages.double(), tokens.count)

    def expected_sequence_loss(self) -> Expected:
        """The expected results of the clipped loss of sequence ratios."""
        old, advantages = self.tokens.old.double(), self.tokens.per_response.double()
        return self.expected(lambda logp: plain.sequence_clipped_loss(self.tokens.padded(logp - old), advantages))

    def expected_cross_entropy(self) -> Expected:
        """The expected results of the mean cross-entropy of the targets."""
        return self.expected(lambda logp: -logp.mean())

    def expected(self, loss_of: Callable[[Tensor], Tensor]) -> Expected:
        """The expected results of a loss of the log-probabilities (N,)."""
        loss, c = self.coefficients(loss_of)
        rows = self.tokens.sampled()
        gradients = {next(iter(self.inputs)): (rows, self.row_gradients(rows, c))}
        if "weight" in self.inputs:
            gradients["weight"] = self.weight_gradients(c)
        return Expected(loss, self.logprobs, self.entropy, gradients)

    def coefficients(self, loss_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient for each token's log-probability."""
        logp = self.logprobs.clone().requires_grad_()
        loss = loss_of(logp)
        return loss.detach(), torch.autograd.grad(loss, logp)[0]

    def row_gradients(self, rows: Tensor, c: Tensor, h: Tensor | None = None) -> Tensor:
        """The gradients of sum_t c_t logp_t + h_t H_t for some rows of the logits or of the hidden states."""
        first, *weight = (x if name == "weight" else x[rows] for name, x in self.inputs.items())
        x = first.double().requires_grad_()
        logprobs, entropy = _statistics([x, *(w.double() for w in weight)], rows, self.tokens.targets, self.tokens.sets)
        total = (c[rows] * logprobs).sum() + (0 if h is None else (h[rows] * entropy).sum())
        return torch.autograd.grad(total, x)[0]

    def weight_gradients(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of sum_t c_t logp_t for the checked entries of the weight, from all tokens.

        d loss / d z_v = c (1[v = y] - p_v), where p_v is 0 outside a token's set.
        """
        tokens, weight = self.tokens, self.inputs["weight"].double()
        entries, hidden = tokens.checked_entries(len(weight)), self.inputs["hidden"].double()
        target_logit = (hidden * weight[tokens.targets]).sum(-1)
        p = (hidden @ weight[entries].t() - (target_logit - self.logprobs)[:, None]).exp()
        if tokens.sets is not None:
            parts = chunks(tokens.count, len(weight), p.device)
            p *= torch.cat([tokens.sets.index(rows).to_dense(len(weight))[:, entries] for rows in parts])
        is_target = (tokens.targets[:, None] == entries).double()
        return entries, (c[:, None] * (is_target - p)).t() @ hidden


def chunks(count: int, vocab: int, device: torch.device) -> Sequence[Tensor]:
    """The indices of `count` rows, split so that the float64 logits of each part fit a chunk."""
    return torch.arange(count, device=device).split(max(1, _CHUNK_BYTES // (8 * vocab)))


def _statistics(
    inputs: Sequence[Tensor], rows: Tensor, targets: Tensor, sets: fastrl.SamplingMask | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of some rows, given those rows of the first input, in float64."""
    logits = inputs[0] if len(inputs) == 1 else torch.nn.functional.linear(*inputs)
    if sets is not None:
        # Finite, because -inf times a probability of 0 is not a number.
        logits = logits.masked_fill(~sets.index(rows).to_dense(logits.shape[1]), -1e30)
    return plain.statistics(logits, targets[rows])


def make_problem(
    inputs: dict[str, Tensor],
    targets: Tensor,
    generator: torch.Generator,
    responses: int | None = None,
    clipped: float = 0.05,
    sets: fastrl.SamplingMask | None = None,
) -> Problem:
    """Off-policy tokens, of which a share (one in twenty by default) is far enough off to be clipped on one side.

    Log-ratios keep away from the clip's bounds, where rounding would decide whether a token has a gradient.
    """
    n, device = len(targets), targets.device
    first, *weight = inputs.values()
    wide = [w.double() for w in weight]
    vocab = len(wide[0]) if wide else first.shape[1]
    parts = [_statistics([first[rows].double(), *wide], rows, targets, sets) for rows in chunks(n, vocab, device)]
    logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n, device=device).uniform_(low, high, generator=generator)

    size = uniform(0.05, 0.15).where(uniform(0, 1) > clipped, uniform(0.35, 0.45))
    log_ratio = size * uniform(-1, 1).sign()
    responses = responses or math.gcd(n, 8)
    advantages, *upstream = (torch.randn(k, device=device, generator=generator) for k in (responses, n, n))
    tokens = Tokens(
        responses=responses,
        targets=targets,
        per_response=advantages,
        advantages=advantages.repeat_interleave(n // responses),
        old=(logprobs - log_ratio).float(),
        upstream=(upstream[0], upstream[1]),
        sets=sets,
    )
    return Problem(inputs, tokens, logprobs, entropy)


def logits_problem(n: int, vocab: int, dtype: torch.dtype, device: str) -> Problem:
    """Normal logits, uniform targets; deterministic for given arguments."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(n, vocab, device=device, dtype=dtype, generator=generator).mul_(_SPREAD)
    targets = torch.randint(vocab, (n,), device=device, generator=generator)
    return make_problem({"logits": logits}, targets, generator)


def normal_head(
    n: int, width: int, vocab: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Normal hidden states (N, H) and weight (V, H) on the generator's device."""
    hidden, weight = (
        torch.randn(rows, width, device=generator.device, dtype=dtype, generator=generator) for rows in (n, vocab)
    )
    return hidden, weight.mul_(_SPREAD / width**0.5)


def linear_problem(
    n: int, width: int, vocab: int, dtype: torch.dtype, device: str, clipped: float = 0.05, mean_set: int | None = None
) -> Problem:
    """Normal hidden states and head, uniform targets; deterministic for given arguments.

    Given `mean_set`, each token has a set of 1 to 2 `mean_set` - 1 random ids that include the target.
    """
    generator = torch.Generator(device).manual_seed(0)
    hidden, weight = normal_head(n, width, vocab, dtype, generator)
    targets = torch.randint(vocab, (n,), device=device, generator=generator)
    sets = None
    if mean_set is not None:
        sizes = torch.randint(1, 2 * mean_set, (n,), device=device, generator=generator)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        ids = torch.randint(vocab, (int(offsets[-1]),), device=device, generator=generator)
        ids[offsets[:-1]] = targets
        sets = fastrl.SamplingMask(ids, offsets)
    return make_problem({"hidden": hidden, "weight": weight}, targets, generator, None, clipped, sets)
