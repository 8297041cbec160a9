"""What engines answer, checked: their tokenizer and their completions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.training.engines.protocol import Completion, EngineFailed, Request, Sampling

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
