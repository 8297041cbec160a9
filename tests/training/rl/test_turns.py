"""Rollouts of several turns: whose turn it is, what engine and tools are asked, what the rollout says of tokens."""

from dataclasses import replace

import pytest
import torch
from doc_pages import page_of

from fastrl import SamplingMask
from fastrl.base.errors import UserError
from fastrl.rewards.transcript import Transcript
from fastrl.training.batches.rollout import completion_texts
from fastrl.training.config.sampling import RolloutConfig
from fastrl.training.data.examples import Example
from fastrl.training.engines.choice import make_sampler
from fastrl.training.engines.protocol import Completion, EngineUnavailable
from fastrl.training.engines.sampler import CompletionSampler
from fastrl.training.engines.turns import Tools, Turns

# The tokens are "<eos>", "=", "0" ... "9": a digit d is the token d + 2.
EXAMPLES = [Example("1=", {"answer": "a"}, [3, 1], "f:1"), Example("23=", {"answer": "b"}, [4, 5, 1], "f:2")]
CHAT = [Example([{"role": "user", "content": "12"}], {}, [3, 4, 0, 1], "f:1")]
# Each message ends with EOS, and of an assistant's earlier message only what follows its last "=" is left.
TEMPLATE = (
    "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else m.content.split('=')[-1] }}"
    "{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


class Script:
    """An engine that writes these texts: for a context of tokens, prompt included, what follows; "." is an EOS."""

    def __init__(self, policy, lines, supports=False, weights=None):
        self.policy, self.lines, self.supports, self.weights = policy, lines, supports, weights
        self.calls, self.fail_after = [], None
        self.version = None

    def generate(self, requests, sampling):
        self.calls.append(requests)
        for index, request in enumerate(requests):
            if self.fail_after is not None and index >= self.fail_after:
                raise EngineUnavailable("it is gone")
            assert isinstance(request.example, Example)
            written = self.lines[self.policy.tokenizer.decode(request.token_ids)]
            written = written if isinstance(written, list) else [written]
            assert len(written) == request.n
            yield index, [self.completion(text, request, sampling) for text in written]

    def completion(self, text, request, sampling):
        ids = self.policy.tokenizer(text.replace(".", "<eos>"), add_special_tokens=False)["input_ids"]
        ids = ids[: request.max_tokens]
        ended = ids[-1] == 0 or any(self.policy.tokenizer.decode(ids).endswith(stop) for stop in sampling.stop)
        mask = SamplingMask.from_lists([[token, 11] for token in ids]) if sampling.supports else None
        logprobs = [-0.5 - token for token in ids] if sampling.logprobs else None
        weights = self.version if self.weights is None else self.weights(request)
        return Completion(ids, ended, logprobs, mask, weights=weights)

    def update_weights(self, version, weights):
        self.version = version

    def sleep(self):
        pass

    def wake_up(self):
        pass


@pytest.fixture
def write_tools(tmp_path):
    """Write a function; returns it as a config names it."""

    def write(body):
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        path = tmp_path / f"tools{len(list(tmp_path.glob('tools*')))}.py"
        path.write_text(f"CALLS = []\ndef tools(prompts, completions, **columns):\n{lines}")
        return f"{path}:tools"

    return write


@pytest.fixture
def draw(policy):
    """Draw from a script; returns the rollout and the sampler."""

    def draw(lines, tools, examples=EXAMPLES, record=True, script=None, **settings):
        settings = RolloutConfig(**({"max_new_tokens": 8, "stop": ["="]} | settings))
        engine = script or Script(policy, lines)
        turns = Turns(engine, Tools(tools, policy), settings.max_turns)
        sampler = CompletionSampler(turns, policy, settings, seed=0)
        return sampler.draw(examples, record=record), sampler

    return draw


def rows(rollout, values):
    """A rollout's (B, T) values as lists without padding."""
    return [row[mask].tolist() for row, mask in zip(values, rollout.completion_mask, strict=True)]


def test_turns_alternate_until_the_tools_have_nothing_to_say(policy, draw, write_tools):
    lines = {"1=": "5=", "23=": "66.", "1=5=7": "0."}
    rollout, sampler = draw(lines, write_tools('return ["7" if c == "5=" else None for c in completions]'))
    assert rows(rollout, rollout.targets) == [[7, 1, 9, 2, 0], [8, 8, 0]]
    assert rows(rollout, rollout.drawn) == [[True, True, False, True, True], [True, True, True]]
    assert rows(rollout, rollout.rollout_logprobs) == [[-7.5, -1.5, 0.0, -2.5, -0.5], [-8.5, -8.5, -0.5]]
    assert rollout.ended.tolist() == [True, True]
    assert completion_texts(policy, rollout) == ["5=70", "66"]
    engine = sampler.engine.engine
    assert [[len(r.token_ids) for r in call] for call in engine.calls] == [[2, 3], [5]]
    assert [[r.max_tokens for r in call] for call in engine.calls] == [[8, 8], [5]]
    names = [request.id for call in engine.calls for request in call]
    assert len(set(names)) == 3
    assert len({request.seed for call in engine.calls for request in call}) == 3


def test_a_turn_is_one_call_of_the_engine_and_one_of_the_tools_with_the_columns(policy, draw, write_tools, tmp_path):
    tools = write_tools(f"""with open({str(tmp_path / "seen")!r}, "a") as file:
    print(prompts, completions, columns, file=file)
return [None if c.endswith("0") else "8" for c in completions]""")
    lines = {"1=": ["5=", "4="], "23=": ["3=", "0."], "1=5=8": "0.", "1=4=8": "6=", "23=3=8": "7=",
             "1=4=86=8": "0.", "23=3=87=8": "0."}  # fmt: skip
    rollout, sampler = draw(lines, tools, [EXAMPLES[0]] * 2 + [EXAMPLES[1]] * 2, max_new_tokens=12)
    assert completion_texts(policy, rollout) == ["5=80", "4=86=80", "3=87=80", "0"]
    assert [len(call) for call in sampler.engine.engine.calls] == [2, 3, 2]
    assert (tmp_path / "seen").read_text().splitlines() == [
        "['1=', '1=', '23=', '23='] ['5=', '4=', '3=', '0'] {'answer': ['a', 'a', 'b', 'b']}",
        "['1=', '1=', '23='] ['5=80', '4=86=', '3=87='] {'answer': ['a', 'a', 'b']}",
        "['1=', '23='] ['4=86=80', '3=87=80'] {'answer': ['a', 'b']}",
    ]


def test_the_last_turn_and_a_turn_that_was_cut_off_are_not_answered(policy, draw, write_tools):
    tools = write_tools('assert all(c.endswith("=") for c in completions)\nreturn ["7"] * len(completions)')
    lines = {"1=": "5=", "1=5=7": "6=", "23=": "2222222222"}
    rollout, _ = draw(lines, tools, max_turns=2)
    assert completion_texts(policy, rollout) == ["5=76=", "22222222"]
    assert rollout.ended.tolist() == [True, False]
    rollout, _ = draw(lines, tools, max_turns=1)
    assert completion_texts(policy, rollout) == ["5=", "22222222"]


@pytest.mark.parametrize(("answer", "fits"), [("7" * 5, True), ("7" * 6, False), ("7" * 60, False), ("", True)])
def test_an_answer_that_leaves_no_room_ends_the_completion_as_cut_off(policy, draw, write_tools, answer, fits):
    rollout, _ = draw({"1=": "5=", f"1=5={answer}": "0."}, write_tools(f"return [{answer!r}]"), EXAMPLES[:1],
                      max_turns=2)  # fmt: skip
    assert completion_texts(policy, rollout) == ["5=" + answer + "0"[: 6 - len(answer)] if fits else "5="]
    assert rollout.ended.tolist() == [fits and not answer]


def test_a_token_of_a_tool_has_no_support(policy, draw, write_tools):
    lines = {"1=": "5=", "23=": "66.", "1=5=74": "0."}
    tools = write_tools('return ["74" if c == "5=" else None for c in completions]')
    rollout, _ = draw(lines, tools, top_k=3)
    lengths = rollout.sampling_mask.lengths.view(rollout.targets.shape)
    assert lengths.tolist() == [[2, 2, 0, 0, 2, 2], [2, 2, 2, 0, 0, 0]]
    plain, _ = draw(lines, tools, record=False)
    assert plain.sampling_mask is None and plain.rollout_logprobs is None
    assert torch.equal(plain.drawn, rollout.drawn)
    assert not rollout.drawn[0, 2:4].any() and rollout.drawn_mask.sum(1).tolist() == [4, 3]


# --- failures -------------------------------------------------------------------------------------------------------


LINES = {"1=": "5=", "23=": "6=", "1=5=7": "1.", "23=6=7": "2."}
TOOLS = """CALLS.append(len(completions))
return ["7" if c.endswith("=") else None for c in completions]"""


def test_what_is_there_outlives_the_engines_absence(policy, draw, write_tools):
    script = Script(policy, LINES)
    original, gone = script.generate, iter([None, 1, None])

    def generate(requests, sampling):
        script.fail_after = next(gone)
        yield from original(requests, sampling)

    script.generate = generate
    rollout, sampler = draw(None, write_tools(TOOLS), script=script)
    assert completion_texts(policy, rollout) == ["5=71", "6=72"]
    # Both first turns, the first of the two second ones, the other one.
    assert [[len(r.token_ids) for r in call] for call in script.calls] == [[2, 3], [5, 6], [6]]
    module = sampler.engine.tools.function.function.__globals__
    assert module["CALLS"] == [2, 2] and not sampler.engine.begun


def test_turns_of_weights_that_are_gone_are_drawn_anew(policy, draw, write_tools):
    """As with rollout.ahead, where the policy is updated between the engine's end and its return."""
    script = Script(policy, LINES)
    original, gone = script.generate, iter([None, 1, None, None])

    def generate(requests, sampling):
        script.fail_after = next(gone)
        if script.fail_after == 1:
            sampler.step += 1
        yield from original(requests, sampling)

    script.generate = generate
    settings = RolloutConfig(max_new_tokens=8, stop=["="])
    sampler = CompletionSampler(Turns(script, Tools(write_tools(TOOLS), policy), 8), policy, settings, 0)
    rollout = sampler.draw(EXAMPLES)
    assert completion_texts(policy, rollout) == ["5=71", "6=72"]
    assert [[len(r.token_ids) for r in call] for call in script.calls] == [[2, 3], [5, 6], [2, 3], [5, 6]]


def test_the_weights_of_every_turn_are_checked(policy, draw, write_tools):
    script = Script(policy, LINES, weights=lambda request: script.version if len(request.token_ids) < 4 else "other")
    with pytest.raises(UserError, match=r"drawn with the weights '.*other.*', expected"):
        draw(None, write_tools(TOOLS), script=script)


def test_turns_of_an_engine_that_lost_its_weights_are_drawn_again(policy, draw, write_tools):
    """All second turns at once: each of them must not count as another failure."""
    lines = LINES | {"45=": "5=", "45=5=7": "3.", "67=": "5=", "67=5=7": "4."}
    examples = [*EXAMPLES, Example("45=", {}, [6, 7, 1], "f:3"), Example("67=", {}, [8, 9, 1], "f:4")]
    script = Script(policy, lines, weights=lambda request: script.version if script.has_them else "default")
    original, lost = script.generate, iter([False, True, False])

    def generate(requests, sampling):
        script.has_them = not next(lost)
        yield from original(requests, sampling)

    script.generate = generate
    rollout, _ = draw(None, write_tools(TOOLS), [replace(e, columns={}) for e in examples], script=script)
    assert completion_texts(policy, rollout) == ["5=71", "6=72", "5=73", "5=74"]
    assert [len(call) for call in script.calls] == [4, 4, 4]


def test_an_engine_that_leaves_a_prompt_out(policy, draw, write_tools):
    script = Script(policy, LINES)
    original = script.generate
    script.generate = lambda requests, sampling: original(requests[:1], sampling)
    with pytest.raises(UserError, match="the engine returned the completions of 1 of 2 prompts"):
        draw(None, write_tools(TOOLS), script=script)
    sampler = CompletionSampler(script, policy, RolloutConfig(max_new_tokens=8, stop=["="]), 0)
    with pytest.raises(UserError, match="the engine returned the completions of 1 of 2 prompts"):
        sampler.draw(EXAMPLES)


# --- what tools may return ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return []", "expected 2 answers, one per completion, got 0"),
        ("return 'ab'", "expected 2 answers, one per completion, got str"),
        ("return [3, None]", r"expected a text or None, got 3 for prompt '1=' \(f:1\), completion '5='"),
        ("return [[{'role': 'tool', 'content': '7'}], None]", "expected a text or None, got .*tool"),
        ("return [None, columns['x']]", r"raised KeyError: 'x' \(.*tools0.py:3\) on one of 2 completions, .* '1='"),
        ("import sys; sys.exit(3)", "raised SystemExit: 3"),
        ("return ['\\ud800', None]", "the tokenizer cannot read the answer .* to prompt '1='"),
    ],
)
def test_what_a_tool_does_wrong_is_told_with_its_sample(draw, write_tools, body, expected):
    with pytest.raises(UserError, match=r"tools0\.py:tools: " + expected):
        draw(LINES, write_tools(body))


