"""Stop strings of transformers' generate: where a completion ends, and what is recorded of it."""

import pytest
import torch
from own_engine import generate
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from fastrl.training.batches.rollout import completion_texts
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.protocol import Request, Sampling
from fastrl.training.engines.transformers import TransformersEngine, _Ends

PROMPTS = [Example("1=", {}, [3, 1]), Example("2345=", {}, [4, 5, 6, 7, 1]), Example("9=", {}, [11, 1])]
SHAPE = {"model_type": "qwen3", "initializer_range": 1.0}  # whose completions are varied, and peaked enough to repeat


def cut(text, stop):
    """The text up to the end of what comes first."""
    ends = [text.find(s) + len(s) for s in stop if s in text]
    return text[: min(ends, default=len(text))]


@pytest.mark.parametrize(("greedy", "batch_size"), [(False, None), (True, None), (True, 2)])
def test_a_completion_is_the_same_one_cut_after_the_first_stop_string(make_policy, greedy, batch_size):
    policy = make_policy(**SHAPE)

    def draw(stop):
        settings = RolloutConfig(max_new_tokens=8, stop=stop, batch_size=batch_size)
        return generate(policy, PROMPTS * 4, settings, greedy=greedy)

    whole = draw([])
    expected = completion_texts(policy, whole)
    stop = [*sorted({text[2:4] for text in expected if len(text) > 4})[:3], expected[0][:1]]
    stopped = draw(stop)
    texts = completion_texts(policy, stopped)
    assert texts == [cut(text, stop) for text in expected]
    assert len({len(text) for text in texts}) > 1
    assert any(len(text) < len(before) for text, before in zip(texts, expected, strict=True))
    ends = [any(s in text for s in stop) or bool(ended) for text, ended in zip(expected, whole.ended, strict=True)]
    assert stopped.ended.tolist() == ends
    mask = stopped.completion_mask
    assert torch.equal(stopped.targets[mask], whole.targets[:, : mask.shape[1]][mask])  # a token is a character here
    assert (stopped.targets[~mask] == policy.pad_token_id).all()


def test_what_is_recorded_ends_with_the_stop_string(make_policy):
    policy = make_policy(**SHAPE)
    settings = RolloutConfig(max_new_tokens=8, stop=["1", "=", "5"], top_p=0.7)
    rollout = generate(policy, PROMPTS * 4, settings)
    mask = rollout.completion_mask
    assert not mask.all()
    assert (rollout.rollout_logprobs[mask] < 0).any()
    assert (rollout.rollout_logprobs[~mask] == 0).all()
    assert (rollout.sampling_mask.lengths.view(mask.shape)[~mask] == 0).all()
    assert (rollout.sampling_mask.lengths.view(mask.shape)[mask] > 0).any()


def test_a_stop_string_does_not_begin_in_the_prompt(make_policy):
    """A criterion that looked at the last characters of all would find "=d" at the first token."""
    policy = make_policy(**SHAPE)
    first = generate(policy, PROMPTS, RolloutConfig(max_new_tokens=6), greedy=True)
    stop = ["=" + text[0] for text in completion_texts(policy, first)]
    assert "=" not in "".join(completion_texts(policy, first))
    assert torch.equal(generate(policy, PROMPTS, RolloutConfig(max_new_tokens=6, stop=stop), greedy=True).targets,
                       first.targets)  # fmt: skip


def test_every_request_has_a_limit_of_its_own(make_policy):
    policy = make_policy(**SHAPE)
    sampling = Sampling(0.0, 1.0, 0, 0.0, [12], (), False, False, False)  # no token is EOS
    engine = TransformersEngine(policy, None)
    limits = [3, 1, 5]
    requests = [
        Request(str(i), example.token_ids, 2, limit, 0)
        for i, (example, limit) in enumerate(zip(PROMPTS, limits, strict=True))
    ]
    for index, completions in engine.generate(requests, sampling):
        assert [len(c.token_ids) for c in completions] == [limits[index]] * 2
        assert not any(c.ended for c in completions)


@pytest.mark.parametrize("stop", ["</tool>", "é!", "ool", " b", "日本"])
def test_tokens_that_hold_parts_of_a_stop_string(stop):
    """Bytes of one character in two tokens, and tokens that are more than the text's end or beginning."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(["a <tool>b</tool> b toolbox>x </to ol>"] * 9, vocab_size=290, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    prompt = tokenizer(stop[:-1])["input_ids"]
    for text in ("a </to ol></tool> b é! 日本x", "bool toolbox b", "é! 日日本", "none</too", stop):
        ids = tokenizer(text)["input_ids"]
        ends = _Ends(tokenizer, [stop, "never"], len(prompt), torch.tensor([len(ids)]))
        done = [bool(ends(torch.tensor([prompt + ids[:n]]), None)) for n in range(1, len(ids) + 1)]
        first = next((n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n])), None)
        assert ends.stopped.item() == (first is not None) == (stop in text)
        assert ends.lengths.item() == (first or len(ids))
        assert done == [n >= (first or len(ids)) for n in range(1, len(ids) + 1)]
