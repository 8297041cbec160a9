"""Record the support and the log-probability of each token that Hugging Face's `generate` draws.

    with record_sampling(model, logprobs=True) as recorder:
        tokens = model.generate(prompts, do_sample=True, top_p=0.9)
    completions = tokens[:, prompts.shape[1] :]
    mask = recorder.sampling_mask(counts=completion_mask)  # a fastrl.SamplingMask, rows as in completions.reshape(-1)
    rollout_logprobs = recorder.logprobs(completions, counts=completion_mask)  # shaped like completions

Temperature, penalties and guidance change scores without excluding entries, so a mask does not hold them. Train at the
sampler's temperature, and sample without penalties and guidance, which the losses do not apply. The log-probabilities
are the sampler's own, after all of these: their difference from the training side's is the mismatch that a rollout
correction corrects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fastrl import SamplingMask, token_logprobs
from fastrl.base import checks
from fastrl.base.dependencies import how_to_install
from fastrl.models.patching import replaced_method

try:
    import transformers
    from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
except ImportError as error:
    raise ImportError(
        f"fastrl.integrations.transformers needs transformers ({error}): {how_to_install(['transformers'])}"
    ) from error

# The method in which `generate` orders its processors. A caller's own `logits_processor=` runs before the warpers that
# truncate, and would see the whole vocabulary; no public argument runs after them.
_BUILDER = "_get_logits_processor"

_NOTHING = "nothing was recorded: record_sampling's model must be the one whose generate is called"


class SamplingMaskRecorder(LogitsProcessor):
    """Records the entries that each step leaves above -inf. It must be the last processor; see `record_sampling`.

    Each step stores the ids of its support, int32, on the device, and synchronises once (for their number). A row that
    keeps everything is stored as not recorded, which means the same. A recording covers one run of `generate`, with one
    beam and no assistant; with `num_return_sequences` rows are in the order of the returned sequences.

    The token that a step draws is known only at the next step. So log-probabilities keep one step's scores (B, V), the
    last step's until `reset`. They cost one copy and one pass over the scores per step, without synchronisation.
    Nothing else of the vocabulary's size outlives a step.

    Args:
        logprobs: whether to record log-probabilities.
        sets: whether to record the supports.

    Raises:
        ValueError: if both are False.
    """

    supports_continuous_batching = False  # its rows change between steps

    def __init__(self, logprobs: bool = False, sets: bool = True) -> None:
        if not (logprobs or sets):
            raise ValueError("logprobs and sets are both False: nothing would be recorded")
        self._keeps_logprobs, self._keeps_sets = logprobs, sets
        self.reset()

    def reset(self) -> None:
        """Clear the recording, for another run of `generate`."""
        self._token_ids: list[Tensor] = []  # per step: (nnz,) int32
        self._lengths: list[Tensor] = []  # per step: (B,) int64
        self._nothing: list[Tensor] = []  # per step: (B,) bool, rows that hold only -inf or NaN
        self._logprobs: list[Tensor] = []  # per step except the last: (B,) float32
        self._scores: Tensor | None = None  # of the last step: (B, V)
        self._steps = 0
        self._next: tuple[int, int] | None = None  # the shape of input_ids at the next step

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record scores (B, V) for the token after input_ids (B, S), and return them unchanged."""
        batch, length = input_ids.shape
        if self._next not in (None, (batch, length)):
            raise ValueError(
                f"input_ids must have shape {self._next} at step {self._steps} of a recording,"
                f" got {(batch, length)}: only sampling one token per step, without an assistant, can be recorded, and"
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
        """Gather the log-probabilities of the previous step's tokens, and keep this step's scores."""
        if self._scores is not None:
            drawn = input_ids[:, -1]
            # A finished row's padding may have no score, if the model has more embeddings than head outputs.
            has_score = drawn < self._scores.shape[-1]
            self._logprobs.append(token_logprobs(self._scores, drawn, mask=has_score).logprobs)
            self._scores = None  # freed before the copy needs memory
        # A copy: the caller may overwrite the scores.
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
        """The recorded supports, one row per token of the completions (B, T), flattened; on the device.

        Args:
            counts: (B, T) bool, False where a token does not count (after an EOS): its row is not recorded. T may be
                less or more than the number of recorded steps; columns beyond them are not recorded. None: all steps.

        Raises:
            ValueError: if supports were not recorded, or nothing was; if a row's scores were all -inf or NaN; if counts
                has another number of rows. TypeError: for another dtype of counts.
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
        unrecorded = steps * batch  # one more row, without ids, for all tokens without a support
        offsets = torch.nn.functional.pad(lengths.view(-1).cumsum(0), (1, 0))
        recorded = SamplingMask(torch.cat(self._token_ids), torch.cat([offsets, offsets[-1:]]))
        rows = torch.arange(unrecorded, device=lengths.device).view(steps, batch).t()
        return recorded.index(rows if counts is None else _counted(rows, counts, unrecorded))

    def logprobs(self, completions: Tensor, counts: Tensor | None = None) -> Tensor:
        """The sampler's own log-probabilities of its tokens, in nats: (B, T) float32, on the device.

        They are taken from the processed scores that the tokens were drawn from (after temperature, truncation and all
        other processors). They are 0 where a token does not count, and in columns beyond the recorded steps.

        Args:
            completions: (B, T) int64, the tokens of the recorded `generate`, without the prompts. T may be less or more
                than the number of recorded steps. Only the last step's tokens are read: the others were read while
                recording, and are not compared.
            counts: (B, T) bool, False where a token does not count (after an EOS, which the sampler did not draw).
                None: all count; padding may then have any value, including -inf.

        Raises:
            ValueError: if log-probabilities were not recorded, or nothing was; if completions has another number of
                rows; if the shape of counts differs from theirs. TypeError: for another dtype.
            IndexError: on the CPU, or inside `check_inputs()`, for a token of the last step that counts and is outside
                [0, V).
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
        result = torch.zeros(completions.shape, dtype=torch.float32, device=completions.device)
        if columns:
            result[:, : len(columns)] = torch.stack(columns, 1)
        return result if counts is None else result.where(counts, 0.0)


@contextmanager
def record_sampling(model: Any, logprobs: bool = False, sets: bool = True) -> Iterator[SamplingMaskRecorder]:
    """Record the support of each token that `model.generate` samples inside the block.

    The recorder runs after all processors that `generate` builds. Each call of `generate` begins a new recording, so
    get a batch's mask and log-probabilities before sampling the next (the last batch's also after the block).
    The model is wrapped while the block runs, and restored afterwards, also after an error.

    Args:
        model: a transformers model that generates, or a wrapper that forwards attributes to one (PEFT).
        logprobs: whether to record the log-probability of each token, for `recorder.logprobs`.
        sets: whether to record the support of each token, for `recorder.sampling_mask`. Without it nothing synchronises
            with the device.

    Raises:
        TypeError: for a model without the method that is wrapped. ValueError: if both are False, and from a `generate`
            inside the block that does not sample: greedy, with beams or with an assistant.
    """
    recorder = SamplingMaskRecorder(logprobs, sets)

    def begin(settings: GenerationConfig) -> SamplingMaskRecorder:
        mode = str(settings.get_generation_mode().value)
        if mode != "sample":
            raise ValueError(f"only sampling can be recorded (do_sample=True, num_beams=1), got {mode}")
        recorder.reset()
        return recorder

    with last_processor(model, begin):
        yield recorder


@contextmanager
def last_processor(model: Any, begin: Callable[[GenerationConfig], LogitsProcessor]) -> Iterator[None]:
    """Have each `model.generate` in the block run what `begin` returns for its settings after all other processors.

    That of an inner block runs after that of an outer one. The model is restored afterwards, also after an error.
    Raises TypeError for a model without the method that is wrapped.
    """
    build = getattr(model, _BUILDER, None)
    if build is None:
        raise TypeError(
            f"model must be a transformers model whose generate calls {_BUILDER}, got {type(model).__name__} with"
            f" transformers {transformers.__version__}"
        )
    owner = getattr(build, "__self__", model)  # the object that `generate` runs on, if model is a wrapper

    def build_with_last(
        self: Any, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        last = begin(generation_config)
        return LogitsProcessorList([*build(generation_config, *args, **kwargs), last])

    with replaced_method(owner, _BUILDER, MethodType(build_with_last, owner)):
        yield


def _counted(rows: Tensor, counts: Tensor, unrecorded: int) -> Tensor:
    """Row numbers (B, T): of the tokens that count, from `rows` (B, steps); `unrecorded` for the others."""
    counts = checks.tensor("counts", counts, (torch.bool,))
    if counts.dim() != 2 or counts.shape[0] != rows.shape[0]:
        raise ValueError(f"counts must have shape ({rows.shape[0]}, T), got {tuple(counts.shape)}")
    checks.same_device("counts", counts, rows, "the recorded scores")
    result = torch.full(counts.shape, unrecorded, device=rows.device)
    width = min(rows.shape[1], counts.shape[1])
    result[:, :width] = rows[:, :width].where(counts[:, :width], unrecorded)
    return result
