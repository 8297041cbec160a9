"""The reward of a countdown problem: 1 for attempts that are all true and end where they hit the target, else 0."""

import re

# The model writes attempts, `3 + 4 = 7 no 3 * 4 = 12 yes`; [0-9], because \d has the digits of other scripts too.
ATTEMPT = re.compile(r"([0-9]{1,4}) ([-+*]) ([0-9]{1,4}) = (-?[0-9]{1,8}) (no|yes)(?: |\Z)")
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def solved(
    prompts: list[str], completions: list[str], numbers: list[list[int]], target: list[int], **_: object
) -> list[float]:
    """Whether a completion is a solution: 1 or 0."""
    return [float(is_solution(*row)) for row in zip(completions, numbers, target, strict=True)]


def is_solution(text: str, numbers: list[int], target: int) -> bool:
    """Whether a text is attempts of which the last one hits the target, and no other.

    An attempt takes two of the (different) numbers; its value and its verdict, `yes` for a hit, must be true. If only
    the last expression counted, a model would unlearn what its other words say, and with them how to search.
    """
    start, hit = 0, False
    while not hit and (attempt := ATTEMPT.match(text, start)):
        start = attempt.end()
        first, sign, second, value, verdict = attempt.groups()
        a, b = int(first), int(second)
        result = OPERATORS[sign](a, b)
        if a == b or not {a, b} <= set(numbers) or int(value) != result or (verdict == "yes") != (result == target):
            return False
        hit = result == target
    return hit and start == len(text) and not text.endswith(" ")