def test_a_function_that_is_not_there_is_an_error_at_the_start(policy, tmp_path):
    settings = RolloutConfig(tools=f"{tmp_path}/none.py:f")
    with pytest.raises(UserError, match=r"none\.py: no such file \(rollout\.tools\)"):
        make_sampler(policy, settings, 0)


def test_async_functions_are_awaited(policy, draw, write_tools, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("""import asyncio
async def one(c):
    await asyncio.sleep(0)
    return "7" if c.endswith("=") else None
async def tools(prompts, completions, answer):
    return await asyncio.gather(*map(one, completions))
""")
    rollout, _ = draw(LINES, f"{path}:tools")
    assert completion_texts(policy, rollout) == ["5=71", "6=72"]


# --- chats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [".", "="])
def test_messages_are_written_by_the_chat_template_after_what_the_policy_drew(policy, draw, write_tools, ends):
    """The template drops most of earlier messages; the policy's own tokens stay as they were drawn."""
    policy.tokenizer.chat_template = TEMPLATE
    tools = write_tools("""CALLS.append([[dict(m) for m in c] for c in completions])
return [[{"role": "user", "content": "8"}] if len(c) == 1 else None for c in completions]""")
    middle = "8<eos>=" if ends == "." else "<eos>8<eos>="
    context = "12<eos>="
    lines = {context: "345" + ends, f"{context}345{ends.replace('.', '<eos>')}{middle}": "99."}
    rollout, sampler = draw(lines, tools, CHAT, max_new_tokens=16)
    drawn = [5, 6, 7, 0 if ends == "." else 1]
    added = [10, 0, 1] if ends == "." else [0, 10, 0, 1]
    assert rows(rollout, rollout.targets) == [drawn + added + [11, 11, 0]]
    assert rows(rollout, rollout.drawn) == [[True] * 4 + [False] * len(added) + [True] * 3]
    (text,) = completion_texts(policy, rollout)
    first = {"role": "assistant", "content": "345" + ends.replace(".", "")}
    messages = [first, {"role": "user", "content": "8"}, {"role": "assistant", "content": "99"}]
    assert isinstance(text, Transcript) and text.messages == messages
    assert sampler.engine.tools.function.function.__globals__["CALLS"] == [[[first]], [messages]]


def test_a_text_goes_on_in_a_chats_message(policy, draw, write_tools):
    policy.tokenizer.chat_template = TEMPLATE
    tools = write_tools('return ["7" if c[-1]["content"] == "34=" else None for c in completions]')
    rollout, _ = draw({"12<eos>=": "34=", "12<eos>=34=7": "9."}, tools, CHAT)
    (text,) = completion_texts(policy, rollout)
    assert text == "34=79" and text.messages == [{"role": "assistant", "content": "34=79"}]
    assert rows(rollout, rollout.drawn) == [[True] * 3 + [False] + [True] * 2]


def test_the_templates_arguments_are_those_of_the_prompts(policy, write_tools):
    policy.tokenizer.chat_template = TEMPLATE + "{{ '5' if thinking }}{{ tools | length }}"
    answer = 'return [[{"role": "user", "content": "8"}] if len(c) == 1 else None for c in completions]'
    script = Script(policy, {"12<eos>=": "3.", "12<eos>=3<eos>8<eos>=56": "9."})
    turns = Turns(script, Tools(write_tools(answer), policy, {"thinking": True}), 8)
    sampler = CompletionSampler(turns, policy, RolloutConfig(max_new_tokens=8), 0)
    chat = [replace(CHAT[0], columns={"tools": [{"type": "function"}] * 6})]
    assert completion_texts(policy, sampler.draw(chat)) == ["38=569"]


def test_no_template_sees_none_in_an_answer(policy, draw, write_tools):
    policy.tokenizer.chat_template = TEMPLATE.replace("}}{{ '<eos>'", "}}{{ '5' if 'x' in (m.data or {}) }}{{ '<eos>'")
    tools = write_tools("""first = {"role": "user", "content": None, "name": None, "data": {"x": None}}
return [[first, {"role": "user", "content": "8"}] if len(c) == 1 else None for c in completions]""")
    prompt = [{"role": "user", "content": None}, *CHAT[0].prompt]
    chat = [Example(prompt, {}, [0, *CHAT[0].token_ids], "f:1")]
    lines = {"<eos>12<eos>=": "3.", "<eos>12<eos>=3<eos><eos>8<eos>=": "9."}
    rollout, _ = draw(lines, tools, chat, max_new_tokens=16)
    assert completion_texts(policy, rollout) == ["38=9"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('no tools') }}", r"chat template fails on the answer .*no tools"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves out what precedes the answer",
        ),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            "leaves out a message of the answer",
        ),
    ],
)
def test_templates_that_cannot_write_an_answer(policy, draw, write_tools, template, expected):
    policy.tokenizer.chat_template = template
    with pytest.raises(UserError, match=expected):
        draw({"12<eos>=": "3."}, write_tools('return [[{"role": "tool", "content": "8"}]]'), CHAT)


def test_a_template_may_quote_an_answer(policy, draw, write_tools):
    """As Llama's does with a tool's JSON: the content is not in the text as it is, and not left out."""
    policy.tokenizer.chat_template = TEMPLATE.replace("m.content if", "m.content | replace('9', '34') if")
    tools = write_tools('return [[{"role": "user", "content": "8998"}] if len(c) == 1 else None for c in completions]')
    lines = {"12<eos>=": "3.", "12<eos>=3<eos>834348<eos>=": "5."}
    rollout, _ = draw(lines, tools, CHAT, max_new_tokens=16)
    assert completion_texts(policy, rollout) == ["3834348=5"]


def test_the_code_that_the_documentation_runs(tmp_path):
    (block,) = page_of("docs/rollouts_with_tools.md").of("python")
    namespace = {}
    exec(block.text, namespace)
    texts = ["I take <calc>2 + 3</calc>", "5", "<calc>-7-40</calc>", "<calc>1/0</calc>", "<calc>1+1</calc> so 2"]
    answers = [" = 5\n", None, " = -47\n", " = error\n", None]
    assert namespace["tools"](prompts=["?"] * 5, completions=texts, answer=["a"] * 5) == answers
