"""Sampled completions, with what a step knows about each token."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from fastrl import SamplingMask, linear_token_logprobs
from fastrl.models.routing import replay_routing
from fastrl.rewards.transcript import Transcript
from fastrl.training.batches.micro_batches import MicroBatches, Shape
from fastrl.training.models.decoder import decoder_states, from_first_column
from fastrl.training.models.policy import Policy
from fastrl.training.parallel.world import ALONE, World


class Per(NamedTuple):
    """What a field of a rollout has a value for: a "row" (B, ...), "token" (B, T) or "position" (B, P + T, ...)."""

    axis: str
    padding: int = 0


PerRow = Annotated[Tensor | None, Per("row")]
PerToken = Annotated[Tensor | None, Per("token")]


@dataclass(frozen=True)
class Rollout:
    """B completions of up to T tokens after prompts left-padded to P tokens.

    A whole one is on the CPU: 5 bytes a position, and 4 a token for every number, so 17 a token with the
    log-probabilities of sampler, old policy and reference. `to` moves a selection to the device that computes with it.
    """

    input_ids: Annotated[Tensor, Per("position")]  # (B, P + T) int32; int64 after `to`
    attention_mask: Annotated[Tensor, Per("position")]  # (B, P + T) bool; a completion counts up to its last EOS
    prompt_length: int  # P
    # Of each completion's tokens; None means drawn from the whole vocabulary.
    supports: Annotated[Sequence[SamplingMask] | None, Per("row")] = None
    # (B, P + T, layers, experts per token) int, -1 = not recorded
    routing: Annotated[Tensor | None, Per("position", -1)] = None
    serial: PerRow = None  # (B,) int64, the completion's number in the run
    weights_step: PerRow = None  # (B,) int64, the step after which the policy had the weights that drew it
    drawn: PerToken = None  # (B, T) bool, tokens that the policy drew, and no tool's; None means all
    messages: Annotated[Sequence[list[dict[str, Any]]] | None, Per("row")] = None  # of a chat with tools
    ended: PerRow = None  # (B,) bool, by EOS or a stop string and not by the limit on the length
    counted: PerRow = None  # (B,) bool, which completions' tokens enter the loss; None means all
    rewards: PerRow = None  # (B,) float32
    parts: PerRow = None  # (B, R) float32, the rewards that make up `rewards`, if the advantages read them
    groups: PerRow = None  # (B,) int64, the prompt of each
    response_advantages: PerRow = None  # (B,) float32, or
    token_advantages: PerToken = None  # (B, T) float32
    returns: PerToken = None  # (B, T) float32, what the critic's values should be
    old_logprobs: PerToken = None  # (B, T) float32, before the step's first update; None means on-policy
    log_sum_sq_probs: PerToken = None  # (B, T) float32, beside old_logprobs, if the advantages read it
    ref_logprobs: PerToken = None  # (B, T) float32, of the reference
    rollout_logprobs: PerToken = None  # (B, T) float32, of the sampler
    old_values: PerToken = None  # (B, T) float32, of the critic before the step's first update

    @property
    def targets(self) -> Tensor:
        """The sampled tokens, (B, T), of the type of input_ids."""
        return self.input_ids[:, self.prompt_length :]

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The supports as B * T rows, one per token, on the device of input_ids."""
        masks, length = self.supports, self.input_ids.shape[1] - self.prompt_length
        return None if masks is None else SamplingMask.padded(masks, length).to(self.input_ids.device)

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
        return [Shape(1, length, length) for length in mask.sum(1).tolist()]

    def select(self, rows: Tensor) -> "Rollout":
        """The completions with these int64 indices, without the padding columns that none of them needs."""
        used = self.attention_mask[rows].any(0).nonzero()
        first, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, self.prompt_length)
        columns: dict[str, Any] = {"row": ..., "token": slice(end - self.prompt_length), "position": slice(first, end)}
        changes: dict[str, Any] = {"prompt_length": self.prompt_length - first}
        for name, per in AXES.items():
            if isinstance(x := getattr(self, name), Tensor):
                changes[name] = x[rows, columns[per.axis]]
            elif x is not None:
                changes[name] = [x[row] for row in rows.tolist()]
        return replace(self, **changes)

    def to(self, device: torch.device) -> "Rollout":
        """A batch for computing: its tensors on this device, its ids in int64, as models and losses take them."""
        moved: dict[str, Any] = {name: x.to(device) for name in AXES if isinstance(x := getattr(self, name), Tensor)}
        return replace(self, **moved | {"input_ids": moved["input_ids"].long()})

    def loss_arguments(self, packed: bool) -> dict[str, Any]:
        """The arguments that every policy loss takes from a batch: padded (B, T), or packed, its N valid tokens."""
        mask, sets, advantages = self.mask, self.sampling_mask, self.response_advantages
        names = ("targets", "old_logprobs", "ref_logprobs", "rollout_logprobs")
        per_token = {name: getattr(self, name) for name in names}
        if advantages is None:
            per_token["advantages"] = self.token_advantages
        if not packed:
            return {"mask": mask, "sampling_mask": sets, "advantages": advantages} | per_token
        starts = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        sets = None if sets is None else sets.index(mask.flatten().nonzero()[:, 0])
        valid = {name: None if x is None else x[mask] for name, x in per_token.items()}
        return {"cu_seqlens": starts, "sampling_mask": sets, "advantages": advantages} | valid


