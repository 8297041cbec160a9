"""Reward functions: TRL's signature, None, and errors that name function, file and index."""

from dataclasses import replace

import pytest
from doc_pages import page_of
from mistakes import error_of

from fastrl.base.errors import UserError
from fastrl.rewards.loading import forget_files, load_reward
from fastrl.training.data.examples import Example

EXAMPLES = [Example("1=", {"answer": "1"}, [1]), Example("2=", {"answer": "2"}, [2])]


@pytest.fixture
def load(tmp_path):
    def load(body):
        forget_files()
        (tmp_path / "mine.py").write_text(body)
        return load_reward(f"{tmp_path / 'mine.py'}:reward")

    return load


def returning(value):
    return f"def reward(prompts, completions, **columns):\n    return {value}\n"


def test_it_is_called_as_trl_calls_it(load):
    reward = load(
        "def reward(prompts, completions, answer):\n"
        "    assert prompts == ['1=', '2=']\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    assert reward(EXAMPLES, ["1", "3"]) == [1.0, 0.0]


def test_chat_prompts_get_completions_as_messages(load):
    reward = load("def reward(prompts, completions):\n    return [c[0]['content'] == 'hi' for c in completions]\n")
    assert reward([Example([{"role": "user", "content": "?"}], {}, [1])], ["hi"]) == [1.0]


def test_what_the_prompt_opened_is_passed_to_functions_that_name_it(load):
    rows = [Example("1=", {}, [1], "", "<think>\n"), Example("2=", {}, [2])]
    named = load("def reward(prompts, completions, opened, **columns):\n    return [len(x) for x in opened]\n")
    assert named(rows, ["a", "b"]) == [8.0, 0.0]
    others = load("def reward(prompts, completions, **columns):\n    return [len(columns)] * 2\n")
    assert others(rows, ["a", "b"]) == [0.0, 0.0]
    exact = load_reward("fastrl.rewards.exact")
    rows = [replace(example, columns={"answer": "5"}) for example in rows]
    assert exact(rows, ["5", "5"]) == [0.0, 1.0]
    with pytest.raises(UserError, match="has no parameter 'opened'"):
        load_reward("fastrl.rewards.exact", {"opened": [""]})


def test_the_function_of_the_page_on_data_reads_what_its_config_gives_it(tmp_path):
    config, function = (block.text for block in page_of("docs/data.md").blocks[:2])
    assert "system_prompt" in config  # so the prompt is one of messages
    (tmp_path / "reward.py").write_text(function)
    rows = [Example([{"role": "user", "content": "?"}], {"answer": "6 * 200\n#### 1,200"}, [1])] * 3
    reward = load_reward(f"{tmp_path / 'reward.py'}:last_number")
    assert reward(rows, ["#### 1200", "#### 12", "1200"]) == [1.0, 0.0, 0.0]


NUMPY, TORCH = "__import__('numpy')", "__import__('torch')"


@pytest.mark.parametrize(
    "value",
    [
        "[1, None]",
        "(True, None)",
        f"{NUMPY}.array([1.0, None])",
        f"[{NUMPY}.bool_(True), None]",
        f"[{NUMPY}.array(1), None]",
        f"[{TORCH}.tensor(1.0), None]",
        f"[{TORCH}.tensor(True), None]",
        "[__import__('decimal').Decimal('1.0'), None]",
        "[__import__('fractions').Fraction(2, 2), None]",
    ],
)
def test_numbers_and_none_are_rewards(load, value):
    assert load(returning(value))(EXAMPLES, ["a", "b"]) == [1.0, None]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1.0", "expected a list of 2 rewards, got float"),
        ("None", "got NoneType"),
        ("'ab'", "got str"),
        ("[1.0]", "expected 2 rewards, one per completion, got 1"),
        ("[0.0, 'high']", "reward 1 must be a finite number or None, got 'high' (str); its prompt is '2='"),
        ("[float('nan'), 0]", "reward 0 must be a finite number or None, got nan"),
        ("[0, float('inf')]", "reward 1 must be"),
        ("[0, '1.0']", "reward 1 must be a finite number or None, got '1.0' (str)"),
        ("[0, 1j]", "reward 1 must be"),
        (f"[0, {NUMPY}.array([1.0])]", "reward 1 must be"),
        (f"[0, {TORCH}.tensor([1.0])]", "reward 1 must be"),
        (f"[0, {TORCH}.tensor(1j)]", "reward 1 must be"),
        ("[0, __import__('decimal').Decimal('NaN')]", "reward 1 must be"),
        (f"[0, {NUMPY}.array('5')]", "reward 1 must be"),
        (f"[0, {NUMPY}.complex128(1)]", "reward 1 must be"),
        ("[10 ** 400, 0]", "reward 0 must be"),
        ("[0, 1 / 0]", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_bad_result_names_function_file_and_index(load, value, expected):
    error = error_of(load(returning(value)), EXAMPLES, ["a", "b"])
    assert "mine.py:reward: " in error and expected in error


def test_a_file_is_run_once_for_all_its_functions(tmp_path):
    (tmp_path / "mine.py").write_text(
        "seen = []\ndef reward(prompts, completions, **columns):\n    seen.append(1)\n    return [len(seen)] * 2\n"
        "def tool(prompts, completions, **columns):\n    return [len(seen)] * 2\n"
    )
    reward, tool = (load_reward(f"{tmp_path / 'mine.py'}:{name}") for name in ("reward", "tool"))
    assert reward(EXAMPLES, ["a", "b"]) == tool(EXAMPLES, ["a", "b"]) == [1.0, 1.0]
    (tmp_path / "link").symlink_to(tmp_path)
    linked = load_reward(f"{tmp_path / 'link' / 'mine.py'}:reward")
    assert linked(EXAMPLES, ["a", "b"]) == [2.0, 2.0]
    forget_files()
    again = load_reward(f"{tmp_path / 'mine.py'}:reward")
    assert again(EXAMPLES, ["a", "b"]) == [1.0, 1.0]


def test_an_exception_inside_is_located(load):
    with pytest.raises(UserError, match=r"KeyError.*mine\.py:2"):
        load(returning("columns['solution']"))(EXAMPLES, ["a", "b"])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def score():\n    return []\n", "has no function 'reward'; it has score"),
        ("def reward(:\n", ":1: "),
        ("import nowhere\n", r"importing it raised ModuleNotFoundError.*nowhere.*mine\.py:1"),
        ("raise SystemExit(3)\n", r"importing it raised SystemExit: 3 \(.*mine\.py:1\)"),
        ("\0", "source code .*null"),
    ],
)
def test_functions_that_cannot_be_loaded(load, body, expected):
    with pytest.raises(UserError, match=rf"mine\.py.*{expected}"):
        load(body)


