"""Writes this example's problems, tokenizer and demonstrations: nothing is downloaded.

A problem is three different numbers from 1 to 10 and a target from 1 to 99 that an expression of all three reaches.
train.jsonl and eval.jsonl, which share no problem, and tokenizer/ are committed. The demonstrations of the warm start,
runs/countdown/sft.jsonl, are not: run this first.
"""

import ast
import itertools
import json
import random
from functools import cache
from pathlib import Path

from reward import evaluate
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
RUNS = HERE.parent.parent / "runs" / "countdown"
LARGEST = 99  # the largest number with a token of its own
HELD_OUT = 200
DEMONSTRATIONS, ATTEMPTS = 9600, 10

Numbers = tuple[int, ...]


def main() -> None:
    """Write train.jsonl, eval.jsonl and tokenizer/ beside this file, and the demonstrations under runs/countdown."""
    generator = random.Random(0)
    chosen = itertools.combinations(range(1, 11), 3)
    problems = [(numbers, target) for numbers in chosen for target in expressions(numbers) if target > 0]
    generator.shuffle(problems)
    held_out, train = problems[:HELD_OUT], problems[HELD_OUT:]
    write(HERE / "eval.jsonl", [problem(*pair) for pair in held_out])
    write(HERE / "train.jsonl", [problem(*pair) for pair in train])
    write_tokenizer(HERE / "tokenizer")

    RUNS.mkdir(parents=True, exist_ok=True)
    shown = (generator.choice(train) for _ in range(DEMONSTRATIONS))
    rows = [{**problem(*pair), "completion": demonstration(*pair, generator)} for pair in shown]
    write(RUNS / "sft.jsonl", rows)


@cache
def expressions(numbers: Numbers) -> dict[int, list[str]]:
    """The expressions of all the numbers, two or three, without brackets, by their values from 0 to LARGEST."""
    found: dict[int, list[str]] = {}
    for first, *others in itertools.permutations(numbers):
        for operators in itertools.product("+-*", repeat=len(others)):
            text = " ".join([str(first), *(f"{sign} {number}" for sign, number in zip(operators, others, strict=True))])
            value = evaluate(ast.parse(text, mode="eval").body, [])
            if value is not None and 0 <= value <= LARGEST:
                found.setdefault(value, []).append(text)
    return found


def problem(numbers: Numbers, target: int) -> dict[str, object]:
    """The row of a problem."""
    return {"prompt": f"{' '.join(map(str, numbers))} -> {target}", "numbers": numbers, "target": target}


def demonstration(numbers: Numbers, target: int, generator: random.Random) -> str:
    """Up to ATTEMPTS random expressions with their values, and whether these are the target: `3 + 4 - 2 = 5 no`.

    No value comes twice. A third of the expressions leave out a number, and how many there are has nothing to do with
    the target: this shows what attempts look like and not how a problem is solved.
    """
    parts: list[str] = []
    tried: set[int] = set()
    for _ in range(generator.randint(1, ATTEMPTS)):
        short = generator.random() < 1 / 3
        found = expressions(tuple(generator.sample(numbers, 2)) if short else numbers)
        texts = [(text, value) for value, texts in found.items() if value not in tried for text in texts]
        if texts:
            text, value = generator.choice(texts)
            tried.add(value)
            parts.append(f"{text} = {value} {'yes' if value == target else 'no'}")
    return " ".join(parts)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of words with spaces between them: each number is one."""
    words = ["<eos>", "->", "=", "yes", "no", *"+-*", *map(str, range(LARGEST + 1))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    wrapped.save_pretrained(directory)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """The rows as a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