# Every field but prompt_length.
AXES: dict[str, Per] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Rollout, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


def as_rollout(policy: Policy, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Rollout:
    """Prompts left-padded, and their completions right-padded, to the longest."""
    start = max(len(prompt) for prompt, _ in sequences)
    end = start + max(len(completion) for _, completion in sequences)
    input_ids = torch.full((len(sequences), end), policy.pad_token_id, dtype=torch.int32)
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(sequences):
        columns = slice(start - len(prompt), start + len(completion))
        input_ids[row, columns] = torch.tensor([*prompt, *completion], dtype=torch.int32)
        mask[row, columns] = True
    return Rollout(input_ids, mask, start)


def completion_texts(policy: Policy, rollout: Rollout, world: World = ALONE) -> list[str]:
    """The completions as `Policy.text` has them; tools' answers are part of it. Each rank decodes some of them."""
    rows = list(zip(rollout.targets, rollout.completion_mask, strict=True))
    texts = world.share(rows, lambda some, _: [policy.text(tokens[mask].tolist()) for tokens, mask in some])
    if rollout.messages is None:
        return texts
    return [
        Transcript(text, messages) if messages else text for text, messages in zip(texts, rollout.messages, strict=True)
    ]


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """Several rollouts as one, padded to the longest prompt and the longest completion."""
    if len(rollouts) == 1:
        return rollouts[0]
    if any(part.drawn is not None for part in rollouts):  # None means all, so that some may have it and others not
        rollouts = [replace(part, drawn=part.drawn_mask) for part in rollouts]
    start = max(part.prompt_length for part in rollouts)
    length = max(part.targets.shape[1] for part in rollouts)
    changes: dict[str, Any] = {"prompt_length": start}
    for name, (axis, padding) in AXES.items():
        values = [getattr(part, name) for part in rollouts]
        if isinstance(values[0], Tensor):
            for index, part in enumerate(rollouts):
                before = start - part.prompt_length if axis == "position" else 0
                after = length - part.targets.shape[1] if axis != "row" else 0
                columns = [0, 0] * (values[0].dim() - 2) + [before, after]
                values[index] = torch.nn.functional.pad(values[index], columns, value=padding)
            changes[name] = torch.cat(values)
        elif values[0] is not None:
            changes[name] = [x for value in values for x in value]
    return replace(rollouts[0], **changes)


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
    routing, mask = rollout.routing, rollout.attention_mask
    return replay_routing(policy.model, routing[mask][None] if packed else from_first_column(routing, mask))


def unpacked(values: Tensor, rollout: Rollout, packed: bool) -> Tensor:
    """One number per token, in the order of `hidden_states`, as (B, T) with 0 where masked."""
    if not packed:
        return values.where(rollout.mask, 0)
    return torch.zeros(rollout.mask.shape, device=values.device).masked_scatter(rollout.mask, values)


def by_micro_batch(
    rollout: Rollout,
    device: torch.device,
    micro_batches: MicroBatches,
    numbers: Callable[[Rollout], Sequence[Tensor]],
    count: int = 1,
) -> Tensor:
    """Apply a function from a batch on a device to `count` numbers per token, each (b, t), a micro-batch at a time.

    Returns (count, B, T) float32 on the CPU.
    """
    results, world = torch.zeros(count, *rollout.targets.shape), micro_batches.world

    def fill() -> None:
        for rows, weight in world.deal(micro_batches.cut(rollout.shapes())):
            values = torch.stack([*numbers(rollout.select(torch.tensor(rows)).to(device))]).cpu()  # (count, b, t)
            if weight:
                results[:, rows, : values.shape[2]] = values

    micro_batches.fitted(fill)
    return world.total(results)


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

    return by_micro_batch(rollout, policy.device, micro_batches, statistics, 1 + len(extras))
