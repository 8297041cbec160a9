"""Datasets: what a row may be, and that every error names file:line."""

import json

import pytest
from mistakes import error_of
from transformers import AutoTokenizer

from fastrl.base.errors import UserError
from fastrl.training.config.data import Source
from fastrl.training.data.examples import Example, PromptSampler, Room, load_examples
from fastrl.training.data.prompts import PromptFormat


@pytest.fixture
def tokenizer(example):
    return AutoTokenizer.from_pretrained(example / "tokenizer")


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(text, max_prompt_tokens=None):
        path = tmp_path / "data.jsonl"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_examples(Source(str(path)), PromptFormat(tokenizer), Room(max_prompt_tokens))[0]

    return load


def test_a_byte_order_mark_is_no_part_of_the_first_row(load):
    (row,) = load(b"\xef\xbb\xbf" + GOOD.encode())
    assert row.prompt == "1="


def test_rows_become_prompts_tokens_and_columns(load):
    first, second = load('{"prompt": "12=", "answer": "21", "n": 2}\n\n{"n": 3, "prompt": "3=", "answer": "3"}')
    assert (first.prompt, first.columns, first.token_ids) == ("12=", {"answer": "21", "n": 2}, [3, 4, 1])
    assert (second.prompt, second.columns) == ("3=", {"answer": "3", "n": 3})


def test_messages_go_through_the_chat_template(load, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    (row,) = load(json.dumps({"prompt": [{"role": "user", "content": "12"}]}))
    assert row.token_ids == [3, 4, 1]


GOOD = '{"prompt": "1=", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        (GOOD + '{"prompt": "2="', 2, "not valid JSON"),
        (GOOD + "\n[1]", 3, "expected a JSON object, got list"),
        (GOOD + '{"question": "2="}', 2, 'no field "prompt"; the row has question'),
        (GOOD + '{"prompt": "2="}', 2, "expected the first row's fields (answer, prompt), got prompt"),
        (GOOD + '{"prompt": 2, "answer": "2"}', 2, "expected a string or a list of"),
        (GOOD + '{"prompt": "", "answer": "2"}', 2, "the prompt has no tokens"),
        (GOOD + '{"prompt": [], "answer": "2"}', 2, "expected a string or a list of"),
        (GOOD + '{"prompt": [{"role": "user"}], "answer": "2"}', 2, "prompt[0]"),
        (GOOD + '{"prompt": [{"role": "user", "content": "2"}], "answer": "2"}', 2, "no chat template"),
        (GOOD + '{"prompt": "12345=", "answer": "2"}', 2, "6 tokens"),
        ('{"prompt": "1=", "completions": "1"}', 1, '"completions" is taken'),
        (GOOD.encode() + b'{"prompt": "\xff"}', 2, "not UTF-8"),
        (GOOD + '{"prompt": ' + "1" * 5000, 2, "cannot be read: "),
        (GOOD + "[" * 100_000, 2, "cannot be read: maximum recursion depth"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(load, text, line, expected):
    error = error_of(load, text, max_prompt_tokens=5)
    assert f"data.jsonl:{line}: " in error and expected in error


def test_empty_and_missing_files(load, tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"data\.jsonl: the dataset is empty"):
        load("\n")
    with pytest.raises(UserError, match=r"nowhere\.jsonl: cannot read"):
        load_examples(Source(str(tmp_path / "nowhere.jsonl")), PromptFormat(tokenizer))


def test_the_sampler_shows_every_example_once_an_epoch_and_repeats_with_its_seed(load):
    examples = load("".join(f'{{"prompt": "{i}="}}\n' for i in range(7)))

    def drawn(seed):
        sampler = PromptSampler(examples, seed)
        return [row.prompt for _ in range(7) for row in sampler.next(3)]

    first = drawn(0)
    for epoch in range(3):
        assert sorted(first[7 * epoch : 7 * epoch + 7]) == [f"{i}=" for i in range(7)]
    assert first == drawn(0) != drawn(1)
    assert first[:7] != first[7:14]


def test_the_digest_is_of_prompts_and_of_what_the_reward_reads():
    def digest(ids, **columns):
        return PromptSampler([Example("p", columns, ids)], seed=0).data["data.path"]

    assert digest([1, 2], answer="3") == digest([1, 2], answer="3")
    assert len({digest([1, 2], answer="3"), digest([1, 2], answer="4"), digest([1, 3], answer="3")}) == 3
