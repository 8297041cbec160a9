"""Rewards that compare texts: `exact`, `regex`, `length` and `format`."""

import re
from collections.abc import Sequence
from typing import Any

from fastrl.rewards.answers import Completion, final_answer, references, same_answer, text_of, texts_of

Completions = Sequence[Completion]


def exact(
    prompts: Sequence[Any],
    completions: Completions,
    *,
    column: str = "answer",
    opened: Sequence[str] | None = None,
    **columns: Any,
) -> list[float]:
    r"""1 if the completion's final answer is the column's, else 0.

    The final answer is the last one that the completion marks, by `\boxed{...}`, `####` or `<answer>...</answer>`, else
    all of its text; what precedes `</think>`, or follows a `<think>` that is not closed, is left out. Answers are equal
    as texts (but for spaces, dollar signs, `\text{}`) or as numbers: 1,234 is 1234.00 and 1234 dollars, and not 1234x.
    See `fastrl.rewards.answers`.

    column: the reference, text or a number, of which the final answer is taken too, so that GSM8K's column "answer" and
        MATH's "solution" can be used as they are. A list holds several right answers. Dots reach into nested values.
    opened: of each completion, what its prompt ends with that is the completion's own, `<think>` or nothing; given by
        the trainer.
    """
    found = references(columns, column, len(completions))
    return [
        float(any(same_answer(final_answer(text), reference) for reference in accepted))
        for text, accepted in zip(texts_of(completions, opened), found, strict=True)
    ]


def regex(
    prompts: Sequence[Any], completions: Completions, *, pattern: str, column: str = "answer", **columns: Any
) -> list[float]:
    r"""1 if a pattern matches in the completion, and its group, if it has one, holds the column's answer; else 0.

    pattern: a regular expression of Python's `re`, searched for anywhere (`^` is the text's start; flags as `(?s)`).
        With one group, what it holds in the last match is compared with the column as `exact` does: `Answer: (.+)`.
        More than one group is an error: `(?:...)` groups without capturing.
    column: as in `exact`; read only if the pattern has a group.

    A pattern that backtracks forever on some text stops a run that has no reward.workers.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"pattern: expected a regular expression, got {pattern!r} ({error})") from error
    if compiled.groups > 1:
        raise ValueError(f"pattern: expected at most one group, got {compiled.groups} in {pattern!r}; use (?:...)")
    texts = [text_of(completion) for completion in completions]
    if not compiled.groups:
        return [float(compiled.search(text) is not None) for text in texts]
    rewards = []
    for text, accepted in zip(texts, references(columns, column, len(texts)), strict=True):
        last = None
        for match in compiled.finditer(text):
            last = match[1]
        rewards.append(float(last is not None and any(same_answer(last, reference) for reference in accepted)))
    return rewards


def length(
    prompts: Sequence[Any],
    completions: Completions,
    *,
    minimum: int = 0,
    maximum: int | None = None,
    margin: int = 1,
    **columns: Any,
) -> list[float]:
    """0 for a completion of `minimum` to `maximum` characters; outside, down to -1 at `margin` characters and more.

    The price of both short and long answers, anywhere: `reward.overlong_cache` prices tokens, and only those close to
    rollout.max_new_tokens. Its weight in `reward.weights` is the highest price.

    minimum, maximum: characters, both included; None is no limit.
    margin: over how many characters beyond a limit the reward falls, linearly, from 0 to -1.
    """
    for name, value, least in (("minimum", minimum, 0), ("maximum", maximum, minimum), ("margin", margin, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    if not minimum and maximum is None:
        raise ValueError("minimum, maximum: expected at least one of them")
    rewards = []
    for completion in completions:
        size = len(text_of(completion))
        beyond = max(minimum - size, 0 if maximum is None else size - maximum, 0)
        rewards.append(-min(beyond / margin, 1.0) if beyond else 0.0)
    return rewards


def format(
    prompts: Sequence[Any],
    completions: Completions,
    *,
    template: str = "<think>...</think><answer>...</answer>",
    opened: Sequence[str] | None = None,
    **columns: Any,
) -> list[float]:
    """1 if the completion has the template's form, else 0.

    Each of its tags occurs once, and in its order. `...` stands for any text that is not blank; between tags without
    it, before the first and after the last, there is only space.

    template: tags, and `...` between them; for a final text without tags: `<think>...</think>...`.
    opened: as in `exact`: a `<think>` that the prompt ends with counts as the completion's.
    """
    if not isinstance(template, str):
        raise ValueError(f"template: expected text, got {template!r}")
    gaps = re.split(r"(</?[^<>\s/]+>)", template)
    tags, gaps = gaps[1::2], [gap.strip() for gap in gaps[::2]]
    if not tags or len(set(tags)) < len(tags) or not set(gaps) <= {"", "..."}:
        raise ValueError(f"template: expected different tags, and ... or nothing between them, got {template!r}")
    return [float(_has_form(text, tags, gaps)) for text in texts_of(completions, opened)]


def _has_form(text: str, tags: list[str], gaps: list[str]) -> bool:
    pieces = []
    for tag in tags:
        piece, found, text = text.partition(tag)
        if not found:
            return False
        pieces.append(piece)
    pieces.append(text)
    if any(tag in piece for tag in tags for piece in pieces):
        return False
    return all(bool(piece.strip()) == bool(gap) for piece, gap in zip(pieces, gaps, strict=True))
