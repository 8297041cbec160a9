"""The reward of a countdown problem: 1 for an expression of all the numbers that equals the target, else 0."""

import ast
import re

# What the model writes: attempts with their values, `3 + 4 - 2 = 5 ; 3 * 4 - 2 = 10`. The last one is the answer.
ARITHMETIC = re.compile(r"[0-9+\-*() ]{1,80}")


def solved(
    prompts: list[str], completions: list[str], numbers: list[list[int]], target: list[int], **_: object
) -> list[float]:
    """Whether the last attempt uses each number exactly once and equals the target: 1 or 0.

    The value that the model writes behind its expression does not count.
    """
    answers = [completion.rpartition(";")[2].partition("=")[0] for completion in completions]
    return [float(is_solution(*row)) for row in zip(answers, numbers, target, strict=True)]


def is_solution(text: str, numbers: list[int], target: int) -> bool:
    """Whether a text is an expression of +, - and * that uses exactly these numbers and equals the target."""
    if not ARITHMETIC.fullmatch(text):  # which also bounds the work: nothing else is parsed
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return False
    used: list[int] = []
    value = evaluate(tree, used)
    return value == target and sorted(used) == sorted(numbers)


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
