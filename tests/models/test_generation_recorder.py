"""Recording what Hugging Face's generate drew from: equal to its own scores, last in the order, gone afterwards."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest
import torch
import transformers
from tiny_models import tiny_model
from torch import Tensor

import fastrl
from fastrl import SamplingMask
from fastrl.integrations.transformers import SamplingMaskRecorder, record_sampling

VOCAB, STEPS, EOS = 23, 6, 0
PROMPTS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 5, 9]])
SAMPLERS = {
    "top-p": {"top_p": 0.7},
    "top-k": {"top_k": 4},
    "min-p": {"min_p": 0.3},
    "all": {"top_p": 0.9, "top_k": 9, "min_p": 0.05, "temperature": 0.6},
    "normalised": {"top_p": 0.7, "renormalize_logits": True},
}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return tiny_model("llama", vocab_size=VOCAB, initializer_range=1.0, eos_token_id=EOS)


def generate(model: Any, **options: Any) -> Any:
    """Completions and scores; top_k is 0 unless named, for generate's own default is 50."""
    settings = {
        "do_sample": True,
        "top_k": 0,
        "max_new_tokens": STEPS,
        "pad_token_id": EOS,
        "eos_token_id": None,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    torch.manual_seed(1)
    return model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), **(settings | options))


def recorded(
    model: Any, *, logprobs: bool = False, sets: bool = True, **options: Any
) -> tuple[SamplingMaskRecorder, Any, Tensor]:
    """The recorder of a generation, what `generate` returned, and the completions (B, T)."""
    with record_sampling(model, logprobs=logprobs, sets=sets) as recorder:
        out = generate(model, **options)
    return recorder, out, completions(out)


def completions(out: Any) -> Tensor:
    return out.sequences[:, PROMPTS.shape[1] :]


def samplers_logprobs(out: Any) -> Tensor:
    """What generate's own scores say of its tokens, in float64."""
    return logprobs_of(torch.stack(out.scores), completions(out))


def logprobs_of(scores: Tensor, tokens: Tensor) -> Tensor:
    """Of tokens (B, T), in float64, from the scores of each step (T, B, V)."""
    return scores.detach().double().log_softmax(-1).transpose(0, 1).gather(-1, tokens[..., None])[..., 0]


def assert_logprobs(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32 and not found.requires_grad and found.isfinite().all()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("logprobs", "sets"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, *SAMPLERS.values()],
    ids=["temperature", "top-p 0.8", "penalty", *SAMPLERS],
)
def test_it_is_what_the_scores_say(model: Any, options: dict[str, Any], logprobs: bool, sets: bool) -> None:
    recorder, out, tokens = recorded(model, logprobs=logprobs, sets=sets, **options)
    assert tokens.shape == (4, STEPS)
    if logprobs:
        expected = samplers_logprobs(out)
        assert expected.std() > 0.1
        assert_logprobs(recorder.logprobs(tokens), expected)
    if sets:
        mask = recorder.sampling_mask()
        assert mask == SamplingMask.from_scores(out.scores) and len(mask) == tokens.numel()
        if options.keys() & {"top_p", "top_k", "min_p"}:
            assert mask.token_ids.dtype == torch.int32 and mask.longest < VOCAB
            # The sampled token is always a member.
            assert mask.to_dense(VOCAB).gather(1, tokens.reshape(-1, 1)).all()
        else:  # a row that keeps everything stores no ids
            assert mask.token_ids.shape == (0,) and mask.unrecorded == len(mask)


