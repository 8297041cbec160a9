"""Policy losses over shards of an output head, by the processes of `ranks`, and the same by one process.

check_over_ranks(ranks, Case(objective), [{"shards": EVEN, "plan": "recompute"}, ...])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from problem import CLOSE, Problem, assert_loss_as_good_as_torch
from ranks import Ranks, group_of
from torch import Tensor
from vocabulary import assert_as_good_as_torch

import fastrl
from fastrl.losses import request as call
from fastrl.planning import tiling
from fastrl.planning.plans import use_plan

#: Sums of some hundred float32 terms in another order than torch's.
MARGIN = 2e-6
#: Beside torch's own error: the casts of a gradient, half a unit each.
MARGINS = {torch.float32: MARGIN, torch.bfloat16: MARGIN + 2**-7, torch.float16: MARGIN + 2**-10}
_TRANSFORMS = ("temperature", "logit_scale", "softcap")
#: Arguments that change no answer, but how it is rounded.
_OF_THE_CALL = ("num_tokens", "memory_budget", "reduce_hidden_grad", "logits_dtype")


def slow(value: Any) -> Any:
    """A parameter of a test that runs among the slow ones."""
    return pytest.param(value, marks=pytest.mark.slow)


class Shards(NamedTuple):
    """How the rows of a head lie over a group."""

    sizes: tuple[int, ...]  # of the ranks of the group
    members: tuple[int, ...] = (0, 1, 2, 3)
    padding: int = 0  # how many of the rows, at the end, are beyond the vocabulary
    starts: bool = False  # whether vocab_start is passed

    @property
    def vocab(self) -> int:
        """The size of the vocabulary."""
        return sum(self.sizes) - self.padding

    def options(self, rank: int) -> dict[str, Any]:
        """The arguments of this rank of the group that say how the vocabulary lies."""
        given: dict[str, Any] = {"vocab_size": self.vocab} if self.padding else {}
        return given | ({"vocab_start": sum(self.sizes[:rank])} if self.starts else {})

    def own(self, x: Tensor, rank: int) -> Tensor:
        """This rank's rows of x (V, ...); padding is NaN, which is never read."""
        held = torch.cat([x, x.new_full((self.padding, *x.shape[1:]), torch.nan)])
        return held.split(self.sizes)[rank].clone()

    def leaves(
        self, head: dict[str, Tensor], rank: int, needs: Sequence[str] = ("hidden", "weight", "bias")
    ) -> dict[str, Tensor]:
        """Hidden states and this rank's part of the head, of which those in `needs` take a gradient."""
        own = {k: x.clone() if k == "hidden" else self.own(x, rank) for k, x in head.items()}
        return {k: x.requires_grad_(k in needs) for k, x in own.items()}

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """What the ranks hold, without padding, whose gradient is 0."""
        held = torch.cat(list(parts))
        assert held.shape[0] == sum(self.sizes) and not held[self.vocab :].any()
        return held[: self.vocab]


#: Of the 37 entries of `Problem`.
EVEN = Shards((10, 9, 9, 9))
LAYOUTS = {
    "even": EVEN,
    "empty in the middle": Shards((20, 0, 16, 1)),
    "empty first, of two": Shards((0, 37), members=(1, 3), starts=True),
    "empty last, of three": Shards((30, 7, 0), members=(0, 2, 3)),
    "padded": Shards((10, 10, 10, 10), padding=3, starts=True),
    "padding alone last": Shards((20, 18, 5, 0), padding=6),
    "one rank": Shards((37,), members=(2,)),
}


@dataclass(frozen=True)
class Case:
    """One call of `linear_policy_loss`."""

    objective: Any
    shards: Shards = EVEN
    plan: str | None = None
    problem: dict[str, Any] = field(default_factory=dict)  # what `Problem` takes
    arguments: dict[str, Any] = field(default_factory=dict)  # added to what the problem passes
    needs: tuple[str, ...] = ("hidden", "weight", "bias")  # what has a gradient
    biased: bool = True
    upstream: float = 1.0
    tile_bytes: int = 0  # the largest tile; 0: the usual one
    backend: str = ""
    backwards: int = 1
    gathers: bool = False  # whether wide supports are gathered, as a few are in problems as small as these

    def posed(self) -> Problem:
        """Its problem, on the CPU."""
        problem = Problem("cpu", **self.problem)
        problem.arguments |= self.arguments
        if not self.biased:
            del problem.head["bias"]
        return problem

    @contextmanager
    def forced(self) -> Iterator[None]:
        """The plan, the tiles and the backend."""
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(call, "gathers", lambda *_: self.gathers)
            if self.tile_bytes:
                patch.setitem(tiling.TILE_BYTES, "cpu", self.tile_bytes)
            if self.plan:
                stack.enter_context(use_plan(self.plan))
            if self.backend:
                stack.enter_context(fastrl.use_backend(self.backend))
            yield

    def call(self, head: dict[str, Tensor], **group: Any) -> dict[str, Any]:
        """The loss from these leaves, what else comes with it, and the gradients divided by `upstream`."""
        given = self.posed().arguments
        out = fastrl.linear_policy_loss(**head, objective=self.objective, **given, **group)
        for i in range(self.backwards if self.needs else 0):
            (self.upstream * out.loss).backward(retain_graph=i + 1 < self.backwards)
        scale = self.upstream * self.backwards
        gradients = {k: x.grad.double() / scale for k, x in head.items() if x.grad is not None}
        assert set(gradients) == set(self.needs) & set(head)
        assert out.loss.requires_grad == bool(self.needs)
        return {**out._asdict(), "gradients": gradients}


