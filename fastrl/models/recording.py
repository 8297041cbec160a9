"""What each token of Hugging Face's ``generate`` was drawn from, and with which log-probability.

    with record_sampling(model, logprobs=True) as recorder:
        tokens = model.generate(prompts, do_sample=True, top_p=0.9)
    completions = tokens[:, prompts.shape[1] :]
    mask = recorder.sampling_mask(counts=completion_mask)  # a fastrl.SamplingMask, rows as in completions.reshape(-1)
    rollout_logprobs = recorder.logprobs(completions, counts=completion_mask)  # shaped like completions

Temperature, penalties and guidance change scores without excluding entries: a mask does not hold them. Train at the
sampler's temperature, and without what the losses do not know. The log-probabilities are the sampler's own, with all
of that in them: what they differ by from the training side's is the mismatch that a rollout correction corrects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fastrl import SamplingMask, token_logprobs
from fastrl.base import checks
from fastrl.base.dependencies import how_to_install

try:
    import transformers
    from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
except ImportError as error:
    raise ImportError(
        f"fastrl.integrations.transformers needs transformers ({error}): {how_to_install(['transformers'])}"
    ) from error

# Where `generate` puts its processors in order. A `logits_processor=` of the caller's own comes before the warpers that
# truncate, and would see the whole vocabulary; there is no public way to stand behind them.
_BUILDER = "_get_logits_processor"

_NOTHING = "nothing was recorded: record_sampling's model must be the one whose generate is called"


class SamplingMaskRecorder(LogitsProcessor):
    """Records the entries that each step leaves above -inf. It must be the last processor: see `record_sampling`.

    A step records the ids of its support, int32, on the device, and costs one synchronisation there (their number). A
    row that keeps everything is stored as not recorded, which means the same. One run of `generate`, of one beam and
    without an assistant; with `num_return_sequences` rows are in the order of the returned sequences.

    The token that a step draws is known only at the next: for log-probabilities one step's scores (B, V) are kept, the
    last one's until `reset`. They cost a copy and a pass over the scores a step, without synchronisation. Nothing else
    of the vocabulary's size outlives a step.

    Args:
        logprobs: whether to record log-probabilities.
        sets: whether to record the sets.

    Raises:
        ValueError: where neither is recorded.
    """

    supports_continuous_batching = False  # there rows come and go

    def __init__(self, logprobs: bool = False, sets: bool = True) -> None:
        if not (logprobs or sets):
            raise ValueError("logprobs and sets are both False: nothing would be recorded")
        self._keeps_logprobs, self._keeps_sets = logprobs, sets
        self.reset()

    def reset(self) -> None:
        """Forget what was recorded, for another run of `generate`."""
        self._token_ids: list[Tensor] = []  # a step: (nnz,) int32
        self._lengths: list[Tensor] = []  # a step: (B,) int64
        self._nothing: list[Tensor] = []  # a step: (B,) bool, rows of -inf or NaN alone
        self._logprobs: list[Tensor] = []  # a step but the last: (B,) float32
        self._scores: Tensor | None = None  # the last step's: (B, V)
        self._steps = 0
        self._next: tuple[int, int] | None = None  # the shape of input_ids at the next step

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record scores (B, V) for the token after input_ids (B, S), and return them as they came."""
        batch, length = input_ids.shape
        if self._next not in (None, (batch, length)):
            raise ValueError(
                f"input_ids must have shape {self._next} at step {self._steps} of a recording,"
                f" got {(batch, length)}: only sampling a token a step, without an assistant, can be recorded, and"
                " another generate needs reset()"
            )
        if self._keeps_logprobs:
            self._record_logprobs(input_ids, scores)
        if self._keeps_sets:
            self._record_sets(scores)
        self._steps += 1
        self._next = batch, length + 1
        return scores

    def _record_logprobs(self, input_ids: Tensor, scores: Tensor) -> None:
        """Gather the log-probabilities of the tokens that the step before drew, and keep this step's scores."""
        if self._scores is not None:
            drawn = input_ids[:, -1]
            # A finished row's padding may have no score at all, where embeddings are more than the head's outputs.
            has_score = drawn < self._scores.shape[-1]
            self._logprobs.append(token_logprobs(self._scores, drawn, mask=has_score).logprobs)
            self._scores = None  # freed before the copy needs memory
        # A copy: the scores are the caller's, who may write over them.
        self._scores = scores.detach().clone()

    def _record_sets(self, scores: Tensor) -> None:
        kept = scores > -torch.inf
        lengths = kept.sum(-1)
        self._nothing.append(lengths == 0)
        whole = lengths == kept.shape[-1]
        kept &= ~whole[:, None]
        self._token_ids.append(kept.nonzero()[:, 1].to(torch.int32))
        self._lengths.append(lengths.masked_fill(whole, 0))

    def sampling_mask(self, counts: Tensor | None = None) -> SamplingMask:
        """The recorded support, one row a token of the completions (B, T), flattened; on the device.

        Args:
            counts: (B, T) bool, False where a token does not count (what follows an EOS): its row is not recorded. T
                may be less or more than the steps recorded; columns beyond them are not recorded. None: all steps.

        Raises:
            ValueError: where sets are not or nothing was recorded, a row's scores were all -inf or NaN, or counts has
                another number of rows; TypeError: its dtype.
        """
        if not self._keeps_sets:
            raise ValueError("sets are not recorded: the recorder was made with sets=False")
        if not self._lengths:
            raise ValueError(_NOTHING)
        nothing = torch.stack(self._nothing)
        if bool(nothing.any()):
            step, row = nothing.nonzero()[0].tolist()
            raise ValueError(f"scores of row {row} at step {step} keep nothing: all of them are -inf or NaN")
        lengths = torch.stack(self._lengths)
        steps, batch = lengths.shape
        unrecorded = steps * batch  # one more row, without ids, for all tokens that have no set
        offsets = torch.nn.functional.pad(lengths.view(-1).cumsum(0), (1, 0))
        recorded = SamplingMask(torch.cat(self._token_ids), torch.cat([offsets, offsets[-1:]]))
        rows = torch.arange(unrecorded, device=lengths.device).view(steps, batch).t()
        return recorded.index(rows if counts is None else _counted(rows, counts, unrecorded))

    def logprobs(self, completions: Tensor, counts: Tensor | None = None) -> Tensor:
        """The sampler's own log-probabilities of its tokens, in nats: (B, T) float32, on the device.

        They are under the processed scores that the tokens were drawn from, temperature, truncation and all. They are
        0 where a token does not count, and in columns beyond the steps recorded.

        Args:
            completions: (B, T) int64, the tokens of the recorded `generate`, without the prompts. T may be less or more
                than the steps recorded. Only the last step's tokens are read: the others have been seen, and are not
                compared.
            counts: (B, T) bool, False where a token does not count (what follows an EOS, which the sampler did not
                draw). None: all count; padding may then have any value, -inf too.

        Raises:
            ValueError: where log-probabilities are not or nothing was recorded, for completions of another number of
                rows, or counts of another shape than theirs; TypeError: a dtype.
            IndexError: on the CPU, or inside `check_inputs()`, for a token of the last step outside [0, V) that counts.
        """
        if not self._keeps_logprobs:
            raise ValueError(
                "log-probabilities are not recorded: ask for them by record_sampling(model, logprobs=True)"
            )
        if self._scores is None:
            raise ValueError(_NOTHING)
        completions = checks.tensor("completions", completions, (torch.int64,))
        batch = self._scores.shape[0]
        if completions.dim() != 2 or completions.shape[0] != batch:
            raise ValueError(f"completions must have shape ({batch}, T), got {tuple(completions.shape)}")
        checks.same_device("completions", completions, self._scores, "the recorded scores")
        if counts is not None:
            counts = checks.tensor("counts", counts, (torch.bool,))
            checks.shape("counts", counts, completions.shape, "the shape of completions")
            checks.same_device("counts", counts, completions, "completions")
        columns = self._logprobs[: completions.shape[1]]
        if completions.shape[1] >= self._steps:
            last = self._steps - 1
            mask = None if counts is None else counts[:, last]
            columns.append(token_logprobs(self._scores, completions[:, last], mask=mask).logprobs)
        found = torch.zeros(completions.shape, dtype=torch.float32, device=completions.device)
        if columns:
            found[:, : len(columns)] = torch.stack(columns, 1)
        return found if counts is None else found.where(counts, 0.0)


