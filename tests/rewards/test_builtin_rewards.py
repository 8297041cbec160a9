"""The built-in reward functions: what users of GSM8K, MATH and DAPO-Math give and expect, and what is refused."""

import pytest
from answer_pairs import DIFFERENT, MATHEMATICAL, SAME

from fastrl import rewards
from fastrl.rewards.answers import final_answer, last_boxed

BOXED = r"\boxed{%s}"


def score(function, completion, answer="42", **arguments):
    (value,) = function(["?"], [completion], answer=[answer], **arguments)
    return value


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"is \boxed 7$", "7"),
        (r"\boxed{x = \boxed{3}}", r"x = \boxed{3}"),
        (r"\boxed{41} and, cut off, \boxed{4", "41"),
        (r"in \boxed{ write \boxed{42}", "42"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_closed_box(text, answer):
    assert last_boxed(text) == answer


def test_a_text_full_of_boxes_takes_no_longer_than_it_is():
    """Quadratic time would be minutes here."""
    assert last_boxed(r"\boxed{" * 200_000) is None
    assert last_boxed(r"\boxed{" * 200_000 + "}" * 200_000) is not None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\n#### 18", "18"),
        ("#### 18\n#### 19 \nand so on", "19"),
        (r"<think>\boxed{1}</think>The answer is \boxed{2}.", "2"),
        (r"<think>\boxed{1}</think> none", "none"),
        ("<think>t</think><answer> 3 </answer>", "3"),
        (r"<answer>so \boxed{4}</answer> \boxed{5}", "4"),
        (r"<think>perhaps \boxed{5}, or", ""),
        (r"<think>t</think> \boxed{5} <think>or \boxed{6}", "5"),
        ("<answer>6", "<answer>6"),
        ("<answer>6</answer> or <answer>", "6"),
        (" 321 ", "321"),
        ("####", ""),
    ],
)
def test_where_a_final_answer_is_looked_for(text, answer):
    assert final_answer(text) == answer


# --- exact ------------------------------------------------------------------------------------------------------------


#: Of unmarked text `math` takes the last number.
PROSE = ("5 or so", "42 is what I take it to be, I think")


def both_ways(pairs):
    return [pair for a, b in pairs for pair in ((a, b), (b, a)) if pair[1]]  # no reference is empty


@pytest.mark.parametrize(("given", "reference"), both_ways(SAME))
def test_answers_that_are_the_same(given, reference):
    assert score(rewards.exact, BOXED % given, reference) == score(rewards.math, BOXED % given, reference) == 1.0
    assert score(rewards.exact, f"#### {given}", BOXED % reference) == 1.0
    assert score(rewards.exact, given, reference) == score(rewards.math, given, reference) == 1.0


@pytest.mark.parametrize(("given", "reference"), both_ways(MATHEMATICAL))
def test_answers_that_are_mathematically_the_same(given, reference):
    assert score(rewards.exact, BOXED % given, reference) == 0.0
    assert score(rewards.math, BOXED % given, reference) == 1.0


@pytest.mark.parametrize(("given", "reference"), both_ways(DIFFERENT))
def test_answers_that_differ(given, reference):
    assert score(rewards.exact, BOXED % given, reference) == score(rewards.math, BOXED % given, reference) == 0.0
    assert score(rewards.exact, given, f"solution\n#### {reference}") == 0.0
    if given not in PROSE:
        assert score(rewards.math, given, reference) == 0.0


def test_what_a_dataset_may_hold():
    assert score(rewards.exact, "42", 42) == score(rewards.exact, "42.0", 42.0) == 1.0
    assert score(rewards.exact, "b", ["a", "b"]) == 1.0 and score(rewards.exact, "c", ["a", "b"]) == 0.0
    nested = {"reward_model": [{"ground_truth": "34", "style": "rule"}], "column": "reward_model.ground_truth"}
    assert rewards.exact(["?"], [r"Answer: \boxed{34}"], **nested) == [1.0]
    assert rewards.exact(["?"], ["6"], solution=[r"thus \boxed{6}"], column="solution") == [1.0]


