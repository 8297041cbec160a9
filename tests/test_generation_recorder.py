"""Recording what Hugging Face's generate drew from: equal to its own scores, last in the order, gone afterwards."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
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
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, initializer_range=1.0, bos_token_id=None, eos_token_id=EOS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def generate(model: Any, **options: Any) -> Any:
    """Completions and scores; top_k is 0 unless named, for generate's own default is 50."""
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": STEPS, "pad_token_id": EOS, "eos_token_id": EOS}
    torch.manual_seed(1)
    return model.generate(
        PROMPTS, attention_mask=torch.ones_like(PROMPTS), output_scores=True, return_dict_in_generate=True,
        **(settings | options),
    )  # fmt: skip


def counted(completions: Tensor) -> Tensor:
    is_eos = completions == EOS
    return is_eos.cumsum(1) - is_eos.long() == 0


@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_it_is_what_the_scores_say(model: Any, options: dict[str, Any]) -> None:
    with record_sampling(model) as recorder:
        out = generate(model, eos_token_id=None, **options)
    mask, expected = recorder.sampling_mask(), SamplingMask.from_scores(out.scores)
    assert mask == expected and len(mask) == len(PROMPTS) * STEPS
    assert mask.token_ids.dtype == torch.int32 and mask.longest < VOCAB
    # The sampled token is always a member.
    tokens = out.sequences[:, PROMPTS.shape[1] :].reshape(-1, 1)
    assert mask.to_dense(VOCAB).gather(1, tokens).all()


def test_logprobs_under_it_are_the_samplers(model: Any) -> None:
    with record_sampling(model) as recorder:
        out = generate(model, top_p=0.8, temperature=0.7, output_logits=True)
    tokens = out.sequences[:, PROMPTS.shape[1] :]
    counts = counted(tokens)
    expected = torch.stack(out.scores, 1).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    found = fastrl.token_logprobs(
        torch.stack(out.logits, 1), tokens, mask=counts, temperature=0.7, sampling_mask=recorder.sampling_mask(counts)
    )
    torch.testing.assert_close(found.logprobs, expected.where(counts, 0.0), rtol=0, atol=2e-6)


def test_finished_sequences_are_not_recorded(model: Any) -> None:
    """Two sequences end early; their rows after EOS, which generate scores too, mean the whole vocabulary."""
    later = 9.0 * torch.eye(VOCAB)[EOS]

    class EndEarly(transformers.LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            ends = torch.tensor([2, 9, 3, 9]) == input_ids.shape[1] - PROMPTS.shape[1]
            banned = torch.where(later > 0, -torch.inf, 0.0)
            return scores + torch.where(ends[:, None], 99 * later, banned)

    with record_sampling(model) as recorder:
        out = generate(model, top_p=0.7, logits_processor=transformers.LogitsProcessorList([EndEarly()]))
    counts = counted(out.sequences[:, PROMPTS.shape[1] :])
    assert counts.sum(1).tolist() == [3, 6, 4, 6]
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


def test_a_row_that_keeps_everything_stores_no_ids(model: Any) -> None:
    with record_sampling(model) as recorder:
        generate(model)
    mask = recorder.sampling_mask()
    assert mask.token_ids.shape == (0,) and mask.unrecorded == len(mask) > 0


def test_several_sequences_a_prompt(model: Any) -> None:
    with record_sampling(model) as recorder:
        out = generate(model, top_k=3, num_return_sequences=2)
    assert recorder.sampling_mask() == SamplingMask.from_scores(out.scores)


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


def test_a_wrapper_that_passes_generate_on(model: Any) -> None:
    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    with record_sampling(Wrapper()) as recorder:
        out = generate(Wrapper(), top_k=3)
    assert recorder.sampling_mask() == SamplingMask.from_scores(out.scores)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"num_beams": 2}, "beam_sample"),
        ({"num_beams": 2, "do_sample": False}, "beam_search"),
        ({"do_sample": False}, "greedy_search"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation"),
    ],
)
def test_only_sampling_is_recorded(model: Any, options: dict[str, Any], mode: str) -> None:
    with record_sampling(model), pytest.raises(ValueError, match=rf"only sampling can be recorded .*got {mode}"):
        generate(model, **options)


def test_an_assistant_is_refused(model: Any) -> None:
    with record_sampling(model), pytest.raises(ValueError, match="without an assistant"):
        model.generate(PROMPTS[:1], attention_mask=torch.ones(1, 3, dtype=torch.long), assistant_model=model,
                       do_sample=True, max_new_tokens=STEPS, pad_token_id=EOS)  # fmt: skip


def test_bad_counts(model: Any) -> None:
    with record_sampling(model) as recorder:
        generate(model, top_k=3)
    with pytest.raises(ValueError, match=re.escape("counts must have shape (4, T), got (3, 6)")):
        recorder.sampling_mask(torch.ones(3, 6, dtype=torch.bool))
    with pytest.raises(TypeError, match=re.escape("counts must be one of torch.bool")):
        recorder.sampling_mask(torch.ones(4, 6))


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
    with (
        pytest.raises(TypeError, match="_get_logits_processor, got Linear with transformers"),
        record_sampling(torch.nn.Linear(1, 1)),
    ):
        pass


def test_without_transformers_the_extra_is_named() -> None:
    code = "import sys; sys.modules['transformers'] = None; import fastrl.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "pip install 'fastrl[train]'" in done.stderr