@contextmanager
def record_sampling(model: Any, logprobs: bool = False, sets: bool = True) -> Iterator[SamplingMaskRecorder]:
    """Record what each token that `model.generate` samples inside the block was drawn from.

    The recorder stands behind all processors that `generate` builds. Each call of `generate` begins a new recording:
    ask for a batch's mask and log-probabilities before the next is sampled (or later, outside the block, for the last).
    The model is wrapped while the block runs and left as it was, after an error too.

    Args:
        model: a transformers model that generates, or a wrapper that passes attributes on to one (PEFT).
        logprobs: whether to record the log-probability of each token too, for `recorder.logprobs`.
        sets: whether to record which entries each was drawn from, for `recorder.sampling_mask`. Without them nothing
            synchronises with the device.

    Raises:
        TypeError: for a model without the method that is wrapped; ValueError: where neither is recorded, and from a
            `generate` inside the block that does not sample: greedy, with beams or with an assistant.
    """
    build = getattr(model, _BUILDER, None)
    if build is None:
        raise TypeError(
            f"model must be a transformers model whose generate calls {_BUILDER}, got {type(model).__name__} with"
            f" transformers {transformers.__version__}"
        )
    owner = getattr(build, "__self__", model)  # `generate` runs on this one, where model is a wrapper
    recorder = SamplingMaskRecorder(logprobs, sets)

    def build_with_recorder(
        self: Any, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        mode = str(generation_config.get_generation_mode().value)
        if mode != "sample":
            raise ValueError(f"only sampling can be recorded (do_sample=True, num_beams=1), got {mode}")
        recorder.reset()
        return LogitsProcessorList([*build(generation_config, *args, **kwargs), recorder])

    before = vars(owner).get(_BUILDER)  # of an outer block
    setattr(owner, _BUILDER, MethodType(build_with_recorder, owner))
    try:
        yield recorder
    finally:
        if before is None:
            delattr(owner, _BUILDER)
        else:
            setattr(owner, _BUILDER, before)


def _counted(rows: Tensor, counts: Tensor, unrecorded: int) -> Tensor:
    """Row numbers (B, T) of the tokens that count, of the row `unrecorded` for the others; rows is (B, steps)."""
    counts = checks.tensor("counts", counts, (torch.bool,))
    if counts.dim() != 2 or counts.shape[0] != rows.shape[0]:
        raise ValueError(f"counts must have shape ({rows.shape[0]}, T), got {tuple(counts.shape)}")
    checks.same_device("counts", counts, rows, "the recorded scores")
    found = torch.full(counts.shape, unrecorded, device=rows.device)
    width = min(rows.shape[1], counts.shape[1])
    found[:, :width] = rows[:, :width].where(counts[:, :width], unrecorded)
    return found
