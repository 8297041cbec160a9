"""A loss over recorded support sets, next to the same loss over the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import fastrl
from fastrl.bench import heads, plain
from fastrl.bench.heads import Candidate
from fastrl.bench.problems import Expected, LinearProblem, Tokens, checked_entries, chunks, make_tokens
from fastrl.bench.workloads import EAGER, Head, HeadLoss, Workload


@dataclass(frozen=True)
class MaskedProblem:
    """Hidden states (N, H), a head (V, H), tokens, and a recorded support for each token."""

    hidden: Tensor
    weight: Tensor
    tokens: Tokens
    sets: fastrl.SamplingMask
    logprobs: Tensor  # (N,) float64, over the sets, like entropy
    entropy: Tensor
    rows: Tensor  # (nnz,) int64: the row of each recorded id
    probabilities: Tensor  # (nnz,) float64

    @property
    def as_linear(self) -> LinearProblem:
        """The inputs of heads; the statistics are those over the sets."""
        return LinearProblem(self.hidden, self.weight, self.tokens, self.logprobs, self.entropy)

    def expected_loss(self) -> Expected:
        """The expected clipped loss, with gradients of sampled rows of the hidden states and of the weight."""
        tokens, ids = self.tokens, self.sets.token_ids.long()
        logp = self.logprobs.clone().requires_grad_()
        loss = plain.clipped_loss(logp, tokens.old.double(), tokens.advantages.double(), tokens.count)
        (c,) = torch.autograd.grad(loss, logp)
        d_logits = c[self.rows] * ((ids == tokens.targets[self.rows]).double() - self.probabilities)
        gradients = {}
        for name, indices, owners, factors in (
            ("hidden", tokens.sampled(), self.rows, (self.weight, ids)),
            ("weight", checked_entries(tokens, self.weight.shape[0]), ids, (self.hidden, self.rows)),
        ):
            sums = []
            for index in indices.tolist():
                entries = (owners == index).nonzero()[:, 0]
                sums.append(d_logits[entries] @ factors[0][factors[1][entries]].double())
            gradients[name] = (indices, torch.stack(sums))
        return Expected(loss.detach(), self.logprobs, self.entropy, gradients)


def masked_problem(n: int, width: int, vocab: int, mean: int, dtype: torch.dtype, device: str) -> MaskedProblem:
    """Sets of 1 to 2 `mean` - 1 random ids that include the target; deterministic for given arguments."""
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n, width, device=device, dtype=dtype, generator=g)
    weight = torch.randn(vocab, width, device=device, dtype=dtype, generator=g).mul_(3 / width**0.5)
    targets = torch.randint(vocab, (n,), device=device, generator=g)
    sizes = torch.randint(1, 2 * mean, (n,), device=device, generator=g)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    ids = torch.randint(vocab, (int(offsets[-1]),), device=device, generator=g)
    ids[offsets[:-1]] = targets
    sets = fastrl.SamplingMask(ids, offsets)
    rows = torch.arange(n, device=device).repeat_interleave(sets.lengths)
    position = torch.arange(len(rows), device=device) - sets.offsets[rows]
    ids = sets.token_ids.long()
    logits = torch.full((n, sets.longest), -torch.inf, dtype=torch.float64, device=device)
    for part in chunks(len(rows), width):
        logits[rows[part], position[part]] = (hidden[rows[part]].double() * weight[ids[part]].double()).sum(-1)
    log_p = torch.log_softmax(logits, -1)
    kept = log_p[rows, position]
    logprobs = torch.zeros(n, dtype=torch.float64, device=device)
    hits = ids == targets[rows]
    logprobs[rows[hits]] = kept[hits]
    entropy = -torch.zeros_like(logprobs).index_add_(0, rows, kept.exp() * kept)
    return MaskedProblem(hidden, weight, make_tokens(targets, logprobs, g), sets, logprobs, entropy, rows, kept.exp())


def workloads(problem: MaskedProblem, dense: LinearProblem) -> list[Workload]:
    """The loss over the sets, and over the whole vocabulary."""
    ours = Candidate("fastrl", partial(_policy, problem.sets), lambda s: s.gradients, ours=True)
    eager = Candidate(EAGER, partial(_plain_policy, problem.sets), lambda s: 2 * s.once + 6 * s.wide + s.gradients)
    return [
        Workload(
            "loss over recorded sets",
            "PPO's clipped loss (off-policy) over recorded sets and its gradients for hidden states and weight",
            [heads.contender(problem.as_linear, c) for c in (ours, eager)],
            problem.expected_loss(),
        ),
        Workload(
            "loss over the whole vocabulary",
            "the same without sets: what the sets save",
            [heads.contender(dense, heads.ours())],
            dense.expected_loss(),
        ),
    ]


def _policy(sets: fastrl.SamplingMask, tokens: Tokens) -> Head:
    targets, old = tokens.padded(tokens.targets), tokens.padded(tokens.old)
    objective = fastrl.PPO(clip=plain.CLIP)

    def head(hidden: Tensor, weight: Tensor) -> HeadLoss:
        result = fastrl.linear_policy_loss(
            tokens.padded(hidden),
            weight,
            targets,
            objective=objective,
            advantages=tokens.per_response,
            old_logprobs=old,
            sampling_mask=sets,
        )
        return HeadLoss(result.loss, result.logprobs, result.entropy)

    return head


def _plain_policy(sets: fastrl.SamplingMask, tokens: Tokens) -> Head:
    """As trainers compute it: full logits, -inf outside the sets."""

    def head(hidden: Tensor, weight: Tensor) -> HeadLoss:
        logits = torch.nn.functional.linear(hidden, weight)
        logits = logits.masked_fill(~sets.to_dense(weight.shape[0]), -torch.inf)
        logp = torch.log_softmax(logits.float(), -1).gather(-1, tokens.targets[:, None])[:, 0]
        loss = plain.clipped_loss(logp, tokens.old, tokens.advantages, tokens.count)
        return HeadLoss(loss, logp.detach())

    return head