class EndEarly(transformers.LogitsProcessor):
    """The first and third sequence end after 3 and 4 tokens; else EOS, which is the padding too, is never kept."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = torch.tensor([2, 9, 3, 9]) == input_ids.shape[1] - PROMPTS.shape[1]
        is_eos = torch.arange(VOCAB) == EOS
        return scores + torch.where(is_eos, torch.where(ends[:, None], 891.0, -torch.inf), 0.0)


def ended(model: Any, **options: Any) -> tuple[SamplingMaskRecorder, Any, Tensor, Tensor]:
    """`recorded` where two sequences end early, and which tokens count."""
    processors = transformers.LogitsProcessorList([EndEarly()])
    recorder, out, tokens = recorded(model, eos_token_id=EOS, logits_processor=processors, **options)
    is_eos = tokens == EOS
    counts = is_eos.cumsum(1) - is_eos.long() == 0
    assert counts.sum(1).tolist() == [3, 6, 4, 6]
    return recorder, out, tokens, counts


def test_finished_sequences_are_not_recorded(model: Any) -> None:
    """Two sequences end early; their rows after EOS, which generate scores too, mean the whole vocabulary."""
    recorder, out, _, counts = ended(model, top_p=0.7)
    every, mask = recorder.sampling_mask(), recorder.sampling_mask(counts)
    assert every == SamplingMask.from_scores(out.scores)
    rows = counts.view(-1)
    assert mask.index(rows) == every.index(rows)
    assert mask.unrecorded == int((~counts).sum()) and (mask.lengths[~rows] == 0).all()
    # As many columns as the batch that the completions are put into.
    narrow, wide = recorder.sampling_mask(counts[:, :4]), recorder.sampling_mask(torch.ones(4, 8, dtype=torch.bool))
    assert narrow == mask.index(torch.arange(24).view(4, 6)[:, :4])
    columns = torch.arange(32).view(4, 8)
    assert wide.index(columns[:, :6]) == every and wide.index(columns[:, 6:]).unrecorded == 8


def test_recorded_logprobs_are_those_of_training(model: Any) -> None:
    recorder, out, tokens, counts = ended(model, logprobs=True, top_p=0.8, temperature=0.7, output_logits=True)
    # That EOS was forced or banned is known from the sets alone.
    options = {"mask": counts, "temperature": 0.7, "sampling_mask": recorder.sampling_mask(counts)}
    by_logits = fastrl.token_logprobs(torch.stack(out.logits, 1), tokens, **options)
    torch.testing.assert_close(
        by_logits.logprobs.double(), samplers_logprobs(out).where(counts, 0.0), rtol=0, atol=2e-6
    )
    with torch.no_grad():
        hidden = model.model(out.sequences).last_hidden_state[:, PROMPTS.shape[1] - 1 : -1]
    train = fastrl.linear_token_logprobs(hidden, model.lm_head.weight, tokens, **options)
    assert train.logprobs.std() > 0.1
    torch.testing.assert_close(recorder.logprobs(tokens, counts), train.logprobs.detach(), rtol=0, atol=1e-5)


def test_padding_has_logprob_zero(model: Any) -> None:
    """Padding is drawn by nobody, and its own score is -inf: nothing of that comes out where it does not count."""
    recorder, out, tokens, counts = ended(model, logprobs=True, temperature=0.7)
    expected = samplers_logprobs(out)
    assert (expected[~counts] == -torch.inf).all()
    expected = expected.where(counts, 0.0)
    assert_logprobs(recorder.logprobs(tokens, counts), expected)
    assert_logprobs(recorder.logprobs(tokens.where(counts, -100), counts), expected)
    # As many columns as the batch that the completions are put into.
    assert_logprobs(recorder.logprobs(tokens[:, :4], counts[:, :4]), expected[:, :4])
    wide = torch.nn.functional.pad(tokens, (0, 2), value=-100)
    everywhere = torch.nn.functional.pad(counts, (0, 2), value=True)
    assert_logprobs(recorder.logprobs(wide, everywhere), torch.nn.functional.pad(expected, (0, 2)))
    assert recorder.logprobs(tokens[:, :0], counts[:, :0]).shape == (4, 0)
    assert_logprobs(recorder.logprobs(tokens[:, :2]), expected[:, :2])


def test_padding_that_the_head_has_no_output_for() -> None:
    """A model may embed more tokens than it has scores for."""
    recorder = SamplingMaskRecorder(logprobs=True)
    scores = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[4, 9, 9], [1, 0, 2]])
    for step in range(3):
        recorder(tokens[:, :step], scores[step])
    counts = tokens < 9
    expected = logprobs_of(scores, tokens.where(counts, 0)).where(counts, 0.0)
    assert_logprobs(recorder.logprobs(tokens, counts), expected)


@pytest.mark.parametrize("steps", [1, 2])
def test_logprobs_of_few_steps_and_several_sequences(model: Any, steps: int) -> None:
    with record_sampling(model, logprobs=True) as recorder:
        for options in ({"top_k": 3, "num_return_sequences": 2, "max_new_tokens": steps}, {}):  # a new recording
            out = generate(model, **options)
            assert_logprobs(recorder.logprobs(completions(out)), samplers_logprobs(out))
            assert recorder.sampling_mask() == SamplingMask.from_scores(out.scores)


def test_logprobs_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        recorder, out, tokens = recorded(model, logprobs=True)
    assert_logprobs(recorder.logprobs(tokens.clone()), samplers_logprobs(out))


def test_what_is_done_to_the_scores_afterwards_changes_nothing() -> None:
    recorder = SamplingMaskRecorder(logprobs=True)
    scores = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens = torch.tensor([[4, 1], [0, 0], [2, 3]])
    expected = logprobs_of(scores, tokens)
    for step in range(2):
        mine = scores[step]
        assert recorder(tokens[:, :step], mine) is mine
        with torch.no_grad():
            mine.zero_()
    assert_logprobs(recorder.logprobs(tokens), expected)
    assert_logprobs(recorder.logprobs(tokens), expected)


def held(recorder: SamplingMaskRecorder) -> list[Tensor]:
    """All tensors that a recorder keeps."""
    values = [x for value in vars(recorder).values() for x in (value if isinstance(value, list) else [value])]
    return [value for value in values if isinstance(value, Tensor)]


@pytest.mark.parametrize(("logprobs", "alive"), [(False, 0), (True, 1)])
def test_only_the_last_steps_scores_are_alive(
    model: Any, monkeypatch: pytest.MonkeyPatch, logprobs: bool, alive: int
) -> None:
    """Neither the scores that generate passes in nor a copy of them outlives the step after."""
    record, seen, kept, large = SamplingMaskRecorder.__call__, [], [], []

    def watch(self: SamplingMaskRecorder, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert all(ref() is None for ref in seen[:-1])  # generate itself still has the step before's
        result = record(self, input_ids, scores)
        # A boolean of the scores' shape would be found too, and a view of something large.
        now = [tensor for tensor in held(self) if tensor.untyped_storage().nbytes() >= scores.numel()]
        assert all(ref() is None for ref in kept)
        large.append(len(now))
        seen.append(weakref.ref(scores))
        kept.extend(weakref.ref(tensor) for tensor in now)
        return result

    monkeypatch.setattr(SamplingMaskRecorder, "__call__", watch)
    recorder = recorded(model, logprobs=logprobs, top_k=2, output_scores=False)[0]
    assert large == [alive] * STEPS and len(seen) == STEPS
    assert all(ref() is None for ref in seen) and sum(ref() is not None for ref in kept) == alive
    recorder.reset()
    assert not held(recorder) and all(ref() is None for ref in kept)


def test_each_generate_begins_anew_and_blocks_nest(model: Any) -> None:
    with record_sampling(model) as outer:
        generate(model, top_k=3)
        first = outer.sampling_mask()
        with record_sampling(model) as inner:
            out = generate(model, top_k=5)
        assert inner.sampling_mask() == outer.sampling_mask() == SamplingMask.from_scores(out.scores)
        assert outer.sampling_mask() != first
        generate(model, top_k=2)
    assert outer.sampling_mask().longest == 2 and inner.sampling_mask().longest == 5


def test_the_model_is_left_as_it_was(model: Any) -> None:
    before = dict(vars(model))
    with pytest.raises(ValueError, match="got greedy_search"), record_sampling(model):
        generate(model, do_sample=False)
    assert vars(model) == before
    with record_sampling(model) as recorder:
        pass
    assert vars(model) == before
    generate(model, top_k=3)
    with pytest.raises(ValueError, match="nothing was recorded"):
        recorder.sampling_mask()


def test_bad_counts_and_completions(model: Any) -> None:
    recorder, _, tokens = recorded(model, logprobs=True, top_k=3)
    counts, outside = torch.ones_like(tokens, dtype=torch.bool), tokens.clone()
    outside[2, -1] = VOCAB
    wrong_counts: dict[str, tuple[type[Exception], Any]] = {
        "counts must have shape (4, T), got (3, 6)": (ValueError, counts[:3]),
        "counts must be torch.bool": (TypeError, counts.float()),
    }
    for words, (error, given) in wrong_counts.items():
        with pytest.raises(error, match=re.escape(words)):
            recorder.sampling_mask(given)
    wrong: dict[str, tuple[type[Exception], Any, Any]] = {
        r"completions must have shape \(4, T\), got \(3, 6\)": (ValueError, tokens[:3], None),
        r"completions must have shape \(4, T\), got \(6,\)": (ValueError, tokens[0], None),
        "completions must be torch.int64, got torch.float32": (TypeError, tokens.float(), None),
        "completions must be a tensor, got list": (TypeError, tokens.tolist(), None),
        "completions must be a dense tensor .* got a meta tensor": (TypeError, tokens.to("meta"), None),
        r"counts must have shape \(4, 6\) \(the shape of completions\), got \(4": (ValueError, tokens, counts[:, :5]),
        "counts must be torch.bool, got torch.int64": (TypeError, tokens, counts.long()),
        "counts must be a dense tensor .* got a meta tensor": (TypeError, tokens, counts.to("meta")),
        rf"targets\[2\] is {VOCAB}, outside \[0, {VOCAB}\)": (IndexError, outside, counts),
    }
    for words, (error, *arguments) in wrong.items():
        with pytest.raises(error, match=words):
            recorder.logprobs(*arguments)


def test_what_was_not_asked_for_is_not_recorded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, _, tokens = recorded(model, top_k=3)
    with pytest.raises(ValueError, match=re.escape("log-probabilities are not recorded: ask for them by record_sampl")):
        recorder.logprobs(tokens)
    # Without sets nothing asks the device how many entries are kept.
    monkeypatch.setattr(Tensor, "nonzero", None)
    with record_sampling(model, logprobs=True, sets=False) as recorder:
        with pytest.raises(ValueError, match="nothing was recorded"):
            recorder.logprobs(tokens)
        out = generate(model, top_k=3)
    with pytest.raises(ValueError, match=r"sets are not recorded: .*sets=False"):
        recorder.sampling_mask()
    assert_logprobs(recorder.logprobs(completions(out)), samplers_logprobs(out))
    before = dict(vars(model))
    with pytest.raises(ValueError, match="both False: nothing would be recorded"):
        recorded(model, logprobs=False, sets=False)
    assert vars(model) == before


def test_a_recorder_of_ones_own_is_told_where_a_run_ends() -> None:
    recorder = SamplingMaskRecorder()
    scores = torch.tensor([[0.0, -torch.inf, 1.0]])
    assert recorder(torch.zeros(1, 4, dtype=torch.long), scores) is scores
    with pytest.raises(ValueError, match=re.escape("input_ids must have shape (1, 5) at step 1 of a recording")):
        recorder(torch.zeros(1, 4, dtype=torch.long), scores)
    recorder.reset()
    recorder(torch.zeros(1, 4, dtype=torch.long), scores)
    assert recorder.sampling_mask() == SamplingMask.from_lists([[0, 2]])


def test_a_model_that_cannot_generate_so_is_named() -> None:
    with pytest.raises(TypeError, match="_get_logits_processor, got Linear with transformers"):
        recorded(torch.nn.Linear(1, 1))