def test_of_a_chat_the_last_message_counts():
    chat = [{"role": "assistant", "content": "41"}, {"role": "assistant", "content": "42"}]
    assert rewards.exact(["?"], [chat], answer=["42"]) == [1.0]
    assert rewards.exact(["?"], [[{"role": "assistant", "content": None}]], answer=["42"]) == [0.0]


@pytest.mark.parametrize("function", [rewards.exact, rewards.math])
@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"solution": ["1"]}, 'no column "answer".* solution'),
        ({}, "none"),
        ({"answer": [""]}, "expected an answer, got ''"),
        ({"answer": ["#### "]}, "expected an answer"),
        ({"answer": [None]}, "expected text or a number, got None"),
        ({"answer": [True]}, "got True"),
        ({"answer": [[]]}, "empty list"),
        ({"answer": [{"a": "1"}], "column": "answer.b"}, 'no "b"'),
    ],
)
def test_a_dataset_without_answers_is_an_error(function, columns, expected):
    with pytest.raises(ValueError, match=expected):
        function(["?"], ["1"], **columns)


# --- regex, length, format --------------------------------------------------------------------------------------------


def test_regex_finds_or_compares_its_group():
    assert score(rewards.regex, "so: yes", pattern="(?i)YES$") == 1.0
    assert score(rewards.regex, "yes and no", pattern="yes$") == 0.0
    assert rewards.regex(["?"], ["ab"], pattern="b") == [1.0]  # no column is read
    answer = "Answer: (.+)"
    assert score(rewards.regex, "Answer: 1\nAnswer: 42.0", pattern=answer) == 1.0
    assert score(rewards.regex, "Answer: 42\nAnswer: 1", pattern=answer) == 0.0
    assert score(rewards.regex, "42", pattern=answer) == 0.0
    assert score(rewards.regex, "x", pattern="x(y)?") == 0.0


@pytest.mark.parametrize(("size", "reward"), [(0, -1), (9, -0.1), (10, 0), (20, 0), (21, -0.1), (25, -0.5), (99, -1)])
def test_length_is_priced_outside_of_its_bounds(size, reward):
    assert score(rewards.length, "x" * size, minimum=10, maximum=20, margin=10) == pytest.approx(reward)


FORMS = [
    ("<think>a</think><answer>b</answer>", None, 1),
    ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", None, 1),
    ("<think>a</think>b<answer>c</answer>", None, 0),
    ("<think></think><answer>b</answer>", None, 0),
    ("<think>a</think><answer> </answer>", None, 0),
    ("<think>a</think><answer>b</answer>c", None, 0),
    ("<answer>b</answer><think>a</think>", None, 0),
    ("<think>a</think><think>a</think><answer>b</answer>", None, 0),
    ("<think>a</think><answer>b</answer></answer>", None, 0),
    ("<think>a<answer>b</answer></think>", None, 0),
    ("<think>a</think><answer>b", None, 0),
    ("", None, 0),
    ("<think>a</think>b", "<think>...</think>...", 1),
    ("<think>a</think>", "<think>...</think>...", 0),
    ("a</think><answer>b</answer>", "...</think><answer>...</answer>", 1),
    ("<think>a</think><answer>b</answer>", "...</think><answer>...</answer>", 1),
    ("<a>1</a> <b>2</b><c>3</c>", "<a>...</a><b>...</b><c>...</c>", 1),
]


@pytest.mark.parametrize(("text", "template", "reward"), FORMS)
def test_format(text, template, reward):
    assert score(rewards.format, text, **({} if template is None else {"template": template})) == reward


OPENED = ["<think>\n"]


@pytest.mark.parametrize("function", [rewards.exact, rewards.math])
def test_a_thought_that_the_prompt_opened_holds_no_answer_until_it_ends(function):
    cut_off = r"so it is \boxed{42}, or"
    assert score(function, cut_off) == 1.0
    assert score(function, cut_off, opened=OPENED) == 0.0
    assert score(function, r"so it is 41.</think>It is \boxed{42}", opened=OPENED) == 1.0
    chat = [{"role": "assistant", "content": "42"}]
    assert function(["?"], [chat], answer=["42"], opened=OPENED) == [0.0]


