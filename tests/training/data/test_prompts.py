"""From rows to prompts: system prompts, arguments of the chat template, overlong prompts, rows that are streamed."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from byte_tokenizer import byte_tokenizer
from digit_models import TOKENIZER
from mistakes import error_of
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from fastrl.base.errors import UserError
from fastrl.training.config.data import PromptsConfig, Source
from fastrl.training.data import sources
from fastrl.training.data.examples import PromptSampler, Room, load_examples
from fastrl.training.data.prompts import PromptFormat
from fastrl.training.data.streaming import StreamSampler
from fastrl.training.stages.rows import Reader

#: The digits of the messages, of the system's twice, and "=" where a completion begins unless it is told otherwise.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}={% endif %}{{ m.content }}"
    "{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not bare %}={% endif %}"
)
LONG = "123456789="


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def text_of(tokenizer, example):
    return tokenizer.decode(example.token_ids).replace(" ", "")


@pytest.mark.parametrize(
    ("begin", "opened"),
    [
        ("<think>\n", "<think>\n"),
        ("<think>", "<think>"),
        ("<think>\n\n</think>\n\n", ""),
        ("<think> short", ""),
        ("", ""),
    ],
)
def test_what_a_prompt_opens_is_the_completions(write_rows, begin, opened):
    template = "{{ messages[0].content }}:{% if add_generation_prompt %}" + begin + "{% endif %}"
    tokenizer = byte_tokenizer("</s>", chat_template=template)
    rows = [{"prompt": [{"role": "user", "content": "1 < 2"}]}, {"prompt": f"1 < 2:{begin}"}]
    for row in rows:  # of a dataset all prompts have one form
        ((example,), _) = load_examples(Source(str(write_rows([row]))), PromptFormat(tokenizer))
        assert example.opened == opened and tokenizer.decode(example.token_ids) == f"1 < 2:{begin}"


def test_keys_that_parquet_fills_with_none_are_not_there(write_rows):
    template = "{% for m in messages %}{{ m.content }}{% if 'name' in m %}!{% endif %}{% endfor %}"
    tokenizer = byte_tokenizer("</s>", chat_template=template)
    rows = [{"prompt": [{"role": "user", "content": "1", "name": None}, {"role": "user", "content": "2", "name": "a"}]}]
    ((example,), _) = load_examples(Source(str(write_rows(rows))), PromptFormat(tokenizer))
    assert tokenizer.decode(example.token_ids) == "12!" and "name" not in example.prompt[0]


def called(**arguments):
    """A row with a tool call, whose keys Parquet fills with None in rows of other arguments."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in arguments}}
    answer = {"role": "tool", "content": "7"} | ({"name": "weather"} if "day" in arguments else {})
    return {
        "prompt": [{"role": "assistant", "content": None, "tool_calls": [call]}, answer],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        "completion": "8",
    }


CALLS = (
    "{% for tool in tools %}{{ tool.function.parameters.properties | tojson }}{% endfor %}{% for m in messages %}"
    "<{{ m.role }}{% if 'name' in m %} name={{ m.name }}{% endif %}>CONTENT{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }}"
    "{% for key, x in call.function.arguments.items() %} {{ key }} {{ x }}{% endfor %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTENTS = ["m.content", "m['content'] | trim", "'' + m.content", "m.content if m.content"]


@pytest.mark.parametrize("content", CONTENTS)
def test_no_template_sees_none_in_calls_tools_and_messages(write_rows, tmp_path, content):
    rows = [called(city="Oslo"), called(day="Monday"), called()]
    parquet = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)
    tokenizer = byte_tokenizer("</s>", chat_template=CALLS.replace("CONTENT", f"{{{{ {content} }}}}"))
    prompts = PromptFormat(tokenizer)
    for source in (Source(str(write_rows(rows))), Source(parquet)):
        ids = [example.token_ids for example in load_examples(source, prompts)[0]]
        assert [tokenizer.decode(row) for row in ids] == [
            '{"city": {"type": "string"}}<assistant>{"city": "Oslo"} city Oslo<tool>7<assistant>',
            '{"day": {"type": "string"}}<assistant>{"day": "Monday"} day Monday<tool name=weather>7<assistant>',
            "{}<assistant>{}<tool>7<assistant>",
        ]
        assert [tokens.prompt for tokens in Reader(prompts, None).load(source, read)] == ids


def read(reader, row, where):
    return reader.tokens(row, "completion", where)