def policy_losses(cases: Sequence[Case]) -> list[dict[str, Any] | None]:
    """What each case gives on this rank; None where it is not of the group."""
    return [_policy_loss(case) for case in cases]


def _policy_loss(case: Case) -> dict[str, Any] | None:
    group = group_of(*case.shards.members)
    if group is None:
        return None
    rank = dist.get_rank(group)
    own = case.shards.leaves(case.posed().head, rank, case.needs)
    torch.manual_seed(0)  # what a call draws, every rank draws
    with case.forced():
        return told(case.call(own, tp_group=group, **case.shards.options(rank)))


def told(x: Any) -> Any:
    """Tensors as arrays of float64, which has every value of the narrower dtypes: pickling tensors takes longer."""
    if isinstance(x, Tensor):
        return x.detach().double().numpy()
    if isinstance(x, dict):
        return {k: told(y) for k, y in x.items()}
    return [told(y) for y in x] if isinstance(x, list | tuple) else x


def heard(x: Any) -> Any:
    """Tensors from what `told` gives."""
    if isinstance(x, np.ndarray | np.floating):
        return torch.as_tensor(x)
    if isinstance(x, dict):
        return {k: heard(y) for k, y in x.items()}
    return [heard(y) for y in x] if isinstance(x, list) else x


def assert_same_bits(first: Any, other: Any, what: str) -> None:
    """Nested results that are equal, NaN to NaN."""
    if isinstance(first, dict):
        assert first.keys() == other.keys(), what
        for k in first:
            assert_same_bits(first[k], other[k], f"{what}: {k}")
    elif first is not None:
        assert np.array_equal(first, other, equal_nan=True), f"{what} differs between ranks"


def whole(shards: Shards, results: Sequence[Any], reduced: bool = True) -> dict[str, Any]:
    """The results of a group's ranks as one: the same bits on all of them, but their parts of the head's gradients.

    reduced: whether each has the whole gradient of hidden; otherwise their parts are summed here.
    """
    results = [results[rank] for rank in shards.members]
    parts = [x.pop("gradients") for x in results]
    for rank, x in enumerate(results):
        assert_same_bits(results[0], x, f"rank {rank}")
        if reduced and "hidden" in x:
            assert_same_bits(parts[0]["hidden"], parts[rank]["hidden"], f"rank {rank}: d_hidden")
    gradients = {}
    for k in parts[0]:
        of_ranks = heard([x[k] for x in parts])
        gradients[k] = shards.whole(of_ranks) if k != "hidden" else of_ranks[0] if reduced else sum(of_ranks)
    return {**heard(results[0]), "gradients": gradients}


class Answers:
    """What a call gives without a group: by torch in float64, by torch in the call's dtype, and by fastrl."""

    def __init__(self, case: Case) -> None:
        problem = case.posed()
        self.powers = isinstance(case.objective, fastrl.Objective) and case.objective.kl is not None
        self.dtype = problem.head["hidden"].dtype
        given, transforms = problem.arguments, {k: x for k, x in case.arguments.items() if k in _TRANSFORMS}
        problem.arguments = {k: x for k, x in given.items() if k not in (*_TRANSFORMS, *_OF_THE_CALL)}
        #: That of the logits, and so of the statistics.
        self.logits_dtype = case.arguments.get("logits_dtype") or self.dtype
        dtypes = (torch.float64, self.logits_dtype)
        self.truth, self.plain = (problem.plain(case.objective, x, **transforms) for x in dtypes)
        given = {k: x for k, x in case.arguments.items() if k not in _OF_THE_CALL}
        alone = replace(case, arguments=given)
        head = {k: x.requires_grad_(k in case.needs) for k, x in alone.posed().head.items()}
        with replace(alone, plan=None, tile_bytes=0).forced():
            self.fastrl = alone.call(head)

    def check(self, found: dict[str, Any]) -> None:
        """The loss, statistics per token and gradients are as good as torch's; metrics are those of fastrl."""
        margin = MARGINS[self.dtype]
        if self.powers:
            # A KL's slope has a power of e of the log-probabilities: the last bits of those, which a product over other
            # columns rounds otherwise, are a share of the gradient.
            margin += 2**-22 * float(self.truth[0].logprobs.abs().max())
            assert math.isfinite(margin)
        gradients = found["gradients"]
        ours = fastrl.PolicyLoss(*(found[k] for k in fastrl.PolicyLoss._fields))
        of_torch = [(out, {k: g[k] for k in gradients}) for out, g in (self.truth, self.plain)]
        assert_loss_as_good_as_torch((ours, gradients), *of_torch, margin, smallest=1e-3)
        for name in ("logprobs", "entropy"):
            values = (getattr(x, name) for x in (ours, self.truth[0], self.plain[0]))
            assert_as_good_as_torch(*values, MARGINS[self.logits_dtype], name)
        if self.dtype == torch.float32:
            metrics = {k: x.double() for k, x in self.fastrl["metrics"].items()}
            torch.testing.assert_close(found["metrics"], metrics, equal_nan=True, **CLOSE)


def check_over_ranks(ranks: Ranks, case: Case, variants: Sequence[dict[str, Any]]) -> None:
    """The case with each of these changes, none of which changes the answers, in one run of the processes."""
    cases = [replace(case, **changes) for changes in variants]
    results = ranks.run(policy_losses, cases)
    answers = Answers(replace(case, backwards=1))  # its plan may form gradients that only one backward gets
    for one, changes, found in zip(cases, variants, zip(*results, strict=True), strict=True):
        try:
            answers.check(whole(one.shards, found, one.arguments.get("reduce_hidden_grad", True)))
        except AssertionError as error:
            error.add_note(f"with {changes}")
            raise
