"""What engines answer, checked: their tokenizer and their completions; and these as the rollout of a step."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.integrations.vllm import routing_from_vllm
from fastrl.training.batches.rollout import Rollout, as_rollout
from fastrl.training.data.examples import Example
from fastrl.training.engines.protocol import Completion, EngineFailed, Request, Sampling
from fastrl.training.models.policy import Policy

PROBES = 64  # tokens, spread over the vocabulary, that must mean the same on both sides


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, decode: Callable[[list[int]], Any], engine: str, option: str
) -> None:
    """Raise UserError unless the engine's `decode` has the policy's texts. `option` is how it is started with it."""
    ids = list(range(0, len(tokenizer), max(len(tokenizer) // PROBES, 1)))
    ours, theirs = tokenizer.decode(ids), decode(ids)
    if theirs != ours:
        raise UserError(
            f"rollout.url: {engine} has another tokenizer than the policy: tokens {ids[:4]} ... are {theirs!r:.60} "
            f"there and {ours!r:.60} here; start it with the policy's ({option})"
        )


def check_weights(completions: Iterable[Completion], expected: str | None) -> None:
    """Raise EngineFailed for a completion of other weights than these."""
    for completion in completions:
        if completion.weights is not None and completion.weights != expected:
            # An engine that was started anew in between has those of its checkpoint, until it is given the policy's.
            raise EngineFailed(
                f"a completion was drawn with the weights {completion.weights!r}, expected {expected!r}; another run "
                "may be using the same engine, and each needs one of its own"
            )


@dataclass(frozen=True)
class Drawn:
    """The fields of an engine's completion, not checked yet."""

    token_ids: Any
    finish_reason: Any
    logprobs: Sequence[tuple[Any, float]] | None  # token id and log-probability
    sampling_mask: Callable[[], SamplingMask]  # reads it
    routed_experts: Any
    versions: Iterable[str]  # of the weights


def checked(drawn: Drawn, request: Request, sampling: Sampling, wrong: Callable[[str], UserError]) -> Completion:
    """The completion. Raises `wrong`'s error, given what the answer came with, if it lacks what was asked for."""
    ids, reason = drawn.token_ids, drawn.finish_reason
    if not isinstance(ids, list) or not ids or len(ids) > request.max_tokens:
        shown = len(ids) if isinstance(ids, list) else ids
        raise wrong(f"with {shown} token ids in a completion, expected 1 to {request.max_tokens}")
    if reason not in ("stop", "length"):
        raise EngineFailed(f"The engine ended a completion before its end (finish_reason {reason!r})")
    logprobs = mask = None
    if sampling.logprobs:
        if drawn.logprobs is None or [token for token, _ in drawn.logprobs] != ids:
            raise wrong("without a log-probability for each token; is it an older version?")
        logprobs = [float(value) for _, value in drawn.logprobs]
    if sampling.supports:
        try:
            mask = drawn.sampling_mask()
        except (ValueError, TypeError) as error:
            raise wrong(f"without a usable sampling mask: {error}") from error
        if len(mask) != len(ids):
            raise wrong(f"with {len(mask)} rows in a sampling mask of {len(ids)} tokens")
    experts = drawn.routed_experts if sampling.routing else None
    if sampling.routing and experts is None:
        raise wrong("without routed experts; start it with --enable-return-routed-experts")
    versions = "+".join(sorted(set(drawn.versions))) or None
    return Completion(ids, reason == "stop", logprobs, mask, experts, versions)


def check_completions(completions: Sequence[Completion], request: Request, vocabulary: int) -> None:
    """Raise UserError unless these are the completions of a request, by a policy with so many tokens."""
    if len(completions) != request.n:
        raise wrong(f"{len(completions)} completions of a prompt, expected {request.n}")
    for completion in completions:
        ids, mask = completion.token_ids, completion.sampling_mask
        if not 1 <= len(ids) <= request.max_tokens:
            raise wrong(f"a completion of {len(ids)} tokens, expected 1 to {request.max_tokens}")
        unknown = [token for token in ids if not (isinstance(token, int) and 0 <= token < vocabulary)]
        if unknown:
            raise wrong(
                f"token id {unknown[0]!r}, but the policy's ids end at {vocabulary - 1}; start it with the policy's "
                "model and tokenizer"
            )
        for record, what in ((completion.logprobs, "log-probabilities"), (mask, "mask rows")):
            if record is not None and len(record) != len(ids):
                raise wrong(f"{len(record)} {what} for {len(ids)} tokens")
        if mask is not None:
            _check_support(mask, ids, vocabulary)
        if completion.logprobs is not None and not all(map(math.isfinite, completion.logprobs)):
            raise wrong("a log-probability that is not finite; the policy's weights may be what is not")


