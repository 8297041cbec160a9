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
    without_thoughts,
)
from fastrl.rewards.functions import Completions

_FORMULA = re.compile(r"\\\[.*?\\\]|\\\(.*?\\\)|\$\$.*?\$\$", re.DOTALL)
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{(?P<unit>[^{}]*)\}(?P<power>\s*\^\s*\{?\d\}?)?$")
_LONGEST = 300  # characters of an answer that is parsed: a thousand brackets take seconds, and no reference is as long


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
    answer is the one that `exact` finds where the completion marks one (of several the last); else what math-verify
    finds in the last sentence or line that has a number or a formula. What `exact` takes as equal is equal here, and of
    two numbers it alone decides. Where both sides are exact (no decimals), they are compared exactly: math-verify takes
    2^-99 for 2^-98. `\text{}` units at the end may be missing on one side. An answer that cannot be parsed is 0.

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
        if len(answer) > _LONGEST:
            return []
        # With its `\text{}`: that is how math-verify tells a unit or a word from a product of letters.
        found: list[Any] = parse(
            rf"$\boxed{{{undelimited(answer)}}}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None
        )
        return found

    def equal(reference: str, given: str, answer: list[Any]) -> bool:
        if quantity(given) is not None and quantity(reference) is not None:
            return same_answer(given, reference)
        units = _unit(reference), _unit(given)
        if None not in units and units[0] != units[1]:
            return False
        expected = parsed(reference)
        return bool(verify(expected, answer, timeout_seconds=None)) and not _exactly_different(expected, answer)

    def is_right(text: str, accepted: list[str]) -> bool:
        if any(same_answer(final_answer(text), reference) for reference in accepted):
            return True
        marked = marked_answer(text)
        given = _last_statement(text) if marked is None else marked
        answer = parse(given[-_LONGEST:], parsing_timeout=None) if marked is None else parsed(given)
        if marked is None and answer:
            given = _with_what_follows(given, str(answer[-1]))
        return bool(answer) and any(equal(reference, given, answer) for reference in accepted)

    found = references(columns, column, len(completions))
    texts = texts_of(completions, opened)
    return [float(is_right(text, accepted)) for text, accepted in zip(texts, found, strict=True)]


def _last_statement(text: str) -> str:
    """The last sentence or line, outside of thoughts, with a number or a formula: what precedes it may be withdrawn."""
    text = _FORMULA.sub(lambda formula: formula[0].replace("\n", " "), without_thoughts(text))
    statements = re.split(r"(?<=[.!?])\s+|\n+", text)
    return next((x for x in reversed(statements) if re.search(r"\d|\$|\\[(\[]", x)), "")


def _with_what_follows(statement: str, found: str) -> str:
    """What was found in a statement, up to the next punctuation mark: "5" in "she has 5 million." is not 5."""
    at = statement.rfind(found)
    return found if at < 0 else re.split(r"[.,;:!?)](?:\s|$)|\$|\\[)\]]", statement[at:])[0].strip()


def _unit(answer: str) -> str | None:
    found = _UNIT.search(undelimited(answer))
    return None if found is None else "".join(found[0].split())


def _exactly_different(expected: list[Any], answer: list[Any]) -> bool:
    """Whether both, as `parse` gives them, are exact and differ: numbers, or a number in a set, tuple or interval."""
    from sympy import Basic, Equality, FiniteSet, Float, Interval, Tuple

    def differ(a: Any, b: Any) -> bool:
        a, b = (x.rhs if isinstance(x, Equality) else x for x in (a, b))
        if getattr(a, "is_number", False) and getattr(b, "is_number", False):
            if a == b or a.has(Float) or b.has(Float):
                return False
            return (a.doit() - b.doit()).equals(0) is False
        ours, others = ((x.start, x.end) if isinstance(x, Interval) else getattr(x, "args", ()) for x in (a, b))
        containers = (FiniteSet, Interval, Tuple)
        both = isinstance(a, containers) and isinstance(b, containers)
        return both and any(all(differ(x, y) for y in others) for x in ours)

    pairs = [(a, b) for a in expected for b in answer if isinstance(a, Basic) and isinstance(b, Basic)]
    return bool(pairs) and all(differ(a, b) for a, b in pairs)