def test_what_a_row_lists_is_left_as_it_is_but_for_keys_that_are_none():
    message = {"role": "user", "content": [{"type": "text", "text": "1", "image": None}], "x": [None, 0, "", {}, []]}
    kept = PromptFormat(byte_tokenizer("</s>")).prompt([message | {"name": None}, message | {"content": None}], "x")
    assert kept == [message | {"content": [{"type": "text", "text": "1"}]}, message | {"content": None}]
    assert list(kept[0]) == list(message) and message["content"][0]["image"] is None


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.mark.parametrize(
    ("tools", "text"),
    [(None, "1:"), ([TOOL], "add|1:"), (json.dumps([TOOL]), "add|1:"), ([TOOL | {"strict": None}], "add|1:")],
)
def test_a_rows_tools_are_the_templates(write_rows, tools, text):
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{{ '?' if 'strict' in t else '|' }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}:{% endif %}{% endfor %}"
    )
    tokenizer = byte_tokenizer("</s>", chat_template=template)
    row = {"prompt": [{"role": "user", "content": "1"}], "tools": tools}
    prompts = PromptFormat(tokenizer)
    ((example,), _) = load_examples(Source(str(write_rows([row]))), prompts)
    assert tokenizer.decode(example.token_ids) == text
    assert prompts.pair(row["prompt"], "2", "x", tools)[0] == example.token_ids
    assert tokenizer.decode(Reader(prompts, None).tokens(row | {"chosen": "2"}, "chosen", "x").all) == f"{text}2</s>"


@pytest.mark.parametrize("tools", ["add", ["add"], 3, '{"name": "add"}'])
def test_a_column_of_tools_that_is_no_list_of_tables_is_refused(tools):
    prompts = PromptFormat(byte_tokenizer("</s>", chat_template="{{ messages[0].content }}"))
    with pytest.raises(UserError, match="x: tools: expected a list of tables for the chat template"):
        prompts.token_ids([{"role": "user", "content": "1"}], "x", tools)
    assert prompts.token_ids("1", "x", tools)  # which no template sees


@pytest.mark.parametrize("appends", ["$A </s>", "<s> $A </s>", "<s> $A", "$A </s> <s>"])
@pytest.mark.parametrize("text", ["12=", "12</s>", ""])
def test_a_prompt_does_not_end_with_what_the_tokenizer_appends(write_rows, appends, text):
    """A prompt with EOS at its end would have ended already. Those that the text has itself stay."""
    tokenizer = byte_tokenizer("</s>", "<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(appends, None, [("</s>", 0), ("<s>", 1)])
    formats = PromptFormat(tokenizer)
    tokenizer.bos_token = "<s>"
    before = [1] if "<s> $A" in appends or (not text and "<s>" in appends) else []
    expected = before + tokenizer(text, add_special_tokens=False)["input_ids"]
    if not expected:
        with pytest.raises(UserError, match="x: the prompt has no tokens"):
            formats.token_ids(text, "x")
        return
    assert formats.token_ids(text, "x") == expected
    assert formats.pair(text, "3", "x") == (expected, [*tokenizer("3", add_special_tokens=False)["input_ids"], 0])


USER, SYSTEM = {"role": "user", "content": "12"}, {"role": "system", "content": "7"}


@pytest.mark.parametrize(
    ("prompt", "options", "messages", "text"),
    [
        ("12=", {}, "12=", "12="),
        ("12", {"system_prompt": "7"}, [SYSTEM, USER], "7712="),
        ("12", {"system_prompt": ""}, [USER], "12="),
        ([USER], {"system_prompt": "7"}, [SYSTEM, USER], "7712="),
        ([USER], {"system_prompt": ""}, [USER], "12="),
        ([SYSTEM, USER], {}, [SYSTEM, USER], "7712="),
        ([SYSTEM, USER], {"system_prompt": ""}, [SYSTEM, USER], "7712="),
        ([USER], {"template": {"bare": True}}, [USER], "12"),
        ("12", {"system_prompt": "7", "template": {"bare": True}}, [SYSTEM, USER], "7712"),
    ],
)
def test_a_prompt_becomes_messages_and_tokens(tokenizer, write_rows, prompt, options, messages, text):
    source = Source(str(write_rows([{"prompt": prompt}])))
    ((example,), _) = load_examples(source, PromptFormat(tokenizer, **options))
    assert example.prompt == messages and text_of(tokenizer, example) == text
    assert PromptFormat(tokenizer, **options).pair(prompt, "3", "x")[0] == example.token_ids


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ([SYSTEM, USER], {"system_prompt": "7"}, "has a system message already; leave data.system_prompt out"),
        ("12", {"template": {"bare": True}}, "data.chat_template_kwargs mean nothing; make it a message by"),
        (None, {"system_prompt": "7"}, "expected a string or a list of"),
        ([USER], {"template": {"messages": 3}}, "the tokenizer's chat template fails on the prompt: "),
    ],
)
def test_prompts_that_cannot_be_used(tokenizer, write_rows, prompt, options, expected):
    source = Source(str(write_rows([{"prompt": prompt}])))
    error = error_of(load_examples, source, PromptFormat(tokenizer, **options))
    assert error.startswith(f"{source.path}:1: ") and expected in error and "\n" not in error


# --- overlong prompts, and rows that are streamed ---------------------------------------------------------------------


@pytest.fixture
def source(write_rows):
    """Twenty prompts, of which three are too long for ROOM."""
    rows = [{"prompt": LONG if n in (3, 9, 17) else f"{n}=", "n": n} for n in range(20)]
    return Source(str(write_rows(rows)), fields={"number": "n"})


