"""Writes this example's problems, tokenizer and demonstrations: nothing is downloaded.

A problem is three different numbers from 1 to 9 and a target that the sum, difference or product of two of them equals.
train.jsonl and eval.jsonl, which share no problem, and tokenizer/ are committed. The demonstrations of the warm start,
runs/countdown/sft.jsonl, are not: run this first.
"""

import itertools
import json
import random
from functools import cache
from pathlib import Path

from reward import OPERATORS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
RUNS = HERE.parent.parent / "runs" / "countdown"
LARGEST = 72  # the largest number with a token of its own
HELD_OUT = 100
DEMONSTRATIONS = 16000
HITS = 0.1  # the share of demonstrations that are cut where they hit the target

Numbers = tuple[int, ...]


def main() -> None:
    """Write train.jsonl, eval.jsonl and tokenizer/ beside this file, and the demonstrations under runs/countdown."""
    generator = random.Random(0)
    chosen = itertools.combinations(range(1, 10), 3)
    problems = [(numbers, target) for numbers in chosen for target in expressions(numbers)]
    generator.shuffle(problems)
    held_out, train = problems[:HELD_OUT], problems[HELD_OUT:]
    write(HERE / "eval.jsonl", [problem(*pair) for pair in held_out])
    write(HERE / "train.jsonl", [problem(*pair) for pair in train])
    write_tokenizer(HERE / "tokenizer")

    RUNS.mkdir(parents=True, exist_ok=True)
    shown = [generator.choice(train) for _ in range(DEMONSTRATIONS)]
    rows = [{**problem(*pair), "completion": demonstration(*pair, generator)} for pair in shown]
    write(RUNS / "sft.jsonl", rows)


@cache
def expressions(numbers: Numbers) -> dict[int, list[str]]:
    """The sums, differences and products of two of the numbers, by their values from 1 to LARGEST."""
    found: dict[int, list[str]] = {}
    for first, second in itertools.permutations(numbers, 2):
        for sign, operator in OPERATORS.items():
            value = operator(first, second)
            if 0 < value <= LARGEST:
                found.setdefault(value, []).append(f"{first} {sign} {second}")
    return found


def problem(numbers: Numbers, target: int) -> dict[str, object]:
    """The row of a problem."""
    return {"prompt": f"{' '.join(map(str, numbers))} -> {target}", "numbers": numbers, "target": target}


def demonstration(numbers: Numbers, target: int, generator: random.Random) -> str:
    """Expressions in any order, each with its value and whether it is the target: `3 + 4 = 7 no 4 - 3 = 1 yes`.

    HITS of them are cut where they hit the target, the others have all expressions: they show what attempts look like,
    and most of them not when to stop.
    """
    attempts = [(texts[0], value) for value, texts in expressions(numbers).items()]
    generator.shuffle(attempts)
    if generator.random() < HITS:
        attempts = attempts[: [value for _, value in attempts].index(target) + 1]
    return " ".join(f"{text} = {value} {'yes' if value == target else 'no'}" for text, value in attempts)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of words with spaces between them: each number is one."""
    words = ["<eos>", "->", "=", "no", "yes", *"+-*", *map(str, range(LARGEST + 1))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    wrapped.save_pretrained(directory)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """The rows as a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