def asynchronous(body):
    return f"import asyncio, sys\nasync def one(c):\n    await asyncio.sleep(0)\n    {body}\n" + (
        "async def reward(prompts, completions, **columns):\n"
        "    return await asyncio.gather(*(one(c) for c in completions))\n"
    )


def test_an_async_function_is_awaited_with_all_completions_and_keeps_its_loop(load):
    reward = load(
        "import asyncio\nloops = set()\n"
        "async def reward(prompts, completions, **columns):\n"
        "    loops.add(asyncio.get_running_loop())\n"
        "    met = asyncio.Barrier(len(completions))\n"
        "    await asyncio.gather(*(met.wait() for _ in completions))\n"
        "    return [len(loops)] * len(completions)\n"
    )
    assert reward(EXAMPLES, ["a", "b"]) == reward(EXAMPLES, ["a", "b"]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 1 / (c != 'b')", r"raised ZeroDivisionError.*mine\.py:4\) on sample 1: prompt '2='"),
        ("sys.exit(3) if c == 'b' else None", r"raised SystemExit: 3 .*mine\.py:4\) on sample 1: prompt '2='"),
        ("raise asyncio.CancelledError", "raised CancelledError"),
        ("return 'x'", "reward 0 must be a finite number or None, got 'x'"),
    ],
)
def test_what_goes_wrong_in_an_async_function_is_located(load, body, expected):
    reward = load(asynchronous(body))
    for _ in range(2):  # and its loop goes on
        with pytest.raises(UserError, match=expected):
            reward(EXAMPLES, ["a", "b"])


def test_built_in_functions_have_dotted_names_and_arguments():
    assert load_reward("fastrl.rewards.exact")(EXAMPLES, ["1", "3"]) == [1.0, 0.0]
    reward = load_reward("fastrl.rewards.regex", {"pattern": "is (.*)"})
    assert reward.name == "regex" and reward(EXAMPLES, ["is 1", "2"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        ("fastrl.rewards.right", {}, r"right is none of .* fastrl\.rewards\.exact"),
        ("fastrl.rewards.regex", {}, r"reward\.arguments\.regex: .*'pattern'"),
        ("fastrl.rewards.regex", {"patern": "a"}, r"reward\.arguments\.regex: .*no parameter 'patern'"),
        ("fastrl.rewards.regex", {"pattern": "("}, r"reward\.arguments\.regex: pattern: expected a regular"),
        ("fastrl.rewards.exact", {"prompts": "a"}, "no parameter 'prompts'"),
    ],
)
def test_built_in_functions_that_cannot_be_had(source, arguments, expected):
    with pytest.raises(UserError, match=expected):
        load_reward(source, arguments)


def test_an_argument_wins_over_a_column(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(prompts, completions, answer):\n    return [answer] * 2\n")
    assert load_reward(f"{tmp_path / 'mine.py'}:reward", {"answer": 7})(EXAMPLES, ["", ""]) == [7.0, 7.0]


@pytest.mark.parametrize("source", ["mine.py", "mine.py:", "mine.txt:reward", "reward", "nowhere.py:reward"])
def test_a_file_that_is_not_named_or_not_there(source):
    with pytest.raises(UserError, match="no such file" if "nowhere" in source else r'"path/to/file\.py:function"'):
        load_reward(source)