KEPT = [n for n in range(20) if n not in (3, 9, 17)]
DROP = Room(5, drop=True)


@pytest.fixture
def sampler(source, tokenizer):
    """A sampler of either kind; with `size` one that streams."""

    def sampler(size=None, seed=0, room=DROP, source=source):
        prompts = PromptFormat(tokenizer)
        if size is not None:
            return StreamSampler(source, prompts, room, seed, size)
        examples, dropped = load_examples(source, prompts, room)
        return PromptSampler(examples, seed, dropped)

    return sampler


def numbers(examples):
    return [example.columns["number"] for example in examples]


def test_overlong_prompts_are_an_error_or_dropped_and_counted(sampler, source, capsys):
    assert f"{source.path}:4: the prompt has 10 tokens" in error_of(sampler, room=Room(5))
    config = PromptsConfig(path=source.path, max_prompt_tokens=5)
    assert (Room.of(config, 8, 4), Room.of(config, None, 9)) == (Room(4), Room(5))
    assert "rollout.max_new_tokens: expected less than the context" in error_of(Room.of, config, 8, 8)
    in_memory = sampler()
    assert numbers(in_memory.examples) == KEPT and in_memory.dropped == 3
    assert "rows.jsonl: 3 of 20 prompts dropped, which have more than 5 tokens\n" in capsys.readouterr().err
    assert "all 20 prompts have more than 1 tokens" in error_of(sampler, room=Room(1, drop=True))
    streamed = sampler(size=4)
    streamed.next(len(KEPT))
    assert streamed.dropped <= 3  # the last rows may be among the long ones
    streamed.next(1)
    assert streamed.dropped >= 3
    assert "all 20 prompts have more than 1 tokens" in error_of(sampler(size=4, room=Room(1, drop=True)).next, 1)
    assert "the prompt has 10 tokens" in error_of(sampler(size=4, room=Room(5)).next, 20)


@pytest.mark.parametrize("size", [None, 1, 4, 100])
def test_every_prompt_comes_once_an_epoch_in_an_order_of_the_seed(sampler, size):
    def drawn(seed):
        prompts = sampler(size, seed)
        return [n for _ in range(17) for n in numbers(prompts.next(3))]  # batches span epochs

    first = drawn(0)
    epochs = [first[i : i + len(KEPT)] for i in range(0, 51, len(KEPT))]
    assert [sorted(epoch) for epoch in epochs] == [KEPT] * 3
    assert first == drawn(0)
    if size is not None:
        assert all(n <= place + size + 2 for epoch in epochs for place, n in enumerate(epoch))  # 3 are dropped
    if size == 1:
        assert epochs[0] == KEPT
    else:
        assert first != drawn(1) and epochs[0] != epochs[1] and epochs[0] != KEPT


def test_a_stream_holds_no_more_than_its_buffer(sampler, tmp_path, write_rows, monkeypatch):
    read = []
    original = sources._read_json_lines
    monkeypatch.setattr(
        sources, "_read_json_lines", lambda path: (read.append(item) or item for item in original(path))
    )
    stream = sampler(size=4)
    assert len(read) == 1
    stream.next(2)
    assert len(read) <= 4 + 1 + stream.dropped and len(stream.buffer) == 3


@pytest.mark.parametrize("size", [None, 1, 4, 100])
@pytest.mark.parametrize("before", [0, 1, 16, 17, 18, 34, 40])
def test_a_position_that_was_saved_is_gone_on_from_exactly(sampler, size, before):
    whole = sampler(size)
    for _ in range(before):
        whole.next(1)
    state = json.loads(json.dumps(whole.state()))
    expected = [numbers(whole.next(5)) for _ in range(9)]
    for resumed in (sampler(size), whole):  # forward, and back
        resumed.load(state)
        assert [numbers(resumed.next(5)) for _ in range(9)] == expected
    assert sampler(size, seed=1).state() == sampler(size).state()


def test_a_stream_goes_on_if_only_unread_rows_have_changed(sampler, source):
    stream = sampler(size=4)
    first, state = numbers(stream.next(5)), stream.state()
    path = Path(source.path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    resumed = sampler(size=4)
    resumed.load(state)
    assert numbers(resumed.next(5)) == numbers(stream.next(5)) != first
    for changed in ([*lines[:2], '{"prompt": "2=", "n": 21}\n', *lines[3:]], lines[:3]):
        path.write_text("".join(changed))
        error = error_of(sampler(size=4).load, state)
        assert error.startswith(f"{path}: cannot be resumed with another dataset: its first ")


def test_a_bad_row_of_a_stream_is_named_when_it_is_read(sampler, source):
    path = Path(source.path)
    path.write_text(path.read_text() + '{"prompt": "1=", "other": 1, "n": 20}\n')
    stream = sampler(size=4)
    stream.next(3)
    assert f"{source.path}:21: " in error_of(stream.next, 20)
    path.write_text('{"text": "1="}\n')
    assert f'{source.path}:1: no field "n"' in error_of(sampler, size=4)
