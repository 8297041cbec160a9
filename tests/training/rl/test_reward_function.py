"""Reward functions: TRL's signature, None, and errors that name function, file and index."""

import pytest

from fastrl.base.errors import UserError
from fastrl.training.common.data import Example
from fastrl.training.common.reward import load_reward

EXAMPLES = [Example("1=", {"answer": "1"}, [1]), Example("2=", {"answer": "2"}, [2])]


@pytest.fixture
def load(tmp_path):
    def load(body, name="reward"):
        (tmp_path / "mine.py").write_text(body)
        return load_reward(f"{tmp_path / 'mine.py'}:{name}")

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
    with pytest.raises(UserError) as error:
        load(returning(value))(EXAMPLES, ["a", "b"])
    assert "mine.py:reward: " in str(error.value)
    assert expected in str(error.value)


def test_an_exception_inside_is_located(load):
    with pytest.raises(UserError, match=r"KeyError.*mine\.py:2"):
        load(returning("columns['solution']"))(EXAMPLES, ["a", "b"])


def test_functions_that_cannot_be_loaded(load, tmp_path):
    with pytest.raises(UserError, match=r"mine\.py: has no function 'score'; it has reward"):
        load(returning("[]"), name="score")
    with pytest.raises(UserError, match=r"mine\.py:1: "):
        load("def reward(:\n")
    with pytest.raises(UserError, match=r"mine\.py: importing it raised ModuleNotFoundError.*nowhere.*mine\.py:1"):
        load("import nowhere\n")
    with pytest.raises(UserError, match=r"mine\.py: importing it raised SystemExit: 3 \(.*mine\.py:1\)"):
        load("raise SystemExit(3)\n")
    with pytest.raises(UserError, match=r"mine\.py: source code .*null"):
        load("\0")
    with pytest.raises(
        UserError, match=r"mine\.py: reward is declared with async def, expected a function that returns"
    ):
        load("async def reward(**columns):\n    return []\n")
    with pytest.raises(UserError, match="no such file"):
        load_reward(f"{tmp_path}/nowhere.py:reward")
    for source in ("mine.py", "mine.py:", "mine.txt:reward", "reward"):
        with pytest.raises(UserError, match=r'expected "path/to/file\.py:function"'):
            load_reward(source)
