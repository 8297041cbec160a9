"""The reward of a countdown problem: 1 for an expression of its numbers that equals the target, else 0."""

import ast
import re
from collections import Counter

# The model writes attempts, `3 + 4 - 2 = 5 low 3 * 4 - 2 = 10 yes`. The last one is the answer.
VERDICT = re.compile(r"\b(?:no|yes)\b")
ARITHMETIC = re.compile(r"[0-9+\-*() ]{1,80}")


def solved(
    prompts: list[str], completions: list[str], numbers: list[list[int]], target: list[int], **_: object
) -> list[float]:
    """Whether the last attempt uses each number at most once and equals the target: 1 or 0.

    What the model says of the attempt, its value and how that compares, does not count.
    """
    attempts = [[part for part in VERDICT.split(completion) if part.strip()] for completion in completions]
    answers = [parts[-1].partition("=")[0] if parts else "" for parts in attempts]
    return [float(is_solution(*row)) for row in zip(answers, numbers, target, strict=True)]


def is_solution(text: str, numbers: list[int], target: int) -> bool:
    """Whether a text is an expression of +, - and * of some of these numbers, each once, that equals the target."""
    if not ARITHMETIC.fullmatch(text):  # which also bounds the work: nothing else is parsed
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return False
    used: list[int] = []
    value = evaluate(tree, used)
    return value == target and len(used) > 1 and not Counter(used) - Counter(numbers)


def evaluate(node: ast.expr, used: list[int]) -> int | None:
    """The value of a tree of sums, differences and products of whole numbers, which are appended to `used`.

    None for any other tree.
    """
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return number
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = evaluate(left, used), evaluate(right, used)
            if a is None or b is None:
                return None
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
    return None