def test_what_the_prompt_opened_counts_for_the_format():
    text = "a</think><answer>b</answer>"
    assert score(rewards.format, text) == 0.0
    assert score(rewards.format, text, opened=OPENED) == 1.0
    assert score(rewards.format, f"<think>{text}", opened=OPENED) == 0.0  # twice
    assert score(rewards.format, text, opened=OPENED, template="...</think><answer>...</answer>") == 1.0
    assert score(rewards.format, "</think><answer>b</answer>", opened=OPENED) == 0.0


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (rewards.exact, {"column": 5}, "column: expected a column's name, got 5"),
        (rewards.regex, {"pattern": "("}, r"pattern: expected a regular expression, got '\('"),
        (rewards.regex, {"pattern": "(a)(b)"}, "at most one group, got 2"),
        (rewards.regex, {"pattern": 3}, "pattern: "),
        (rewards.length, {}, "at least one"),
        (rewards.length, {"minimum": -1}, "minimum: .* 0, got -1"),
        (rewards.length, {"minimum": 5, "maximum": 4}, "maximum: .* 5, got 4"),
        (rewards.length, {"maximum": 4, "margin": 0}, "margin: "),
        (rewards.length, {"maximum": 4.0}, "maximum: .* integer"),
        (rewards.format, {"template": "..."}, "template: "),
        (rewards.format, {"template": "<a>...<a>"}, "different tags"),
        (rewards.format, {"template": "<a>text</a>"}, "template: "),
        (rewards.format, {"template": 1}, "template: "),
    ],
)
def test_wrong_arguments_are_refused_before_there_are_completions(function, arguments, expected):
    with pytest.raises(ValueError, match=expected):
        function([], [], **arguments)


# --- math -------------------------------------------------------------------------------------------------------------


EQUAL = [
    (r"\boxed{(4, 3)} no, \boxed{(3,4)}", "(3,4)"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{10\text{ cm}^2}", "10"),
    (r"\boxed{\frac{1}{2}\text{ hour}}", "0.5"),
    (r"\boxed{C}", r"\text{(C)}"),
    ("<think>9</think><answer>$\\frac{10}{2}$</answer>", "5"),
    ("The final answer is $\\frac{10}{2}$. I hope it is correct.", "5"),
    ("she has 72 apples", "#### 72"),
    ("It takes 5 minutes, I think", "5 minutes"),
    ("She has 5 million.", "5000000"),
    ("so \\[\n42\n\\]\nI hope it is correct.", "42"),
    ("41? No. The answer is 42, as 6 times 7.", "42"),
]
UNEQUAL = [
    ("She has 5 million.", "5"),
    ("It takes 5 minutes, I think", "5 hours"),
    ("That is 5%.", "5"),
    ("It makes 10 a (or so).", "10 b"),
    ("The answer is 42. Wait, maybe 43", "42"),
    ("The answer is 42\nWait, maybe 43", "42"),
    (r"\boxed{5} or \boxed{6}", "5"),
    (r"\boxed{5, 6}", "5"),
    (r"\boxed{\text{neve}}", r"\text{even}"),
    (r"\boxed{}", "5"),
    (r"\boxed{\frac{1}{", "5"),
    (r"\boxed{" + "(" * 250 + "}", "5"),
    (r"\boxed{" + "9" * 5000 + "}", "5"),
    ("", "5"),
    ("no number", "5"),
    ("<think>that is 5", "5"),
]


@pytest.mark.parametrize(("completion", "reference"), EQUAL)
def test_what_is_mathematically_equal(completion, reference):
    assert score(rewards.math, completion, reference) == 1.0


@pytest.mark.parametrize(("completion", "reference"), UNEQUAL)
def test_what_is_not_equal_or_no_mathematics(completion, reference):
    assert score(rewards.math, completion, reference) == 0.0