def _check_support(mask: SamplingMask, ids: Sequence[int], vocabulary: int) -> None:
    """Raise UserError unless each token is in the support that was recorded of it."""
    rows = torch.repeat_interleave(torch.arange(len(mask), device=mask.device), mask.lengths)
    tokens = torch.tensor(ids, device=mask.device)
    found = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
    found[rows[mask.token_ids == tokens[rows]]] = True
    missing = (~found & (mask.lengths > 0)).nonzero()[:, 0].tolist()
    if missing or bool((mask.token_ids >= vocabulary).any()):
        what = f"without token {ids[missing[0]]}, which was drawn from it" if missing else "with unknown token ids"
        raise wrong(f"a sampling mask {what}; start it with the policy's model, and without other logits processors")


def wrong(what: str) -> UserError:
    """An error about what the engine returned."""
    return UserError(f"rollout.engine: the engine returned {what}")


@dataclass
class Draw:
    """Completions that were asked for, and those of them that are there."""

    examples: Sequence[Example]  # one for each completion
    requests: Sequence[Request]  # one for each run of the same example
    sampling: Sampling
    first: int  # the serial number of the first completion
    share: range  # the indices of the requests that this rank asks for
    # By the request's index, with the step after which the policy had the weights that drew them.
    done: dict[int, tuple[Sequence[Completion], int]] = field(default_factory=dict)
    numbers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # metrics of engine and tools
    thread: Thread | None = None  # that draws it in the background
    error: BaseException | None = None  # that ended the thread

    @property
    def missing(self) -> list[int]:
        """This rank's requests without completions."""
        return [index for index in self.share if index not in self.done]

    def rollout(self, policy: Policy) -> Rollout | None:
        """The rollout of this rank's completions, if it has any; all of them must be there."""
        if not self.share:
            return None
        drawn = [(completion, step) for some, step in map(self.done.__getitem__, self.share) for completion in some]
        completions, steps = zip(*drawn, strict=True)
        first = sum(request.n for request in self.requests[: self.share.start])
        return replace(
            assemble(policy, self.examples[first : first + len(completions)], completions, self.sampling),
            serial=torch.arange(len(completions)) + self.first + first,
            weights_step=torch.tensor(steps),
        )


def assemble(
    policy: Policy, examples: Sequence[Example], completions: Sequence[Completion], sampling: Sampling
) -> Rollout:
    """The rollout of B completions, with what `sampling` asked to record."""
    pairs = zip(examples, completions, strict=True)
    rollout = as_rollout(policy, [(example.token_ids, completion.token_ids) for example, completion in pairs])
    mask, drawn, logprobs, routing = rollout.completion_mask, None, None, None
    if any(c.drawn is not None for c in completions):
        drawn = torch.zeros_like(mask)
        drawn[mask] = torch.tensor([flag for c in completions for flag in c.drawn or [True] * len(c.token_ids)])
    if sampling.logprobs:
        logprobs = torch.zeros(mask.shape)
        logprobs[mask] = torch.tensor([x for c in completions for x in _recorded(c.logprobs, "log-probabilities")])
    if sampling.routing:
        try:
            records = [_recorded(c.routed_experts, "routed experts") for c in completions]
            routing = routing_from_vllm(policy.model, records, rollout.attention_mask)
        except (ValueError, TypeError) as error:
            raise UserError(f"rollout.keep_routing: the engine's routed experts cannot be used: {error}") from error
    masks = [_recorded(c.sampling_mask, "sampling mask") for c in completions] if sampling.supports else None
    return replace(
        rollout,
        drawn=drawn,
        messages=[c.messages or [] for c in completions],
        ended=torch.tensor([completion.ended for completion in completions]),
        supports=None if masks is None else [mask.to("cpu") for mask in masks],
        rollout_logprobs=logprobs,
        routing=routing,
    )


def _recorded(record: Any, what: str) -> Any:
    """What a completion has recorded. Raises UserError if it has not."""
    if record is None:
        raise wrong(f"a completion without its {what}")
    return record
