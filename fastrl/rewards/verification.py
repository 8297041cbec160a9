"""The reward `math`: mathematical equality, by the library math-verify."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from fastrl.base.dependencies import how_to_install
from fastrl.rewards.answers import (
    final_answer,
    marked_answer,
    quantity,
    references,
    same_answer,
    texts_of,
    undelimited,
    unwrapped,
    without_thoughts,
)
from fastrl.rewards.functions import Completions

_FORMULA = re.compile(r"\\\[.*?\\\]|\\\(.*?\\\)|\$\$.*?\$\$|\$[^$]*\$", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\\?[$€£]?\d[^\s;:!?)]*")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{(?P<unit>[^{}]*)\}(?P<power>\s*\^\s*\{?\d\}?)?$")
# What math-verify drops of an answer as if it were a unit: a letter, a base, a prime.
_DROPPED = re.compile(r"[-+]?[\d.,]+\s*[^\W\d_]+|.*\d_\{?\d+\}?|.*'+")
_ROUNDING = 1e-6  # of decimals: relative, where math-verify's six digits are absolute
_WORDS = "a i of is in to or on at so as by we he it if and not more less over for that which who this because"
_PROSE = set(_WORDS.split())  # words behind a number that say nothing of it
_READ = 2000  # characters at the end of a text in which an unmarked answer is looked for
_LONGEST, _DEEPEST = 300, 15  # characters and nested brackets of an answer that is parsed: 40 brackets take seconds


def math(
    prompts: Sequence[Any],
    completions: Completions,
    *,
    column: str = "answer",
    opened: Sequence[str] | None = None,
    **columns: Any,
) -> list[float]:
    r"""1 if the completion's final answer is mathematically equal to the column's, else 0; by math-verify.

    So `\boxed{\frac{1}{2}}` is 0.5, `x^2+1` is `1+x^2`, and sets, intervals and matrices are compared as such. The
    answer is the one that `exact` finds where the completion marks one (of several the last); else the last formula or
    number of the last sentence or line that has one. What `exact` takes as equal is equal here, and of two numbers it
    alone decides. Where both sides are exact (no decimals), they are compared exactly: math-verify takes 2^-99 for
    2^-98. A `\text{}` unit at the end may be missing on one side. An answer that cannot be parsed is 0.

    column, opened: as in `exact`.

    There is no limit to the time that sympy may take (`9^{9^{9^9}}`): math-verify's own needs signals in the main
    thread, so it is off here, and a config needs reward.workers, whose timeout ends the call. ImportError without
    math-verify.
    """
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        install = how_to_install(["math_verify"])
        raise ImportError(f"fastrl.rewards.math needs math-verify ({error}): {install}") from error
    # Both of their functions warn that there is no timeout, which is meant.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def parsed(answer: str) -> list[Any]:
        if len(answer) > _LONGEST or _depth(answer) > _DEEPEST:
            return []
        # With its `\text{}`: that is how math-verify tells a unit or a word from a product of letters.
        found: list[Any] = parse(
            rf"$\boxed{{{undelimited(answer)}}}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None
        )
        return found

    def equal(given: str, reference: str) -> bool:
        if same_answer(given, reference):
            return True
        if not _comparable(given, reference):
            return False
        answer, expected = parsed(given), parsed(reference)
        return bool(answer) and verify(expected, answer, timeout_seconds=None) and not _differ(expected, answer)

    def is_right(text: str, accepted: list[str]) -> bool:
        if any(same_answer(final_answer(text), reference) for reference in accepted):
            return True
        marked = marked_answer(text)
        answer = _unmarked_answer(text) if marked is None else marked
        return bool(answer) and any(equal(answer, reference) for reference in accepted)

    found = references(columns, column, len(completions))
    texts = texts_of(completions, opened)
    return [float(is_right(text, accepted)) for text, accepted in zip(texts, found, strict=True)]


def _unmarked_answer(text: str) -> str:
    """The last formula or number of the last sentence or line that has one, with the unit behind it, if it has one.

    What precedes that sentence may be withdrawn by it. "" if there is none, or if it says "not".
    """
    text = _FORMULA.sub(lambda formula: formula[0].replace("\n", " "), without_thoughts(text)[-_READ:])
    statements = re.split(r"(?<=[.!?])\s+|\n+", text)
    statement = next((x for x in reversed(statements) if re.search(r"\d|\$|\\[(\[]", x)), "")
    if re.search(r"\bnot\b|n't\b", statement):
        return ""
    # After "the answer is", if it says so: reasons may follow behind a comma.
    statement = re.split(r"\banswer\s+is\b:?|\banswer:", statement, flags=re.IGNORECASE)[-1].strip()
    statement = (
        re.split(r",\s", statement)[0] if re.match(r"\S+,\s(?!or\b|no\b|wait\b)[a-zA-Z]", statement) else statement
    )
    found = [*_FORMULA.finditer(statement), *_NUMBER.finditer(_FORMULA.sub(lambda x: " " * len(x[0]), statement))]
    if not found:
        return ""
    if not re.search(r"\s", statement) or quantity(statement) is not None:
        return statement
    if "\\" in statement and not _FORMULA.search(statement):  # LaTeX without its signs
        return re.split(r"\bis\b|\bequals\b", statement)[-1].strip()
    last = max(found, key=lambda match: match.start())
    answer = undelimited(last[0].rstrip(".,"))
    if last[0][-1] in ".," or quantity(answer) is None:
        return answer
    # A unit belongs to it, and what makes a formula or another number of it. Other words are prose: "18 of them".
    behind = statement[last.end() :]
    if re.search(r"\band (?:a|an|one|two|three)\b", behind):  # "5 and a half"
        return ""
    words = re.findall(r"\\?[^\W\d_]+|[-+*/^=<>×·.,;:]\s*\S*", behind)
    for place, word in enumerate(words[:3]):
        is_variable = len(word) == 1 and place == len(words) - 1  # "10 a", where "10 a day" has an article
        if word[0] in ".,;:" or (word.lower() in _PROSE and not is_variable):
            break
        answer += f" {word}"
    return answer


def _comparable(given: str, reference: str) -> bool:
    """Whether math-verify may compare two answers that are not the same as texts or numbers."""
    numbers = quantity(given), quantity(reference)
    if None not in numbers:
        return False  # numbers that differ
    texts = unwrapped(given), unwrapped(reference)
    if any(_DROPPED.fullmatch(text) for text in texts):
        return False
    units = [_unit(answer) for answer in (given, reference)]
    if "" in units or (None not in units and units[0] != units[1]):
        return False
    if any(sign in given and sign not in reference for sign in (r"\ne", "≠", "<", ">")):
        return False
    left, equals, _ = given.rpartition("=")
    names = re.sub(r"_\{?\w+\}?", "", left)  # an equation for a name, a function or a sum of names is its right side
    return not equals or "=" in reference or not re.search(r"[-^/*!\d]", names)


def _unit(answer: str) -> str | None:
    r"""The `\text{}` unit at the end; None without one, and "" if it is something that is no unit."""
    found = _UNIT.search(undelimited(answer))
    if found is None or not found.start():
        return None
    one = quantity(f"1 {found['unit']}")
    return one.unit + "".join((found["power"] or "").split()) if one and one.value == 1 and one.unit else ""


def _depth(answer: str) -> int:
    """How deep brackets are nested."""
    depth = deepest = 0
    for sign in answer:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _differ(expected: list[Any], answer: list[Any]) -> bool:
    """Whether both, as `parse` gives them, hold numbers that differ: beyond rounding, or if both are exact at all.

    Alone, by their places in a tuple or interval, or in sets where one has a number that is none of the other's.
    """
    from sympy import Basic, Equality, FiniteSet, Float, Interval, N, Tuple

    def differ(a: Any, b: Any) -> bool:
        a, b = (x.rhs if isinstance(x, Equality) else x for x in (a, b))
        if getattr(a, "is_number", False) and getattr(b, "is_number", False):
            if a == b:
                return False
            if a.has(Float) or b.has(Float):
                return bool(abs(N(a) - N(b)) > _ROUNDING * max(abs(N(a)), abs(N(b))))
            return (a.doit() - b.doit()).equals(0) is False
        if isinstance(a, FiniteSet) and isinstance(b, FiniteSet):
            return any(all(differ(x, y) for y in b.args) for x in a.args)
        if isinstance(a, Interval) and isinstance(b, Interval):
            return differ(a.start, b.start) or differ(a.end, b.end)
        return isinstance(a, Tuple) and isinstance(b, Tuple) and any(map(differ, a.args, b.args))

    pairs = [(a, b) for a in expected for b in answer if isinstance(a, Basic) and isinstance(b, Basic)]
    return bool(pairs) and all(differ(a, b) for a, b in pairs)
