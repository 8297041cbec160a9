"""What the tests of Liger's names share: options, a batch, and the loss, gradients and metrics of a linear class."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from fastrl.integrations.grpo_options import CLIPPED, LOSS_TYPES

B, T, H, V = 5, 6, 8, 19
LEVELS = [(name, "token") for name in LOSS_TYPES] + [(name, "sequence") for name in CLIPPED]
CLOSE = {"rtol": 2e-5, "atol": 2e-6}  # float32 sums of some thirty terms, in another order


class Case(NamedTuple):
    loss_type: str
    level: str = "token"
    beta: float = 0.0
    corrected: bool = False  # use_bias_correction_kl
    delta: float | None = None
    ratio: str | None = None  # vllm_is_ratio: None, "flat" (B,), "column" (B, 1), "token" (B, T)
    bias: bool = False

    def options(self):
        return {
            "loss_type": self.loss_type,
            "importance_sampling_level": self.level,
            "beta": self.beta,
            "use_bias_correction_kl": self.corrected,
            "delta": self.delta,
            "max_completion_length": 9,
            "epsilon_low": 0.1,
            "epsilon_high": 1.2 if self.loss_type == "cispo" else 0.15,
        }

    def differs(self):
        """What the page lists: padding that Liger counts."""
        if self.loss_type == "luspo":  # its per-token loss, (B, 1) at best, is averaged over all positions
            return self.level == "token" or self.beta != 0 or self.ratio == "token"
        return self.loss_type == "vespo" and self.ratio == "token"


def cases_of(loss_type, level):
    kinds = [(0.0, False), (0.1, False), (0.1, True)]
    deltas = [None, 1.2] if loss_type in CLIPPED else [None]
    ratios = [None, "flat", "column", "token"]
    for (beta, corrected), delta, ratio, bias in itertools.product(kinds, deltas, ratios, [False, True]):
        yield Case(loss_type, level, beta, corrected, delta, ratio, bias)


class Batch:
    """Ragged responses (one with a hole), advantages of both signs and 0, ratios that clip on both sides."""

    def __init__(self, empty=False):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.hidden, self.weight, self.bias = normal(B, T, H), 0.5 * normal(V, H), normal(V)
        self.ids = torch.randint(V, (B, T), generator=generator)
        self.mask = (torch.arange(T) < torch.tensor([6, 4, 5, 1, 3])[:, None]).float()
        self.mask[2, 1] = 0
        if empty:
            self.mask[3] = 0
        self.advantages = torch.tensor([1.0, -1.0, 0.7, -0.4, 0.0])
        now = torch.log_softmax(self.hidden @ self.weight.T, -1).gather(-1, self.ids[..., None])[..., 0]
        self.old, self.ref = now + 0.3 * normal(B, T), now + 0.5 * normal(B, T)
        self.ratios = {"token": normal(B, T).exp(), "column": (0.5 * normal(B, 1)).exp(), None: None}
        self.ratios["flat"] = self.ratios["column"][:, 0]
        self.frozen = ()  # names of what needs no gradient

    def leaves(self, bias, dtype=torch.float32):
        names = ("hidden", "weight", "bias") if bias else ("hidden", "weight")
        return {name: getattr(self, name).to(dtype).requires_grad_(name not in self.frozen) for name in names}


def gradients(loss, leaves):
    return [g.double() for g in torch.autograd.grad(loss, [leaf for leaf in leaves.values() if leaf.requires_grad])]


def run(kind, case, batch, items=None, given=None, upstream=1, **options):
    """Loss, gradients and metrics of a class with Liger's signature.

    given: what the loss is told of the old policy and the reference, by default both policies' log-probabilities.
    """
    leaves = batch.leaves(case.bias)
    loss, metrics = kind(compiled=False, **case.options(), **options)(
        leaves["hidden"],
        leaves["weight"],
        batch.ids,
        batch.mask,
        batch.advantages,
        bias=leaves.get("bias"),
        vllm_is_ratio=batch.ratios[case.ratio],
        num_items_in_batch=items,
        **({"ref_per_token_logps": batch.ref, "old_per_token_logps": batch.old} if given is None else given),
    )
    return loss.detach(), gradients(upstream * loss, leaves), [m.detach() for m in metrics]


def agree(found, expected):
    torch.testing.assert_close(found, expected, **CLOSE)
