"""The reward `math`: mathematical equality, by the library math-verify."""

import logging
from collections.abc import Sequence
from typing import Any

from fastrl.base.dependencies import how_to_install
from fastrl.rewards.answers import marked_answer, references, same_answer, text_of, undelimited, without_thoughts
from fastrl.rewards.functions import Completions

_LONGEST = 300  # characters of an answer that is parsed: a thousand brackets take seconds, and no reference is as long


def math(prompts: Sequence[Any], completions: Completions, *, column: str = "answer", **columns: Any) -> list[float]:
    r"""1 if the completion's final answer is mathematically equal to the column's, else 0; by math-verify.

    So `\boxed{\frac{1}{2}}` is 0.5, `x^2+1` is `1+x^2`, and sets, intervals, matrices and percentages are compared as
    such. The answer is the one that `exact` finds where the completion marks one (of several the last); else what
    math-verify finds in its text ("the answer is $...$", the last formula or number). What `exact` takes as equal is
    equal here. An answer that cannot be parsed is compared as text, and 0 if that differs.

    column: as in `exact`.

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

    def is_right(text: str, accepted: list[str]) -> bool:
        marked = marked_answer(text)
        if marked is not None and any(same_answer(marked, reference) for reference in accepted):
            return True
        if marked is None:
            answer = parse(without_thoughts(text)[-_LONGEST:], parsing_timeout=None)
        else:
            answer = parsed(marked)
        return bool(answer) and any(verify(parsed(reference), answer, timeout_seconds=None) for reference in accepted)

    found = references(columns, column, len(completions))
    return [float(is_right(text_of(text), accepted)) for text, accepted in zip(completions, found, strict=True)]
