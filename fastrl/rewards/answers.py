"""The final answer in a text, a dataset's reference answer, and when two answers are equal as texts."""

import re
from collections.abc import Sequence
from typing import Any

from fastrl.rewards.quantities import Quantity, quantity_of

# A text, or the messages of a chat.
Completion = str | Sequence[dict[str, Any]]

_WRAPPER = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
_BRACES = re.compile(r"\\boxed\s+(?P<bare>[^\\{}$\s]+)|(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_LONGEST = 1000  # characters: what is longer is compared as it is


def text_of(completion: Completion) -> str:
    """A completion's text: of messages the last one's."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def texts_of(completions: Sequence[Completion], opened: Sequence[str] | None) -> list[str]:
    """The completions' texts, each after what its prompt opened (`<think>`), if anything."""
    texts = [text_of(completion) for completion in completions]
    return texts if opened is None else [start + text for start, text in zip(opened, texts, strict=True)]


def without_thoughts(text: str) -> str:
    """What follows the last `</think>`, up to a `<think>` that is not closed: such a thought was cut off."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def marked_answer(text: str) -> str | None:
    r"""The answer that a text marks as its last; None if it marks none.

    Thoughts are left out (`without_thoughts`). Then it is what the last `<answer>...</answer>` holds, if there is one;
    in that or in the text, what the last `\boxed{...}` holds (braces may be nested), else what follows the last `####`
    on its line. A `\boxed{` that is not closed (a completion that was cut off) marks nothing.
    """
    text = without_thoughts(text)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    tagged = text[start + len("<answer>") : end] if start >= 0 else None
    body = text if tagged is None else tagged
    boxed = last_boxed(body)
    if boxed is not None:
        return boxed
    _, mark, tail = body.rpartition("####")
    if mark:
        return (tail.strip().splitlines() or [""])[0].strip()
    return None if tagged is None else tagged.strip()


def last_boxed(text: str) -> str | None:
    r"""What the last closed `\boxed{...}` or `\fbox{...}` in a text holds, not counting those inside of one.

    `\boxed 5`, without braces, is 5 too.
    """
    open_braces: list[tuple[int, int] | None] = []  # of a box: where it starts, and where its text does
    boxes: list[tuple[int, int, int]] = []  # and where that ends
    for token in _BRACES.finditer(text):
        if token["bare"]:
            boxes.append((token.start(), *token.span("bare")))
        elif token["box"]:
            open_braces.append((token.start(), token.end()))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces and (box := open_braces.pop()) is not None:
            while boxes and boxes[-1][0] > box[0]:  # it is inside of this one
                boxes.pop()
            boxes.append((*box, token.start()))
    return text[boxes[-1][1] : boxes[-1][2]] if boxes else None


def final_answer(text: str) -> str:
    """The marked answer, or else the whole text without thoughts, without surrounding space."""
    marked = marked_answer(text)
    return without_thoughts(text).strip() if marked is None else marked.strip()


def references(columns: dict[str, Any], column: str, count: int) -> list[list[str]]:
    r"""Each completion's accepted answers: the final answer in its column's value, or in each of a list's.

    A name with dots reaches into nested values ("reward_model.ground_truth"). So GSM8K's solution that ends in "####
    42", a worked solution with `\boxed{42}`, "42" and 42 are all "42". Raises ValueError for no such column or value,
    an empty text, and what is neither text nor a number.
    """
    if not isinstance(column, str):
        raise ValueError(f"column: expected a column's name, got {column!r}")
    first, *rest = column.split(".")
    if not count:
        return []
    if first not in columns:
        raise ValueError(f'no column "{first}" to compare with; there are {", ".join(columns) or "none"}')
    found = []
    for value in columns[first]:
        for name in rest:
            if not isinstance(value, dict) or name not in value:
                raise ValueError(f'column "{column}": no "{name}" in {value!r}')
            value = value[name]
        values = value if isinstance(value, list | tuple) else [value]
        answers = [_reference(item, column) for item in values]
        if not answers:
            raise ValueError(f'column "{column}": expected an answer, got an empty list')
        found.append(answers)
    return found


def _reference(value: Any, column: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f'column "{column}": expected text or a number, got {value!r}')
    answer = final_answer(str(value))
    if not answer:
        raise ValueError(f'column "{column}": expected an answer, got {value!r}')
    return answer


def same_answer(answer: str, reference: str) -> bool:
    r"""Whether two answers are the same text, or the same number.

    Without `$...$` and `\(...\)` around them, `\text{}`, spaces, a final full stop, and `\left`, `\right`, `\dfrac` for
    `\frac`; the case of letters counts. Numbers are compared by their exact values (1,234 = 1234.0 = 1.234e3, 5% =
    0.05). A unit, a currency or "x =" may be missing on one side; where both have one, it is the same
    (`fastrl.rewards.quantities`).
    """
    if max(len(answer), len(reference)) > _LONGEST:
        return answer.strip() == reference.strip()
    pair = quantity(answer), quantity(reference)
    if pair[0] is not None and pair[1] is not None:
        return pair[0].same(pair[1])
    return _normal(answer) == _normal(reference)


def quantity(answer: str) -> Quantity | None:
    """The number that an answer is, with its unit; None for any other."""
    return quantity_of(unwrapped(answer))


def unwrapped(answer: str) -> str:
    r"""An answer without what `undelimited` leaves out, and with the text in `\text{}` for that."""
    return re.sub(r"~|\\[ ;:]|\\,(?!\d)", " ", _WRAPPER.sub(r" \1 ", undelimited(answer))).strip()


def undelimited(answer: str) -> str:
    """An answer without a formula's signs around it, Markdown's emphasis, and a final full stop; "-" for U+2212."""
    text = answer.replace("\N{MINUS SIGN}", "-").strip().removesuffix(".").strip()
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : len(text) - len(right)].strip()
    return text.strip("*`").removesuffix(".").strip()


def _normal(answer: str) -> str:
    text = re.sub(r"\\[,!]", " ", re.sub(r"\\left(?![a-z])|\\right(?![a-z])", "", unwrapped(answer)))
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text)
    return re.sub(r"(?<!\d) | (?!\d)", "", " ".join(text.split()))  # "1 1/2" is not 11/2
