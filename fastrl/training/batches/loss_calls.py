"""The largest calls of the vocabulary's losses in a run, as far as its config tells, and the plans that they take.

The losses themselves cannot be asked before the run: they read their inputs, which take the memory that is to be told.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from fastrl.backend.choice import forced, resolved
from fastrl.base import checks
from fastrl.base.errors import UserError
from fastrl.losses.supports import widest_support
from fastrl.objectives.row_local import ANY, RESPONSE
from fastrl.planning.budget import BudgetTooSmall, parse_budget, text
from fastrl.planning.plans import Plan, choose
from fastrl.planning.tiling import NO_TEACHER, Call, Needs, Teacher, invariant_rows
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.config.sections import BudgetConfig, ModelConfig
from fastrl.training.models.loading import load_config
from fastrl.training.models.policy import Policy, logits_dtype


class LossCall(NamedTuple):
    """The largest call of one of the losses, or of log-probabilities, as far as its memory depends on the config."""

    what: str  # for the message
    tokens: int  # the number of valid tokens, at most
    rows: int  # with padding
    longest: int  # tokens of the longest response
    packed: bool
    scope: str = ANY  # what a token's loss depends on
    slopes: int = 1  # as in `Call`
    gradients: bool = True
    own_leaf: bool = False  # the hidden states are detached from their model, so autograd keeps their gradient's layout
    truncated: RolloutConfig | None = None  # the sampling, if it records the tokens' supports
    width: int = 0  # of the hidden states, if they are not the policy's
    teacher: int = 0  # of a teacher's hidden states, if the loss is a divergence from it
    entries: int = 0  # per token, whose log-probabilities are computed in place of the token's
    batch_invariant: bool = False

    def plan_call(self, vocab: int, hidden: int, bias: bool, config: ModelConfig, device: str) -> Call:
        """The call that the plan is chosen for, with a head of these sizes."""
        dtype, hidden = getattr(torch, config.dtype), self.width or hidden
        wide_logits = checks.float32_logits(logits_dtype(config), dtype)
        copied = 0
        if not self.packed and self.rows > self.longest:  # hidden states of several sequences, without prompts
            copied += self.rows * ((1 + self.own_leaf) * hidden + self.teacher)
        if dtype != torch.float32:  # autocast: hidden states and weights in the narrower type, and their gradients
            copied += 2 * (self.rows + vocab) * (hidden + self.teacher)
        rows, recorded, scope = self.tokens, 0, self.scope
        if (sampling := self.truncated) is not None and sampling.truncates:
            # Top-k bounds a token's support. What top-p and min-p leave is known only after sampling: one is counted.
            limit = min(sampling.top_k or vocab, vocab)
            recorded = self.tokens * (limit if sampling.top_k else 1)
            if limit <= widest_support(vocab, device, dtype.itemsize):  # all are gathered one by one
                rows = 0
            scope = ANY if scope == ANY else RESPONSE
        trained = self.gradients and config.lora_rank is None
        return Call(
            rows=rows,
            hidden=hidden,
            vocab=vocab,
            dtype=dtype,
            device=device,
            needs=Needs(self.gradients, trained, trained and bias),
            scope=scope,
            longest=self.longest,
            slopes=self.slopes,
            all_rows=self.rows,
            copied=copied * dtype.itemsize,
            support_entries=recorded,
            backend=resolved(forced(), device),
            teacher=Teacher(self.teacher, dtype.itemsize, wide_logits) if self.teacher else NO_TEACHER,
            gathered=self.entries * self.tokens,
            float32_logits=wide_logits,
            block=invariant_rows(device) if self.batch_invariant else 0,
        )


def loss_plans(
    training: BudgetConfig,
    config: ModelConfig,
    device: torch.device,
    calls: Iterable[LossCall],
    policy: Policy | None = None,
) -> list[Plan]:
    """The plan of each call, with the policy's head; before it is loaded, with the sizes in its model's config.

    If that lacks one, there are no plans yet. Raises UserError if training.memory_budget is too small for a call,
    naming the smallest one that is enough for all of them.
    """
    if policy is None:
        model = load_config(config).get_text_config()
        vocab, hidden, bias = getattr(model, "vocab_size", None), getattr(model, "hidden_size", None), False
        if vocab is None or hidden is None:
            return []
    else:
        head = policy.head
        (vocab, hidden), bias = head.weight.shape, head.arguments["bias"] is not None
    size, plans, failed = parse_budget(training.memory_budget), list[Plan](), list[tuple[int, LossCall]]()
    for call in calls:
        try:
            plans.append(choose(call.plan_call(vocab, hidden, bias, config, device.type), size))
        except BudgetTooSmall as error:
            failed.append((error.least, call))
    if failed:
        least, worst = max(failed, key=lambda pair: pair[0])
        hint = "; a smaller training.micro_batch_tokens needs less" if worst.rows > worst.longest else ""
        raise UserError(
            f"training.memory_budget: too small for {worst.what}, {worst.tokens} tokens x {hidden} x {vocab} in "
            f"{config.dtype}: got {size} bytes, the smallest possible is {least} ({text(least)}){hint}"
        )
    return plans
