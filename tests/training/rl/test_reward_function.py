"""Reward functions: TRL's signature, None, and errors that name function, file and index."""

import pytest
from mistakes import error_of

from fastrl.base.errors import UserError
from fastrl.training.common.data import Example
from fastrl.training.common.reward import load_reward

EXAMPLES = [Example("1=", {"answer": "1"}, [1]), Example("2=", {"answer": "2"}, [2])]


@pytest.fixture
def load(tmp_path):
    def load(body):
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


@pytest.mark.parametrize("value", ["[1, None]", "(True, None)", "__import__('numpy').array([1.0, None])"])
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
        ("[0, 1 / 0]", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_bad_result_names_function_file_and_index(load, value, expected):
    error = error_of(load(returning(value)), EXAMPLES, ["a", "b"])
    assert "mine.py:reward: " in error and expected in error


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
        ("async def reward():\n    return []\n", "is declared with async def, expected a function that returns"),
    ],
)
def test_functions_that_cannot_be_loaded(load, body, expected):
    with pytest.raises(UserError, match=rf"mine\.py.*{expected}"):
        load(body)


@pytest.mark.parametrize("source", ["mine.py", "mine.py:", "mine.txt:reward", "reward", "nowhere.py:reward"])
def test_a_file_that_is_not_named_or_not_there(source):
    with pytest.raises(UserError, match="no such file" if "nowhere" in source else r'"path/to/file\.py:function"'):
        load_reward(source)
