"""Check that training.memory_budget is enough for the largest calls of the vocabulary's losses in a run.

Checked before the model is loaded, with the sizes in its config, and again once its head is known.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fastrl import Objective
from fastrl.backend.choice import forced, resolved
from fastrl.base import checks
from fastrl.base.errors import UserError
from fastrl.losses.supports import widest_support
from fastrl.objectives.row_local import ANY, RESPONSE, Given, scope, slopes
from fastrl.planning.budget import BudgetTooSmall, parse_budget, text
from fastrl.planning.plans import Plan, applicable, choose, least_budget
from fastrl.planning.tiling import NO_TEACHER, Call, Needs, Teacher
from fastrl.training.config.sections import BudgetConfig, ModelConfig, RolloutConfig
from fastrl.training.models.loading import load_config
from fastrl.training.models.policy import Policy, logits_dtype
from fastrl.training.parallel.machine import cpu_threads

ON_POLICY = Given(old=False)


@dataclass(frozen=True)
class LossCall:
    """The largest call of one of the losses, or of log-probabilities, as far as its memory depends on the config."""

    what: str  # for the message
    tokens: int  # the number of valid tokens, at most
    rows: int  # with padding
    longest: int  # tokens of the longest response
    packed: bool
    objective: Objective | None = None  # None: log-probabilities
    inputs: Given = ON_POLICY  # what the loss is called with
    gradients: bool = True
    own_leaf: bool = False  # the hidden states are detached from their model, so autograd keeps their gradient's layout
    truncated: RolloutConfig | None = None  # the sampling, if it records the tokens' supports
    width: int = 0  # of the hidden states, if they are not the policy's
    teacher: int = 0  # of a teacher's hidden states, if the loss is a divergence from it
    entries: int = 0  # per token, whose log-probabilities are computed in place of the token's

    def plan_call(self, vocab: int, hidden: int, bias: bool, config: ModelConfig, device: str) -> Call:
        """The call that the plan is chosen for, with a head of these sizes."""
        dtype = getattr(torch, config.dtype)
        wide_logits = checks.float32_logits(logits_dtype(config), dtype)
        hidden = self.width or hidden
        gathered = not self.packed and self.rows > self.longest  # hidden states of several sequences, without prompts
        copies = gathered * (1 + self.own_leaf)
        copied = copies * self.rows * hidden * dtype.itemsize
        if dtype != torch.float32:  # autocast: hidden states and weight in the narrower type, and their gradients
            copied += 2 * (self.rows + vocab) * hidden * dtype.itemsize
        copied += gathered * self.rows * self.teacher * dtype.itemsize
        if dtype != torch.float32:
            copied += 2 * (self.rows + vocab) * self.teacher * dtype.itemsize  # counted like the policy's
        head = self.gradients and config.lora_rank is None
        kept, wide = self._kept(vocab, dtype, device)
        depends = ANY if self.objective is None else scope(self.objective, self.inputs)
        return Call(
            rows=self.tokens if wide or not kept else 0,
            hidden=hidden,
            vocab=vocab,
            dtype=dtype,
            device=device,
            needs=Needs(self.gradients, head, head and bias),
            scope=RESPONSE if kept and self.objective is not None else depends,
            longest=self.longest,
            slopes=1 if self.objective is None else slopes(self.objective),
            all_rows=self.rows,
            copied=copied,
            support_entries=kept * self.tokens,
            backend=resolved(forced(), device),
            teacher=Teacher(self.teacher, dtype.itemsize, wide_logits) if self.teacher else NO_TEACHER,
            gathered=self.entries * self.tokens,
            float32_logits=wide_logits,
        )

    def _kept(self, vocab: int, dtype: torch.dtype, device: str) -> tuple[int, bool]:
        """Support entries per token, and whether tokens may have more than are gathered one by one.

        Top-k bounds them. How many top-p and min-p leave is known only after sampling, so one is counted.
        """
        if self.truncated is None or not self.truncated.truncates:
            return 0, False
        limit = min(self.truncated.top_k or vocab, vocab)
        return (limit if self.truncated.top_k else 1), limit > widest_support(vocab, device, dtype.itemsize)


def chosen_plans(training: BudgetConfig, config: ModelConfig, policy: Policy, calls: Iterable[LossCall]) -> list[Plan]:
    """The plan of each call. Raises BudgetTooSmall if there is none."""
    head, size = policy.head, parse_budget(training.memory_budget)
    (vocab, hidden), bias = head.weight.shape, head.arguments["bias"] is not None
    with cpu_threads(training.threads):
        return [choose(call.plan_call(vocab, hidden, bias, config, policy.device.type), size) for call in calls]


def check_budget(
    training: BudgetConfig,
    config: ModelConfig,
    device: torch.device,
    calls: Iterable[LossCall],
    policy: Policy | None = None,
) -> None:
    """Raise UserError if the budget is too small for a call, naming the smallest one that is enough for all of them.

    Without a `policy` the sizes are those of the model's config; if it lacks one, the check waits for the policy.
    """
    size = parse_budget(training.memory_budget)
    if size is None:
        return
    if policy is None:
        model = load_config(config).get_text_config()
        sizes: list[Any] = [getattr(model, name, None) for name in ("vocab_size", "hidden_size")]
        bias = False
        if None in sizes:
            return
    else:
        head = policy.head
        sizes, bias = list(head.weight.shape), head.arguments["bias"] is not None
    vocab, hidden = sizes
    least, worst, fits = 0, None, True
    with cpu_threads(training.threads):
        for call in calls:
            planned = call.plan_call(vocab, hidden, bias, config, device.type)
            needed = min(least_budget(planned, name) for name in applicable(planned))
            if needed > least:
                least, worst = needed, call
            try:
                choose(planned, size)
            except BudgetTooSmall:
                fits = False
    if worst is not None and not fits:
        hint = "; a smaller training.micro_batch_tokens needs less" if worst.rows > worst.longest else ""
        raise UserError(
            f"training.memory_budget: too small for {worst.what}, {worst.tokens} tokens x {hidden} x {vocab} in "
            f"{config.dtype}: got {size} bytes, the smallest possible is {least} ({text(least)}){hint}"
        )
