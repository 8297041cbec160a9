"""Sampled completions, with what a step knows about each token."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl import SamplingMask, linear_token_logprobs
from fastrl.models.routing import replay_routing
from fastrl.training.common.micro_batch import MicroBatches, Shape
from fastrl.training.common.policy import Policy, decoder_states
from fastrl.training.common.transcript import Transcript

ROWS = ("serial", "weights_step", "ended", "counted", "rewards", "parts", "groups", "response_advantages")  # (B, ...)
TOKENS = (  # (B, T)
    "drawn",
    "token_advantages",
    "returns",
    "old_logprobs",
    "log_sum_sq_probs",
    "ref_logprobs",
    "rollout_logprobs",
    "old_values",
)


@dataclass(frozen=True)
class Rollout:
    """B completions of up to T tokens after prompts left-padded to P tokens, on the policy's device."""

    input_ids: Tensor  # (B, P + T) int64
    attention_mask: Tensor  # (B, P + T) bool; completions count up to and including their last EOS
    prompt_length: int  # P
    sampling_mask: SamplingMask | None = None  # B * T rows, one per token; None means drawn from the whole vocabulary
    routing: Tensor | None = None  # (B, P + T, layers, experts per token) int, -1 = not recorded
    serial: Tensor | None = None  # (B,) int64, the completion's number in the run
    weights_step: Tensor | None = None  # (B,) int64, the step after which the policy had the weights that drew it
    drawn: Tensor | None = None  # (B, T) bool, tokens that the policy drew, and no tool's; None means all
    messages: Sequence[list[dict[str, Any]]] | None = None  # of each chat with tools; a selection has none
    ended: Tensor | None = None  # (B,) bool, by EOS or a stop string and not by the limit on the length
    counted: Tensor | None = None  # (B,) bool, which completions' tokens enter the loss; None means all
    rewards: Tensor | None = None  # (B,) float32
    parts: Tensor | None = None  # (B, R) float32, the rewards that make up `rewards`, if the advantages read them
    groups: Tensor | None = None  # (B,) int64, the prompt of each
    response_advantages: Tensor | None = None  # (B,) float32, or
    token_advantages: Tensor | None = None  # (B, T) float32
    returns: Tensor | None = None  # (B, T) float32, what the critic's values should be
    old_logprobs: Tensor | None = None  # (B, T) float32, before the step's first update; None means on-policy
    log_sum_sq_probs: Tensor | None = None  # (B, T) float32, beside old_logprobs, if the advantages read it
    ref_logprobs: Tensor | None = None  # (B, T) float32, of the reference
    rollout_logprobs: Tensor | None = None  # (B, T) float32, of the sampler
    old_values: Tensor | None = None  # (B, T) float32, of the critic before the step's first update

    @property
    def targets(self) -> Tensor:
        """The sampled tokens, (B, T) int64."""
        return self.input_ids[:, self.prompt_length :]

    @property
    def completion_mask(self) -> Tensor:
        """Which of them are not padding, (B, T) bool."""
        return self.attention_mask[:, self.prompt_length :]

    @property
    def drawn_mask(self) -> Tensor:
        """Which of them the policy drew, (B, T) bool; between them may be a tool's answers."""
        mask = self.completion_mask
        return mask if self.drawn is None else mask & self.drawn

    @property
    def mask(self) -> Tensor:
        """Which of them enter the loss, (B, T) bool."""
        mask = self.drawn_mask
        return mask if self.counted is None else mask & self.counted[:, None]

    def shapes(self, rows: Tensor | None = None) -> list[Shape]:
        """Of each completion with its prompt, or of these, what it takes in a micro-batch."""
        mask = self.attention_mask if rows is None else self.attention_mask[rows]
        lengths = torch.stack([half.sum(1) for half in mask.tensor_split([self.prompt_length], 1)], 1)
        return [Shape(1, prompt, completion, prompt + completion) for prompt, completion in lengths.tolist()]

    def select(self, rows: Tensor) -> "Rollout":
        """The completions with these int64 indices, without the padding columns that none of them needs."""
        used = self.attention_mask[rows].any(0).nonzero()
        first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, self.prompt_length)
        longest = end - self.prompt_length
        tokens = rows[:, None] * self.targets.shape[1] + torch.arange(longest, device=rows.device)
        changes: dict[str, Any] = {name: x[rows] for name in ROWS if (x := getattr(self, name)) is not None}
        changes |= {name: x[rows, :longest] for name in TOKENS if (x := getattr(self, name)) is not None}
        return replace(
            self,
            input_ids=self.input_ids[rows, first:end],
            attention_mask=self.attention_mask[rows, first:end],
            prompt_length=self.prompt_length - first,
            messages=None,
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask.index(tokens),
            routing=None if self.routing is None else self.routing[rows, first:end],
            **changes,
        )

    def loss_arguments(self, packed: bool) -> dict[str, Any]:
        """The arguments that every policy loss takes from a batch: padded (B, T), or packed, its N valid tokens."""
        mask, sets, advantages = self.mask, self.sampling_mask, self.response_advantages
        per_token = {name: getattr(self, name) for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")}
        if advantages is None:
            per_token["advantages"] = self.token_advantages
        if not packed:
            return {"targets": self.targets, "mask": mask, "sampling_mask": sets, "advantages": advantages, **per_token}
        starts = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        return {
            "targets": self.targets[mask],
            "cu_seqlens": starts,
            "sampling_mask": None if sets is None else sets.index(mask.flatten().nonzero()[:, 0]),
            "advantages": advantages,
            **{name: None if x is None else x[mask] for name, x in per_token.items()},
        }


def completion_texts(policy: Policy, rollout: Rollout) -> list[str]:
    """The completions as `Policy.text` has them; tools' answers are part of it."""
    rows = zip(rollout.targets.cpu(), rollout.completion_mask.cpu(), strict=True)
    texts = [policy.text(tokens[mask].tolist()) for tokens, mask in rows]
    if rollout.messages is None:
        return texts
    return [
        Transcript(text, messages) if messages else text for text, messages in zip(texts, rollout.messages, strict=True)
    ]


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Several rollouts of completions padded to one length as one."""
    if len(rollouts) == 1:
        return rollouts[0]
    longest = max(part.prompt_length for part in rollouts)
    changes: dict[str, Any] = {}
    for name, fill in (("input_ids", None), ("attention_mask", False), ("routing", -1)):
        parts = [(getattr(part, name), longest - part.prompt_length) for part in rollouts]
        if parts[0][0] is not None:
            # Padding repeats the first token of the sequence: it is not attended to.
            columns = [x[:, :1] if fill is None else torch.full_like(x[:, :1], fill) for x, _ in parts]
            padded = [
                torch.cat([column.expand(-1, more, *x.shape[2:]), x], 1)
                for column, (x, more) in zip(columns, parts, strict=True)
            ]
            changes[name] = torch.cat(padded)
    for name in (*ROWS, *TOKENS):
        values = [getattr(part, name) for part in rollouts]
        if values[0] is not None:
            changes[name] = torch.cat(values)
    sets = [part.sampling_mask for part in rollouts if part.sampling_mask is not None]
    changes["sampling_mask"] = SamplingMask.concat(sets) if sets else None
    return replace(rollouts[0], prompt_length=longest, messages=None, **changes)


def hidden_states(policy: Policy, rollout: Rollout, packed: bool, decoder: torch.nn.Module | None = None) -> Tensor:
    """The last hidden states that predict the completions' tokens: (B, T, H), or packed (N, H), N valid tokens.

    `decoder` is the policy's own by default. Forward and backward belong inside `replaying(policy, rollout,
    packed)`, so that the policy's experts are those of the rollout, also in recomputed layers.
    """
    inputs = (rollout.input_ids, rollout.attention_mask, packed)
    states = policy.states(*inputs) if decoder is None else decoder_states(decoder, *inputs)
    if not packed:
        return states[:, rollout.prompt_length - 1 : -1]
    flat = torch.zeros_like(rollout.attention_mask)
    flat[:, rollout.prompt_length :] = rollout.mask
    # A sequence's tokens, tools' among them, are contiguous, and its first token is never a valid one.
    return states[flat[rollout.attention_mask].nonzero()[:, 0] - 1]


def replaying(policy: Policy, rollout: Rollout, packed: bool) -> Any:
    """A context in which the policy's forwards over the rollout use the experts that the sampler used."""
    if rollout.routing is None:
        return nullcontext()
    routing = rollout.routing[rollout.attention_mask][None] if packed else rollout.routing
    return replay_routing(policy.model, routing)


def unpacked(values: Tensor, rollout: Rollout, packed: bool) -> Tensor:
    """One number per token, in the order of `hidden_states`, as (B, T) with 0 where masked."""
    if not packed:
        return values.where(rollout.mask, 0)
    return torch.zeros(rollout.mask.shape, device=values.device).masked_scatter(rollout.mask, values)


def by_micro_batch(
    rollout: Rollout, micro_batches: MicroBatches, numbers: Callable[[Rollout], Sequence[Tensor]], count: int = 1
) -> Tensor:
    """Apply a function from a batch to `count` numbers per token, each (b, t), a micro-batch at a time.

    Returns (count, B, T) float32.
    """
    results = torch.zeros(count, *rollout.targets.shape, device=rollout.targets.device)

    def fill() -> None:
        for part in micro_batches.cut(rollout.shapes()):
            rows = torch.tensor(part, device=results.device)
            for result, values in zip(results, numbers(rollout.select(rows)), strict=True):
                result[rows, : values.shape[1]] = values

    micro_batches.fitted(fill)
    return results


def rollout_logprobs(
    policy: Policy, rollout: Rollout, temperature: float, micro_batches: MicroBatches, memory_budget: str | None = None
) -> Tensor:
    """Log-probabilities (B, T) float32 of the sampled tokens under a policy, by the fused path used in training.

    Every policy, a reference too, normalises over the tokens' support. 0 where masked.
    """
    return rollout_statistics(policy, rollout, temperature, micro_batches, memory_budget)[0]


@torch.no_grad()
def rollout_statistics(
    policy: Policy,
    rollout: Rollout,
    temperature: float,
    micro_batches: MicroBatches,
    memory_budget: str | None = None,
    extras: tuple[str, ...] = (),
) -> Tensor:
    """The numbers of `rollout_logprobs`, and those of each of the `extras` of `linear_token_logprobs`.

    (1 + extras, B, T) float32, 0 where masked.
    """

    packed = micro_batches.packed

    def statistics(part: Rollout) -> list[Tensor]:
        arguments = part.loss_arguments(packed)
        with replaying(policy, part, packed):
            states = hidden_states(policy, part, packed)
        stats = policy.apply_head(
            linear_token_logprobs,
            states,
            arguments["targets"],
            mask=arguments.get("mask"),
            sampling_mask=arguments["sampling_mask"],
            temperature=temperature,
            memory_budget=memory_budget,
            extras=extras,
        )
        return [unpacked(getattr(stats, name), part, packed) for name in ("logprobs", *extras)]

    return by_micro_batch(rollout, micro_batches, statistics, 1 + len(extras))
