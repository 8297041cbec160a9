"""Writes this example's problems, tokenizer and demonstrations: nothing is downloaded.

A problem is three different numbers from 1 to 10 and a target from 1 to 99 that an expression of all three reaches.
train.jsonl and eval.jsonl, which share no problem, and tokenizer/ are committed. The demonstrations of the warm start,
runs/countdown/sft.jsonl, are not: run this first.
"""

import itertools
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
RUNS = HERE.parent.parent / "runs" / "countdown"
LARGEST = 99  # the largest number with a token of its own
HELD_OUT = 200
DEMONSTRATIONS, ATTEMPTS = 12_800, 8
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

Numbers = tuple[int, ...]


def main() -> None:
    """Write train.jsonl, eval.jsonl and tokenizer/ beside this file, and the demonstrations under runs/countdown."""
    generator = random.Random(0)
    reached = {numbers: expressions(numbers) for numbers in itertools.combinations(range(1, 11), 3)}
    problems = [(numbers, target) for numbers, values in reached.items() for target in values if target > 0]
    generator.shuffle(problems)
    held_out, train = problems[:HELD_OUT], problems[HELD_OUT:]
    write(HERE / "eval.jsonl", [problem(*pair) for pair in held_out])
    write(HERE / "train.jsonl", [problem(*pair) for pair in train])
    write_tokenizer(HERE / "tokenizer")

    RUNS.mkdir(parents=True, exist_ok=True)
    chosen = (generator.choice(train) for _ in range(DEMONSTRATIONS))
    rows = [{**problem(*pair), "completion": attempts(reached[pair[0]], generator)} for pair in chosen]
    write(RUNS / "sft.jsonl", rows)


def expressions(numbers: Numbers) -> dict[int, list[str]]:
    """The expressions of all the numbers, without brackets, by their values from 0 to LARGEST."""
    found: dict[int, list[str]] = {}
    for a, b, c in itertools.permutations(numbers):
        for first, second in itertools.product(OPERATORS, repeat=2):
            if second == "*" and first != "*":  # binds tighter
                value = OPERATORS[first](a, b * c)
            else:
                value = OPERATORS[second](OPERATORS[first](a, b), c)
            if 0 <= value <= LARGEST:
                found.setdefault(value, []).append(f"{a} {first} {b} {second} {c}")
    return found


def problem(numbers: Numbers, target: int) -> dict[str, object]:
    """The row of a problem."""
    return {"prompt": f"{' '.join(map(str, numbers))} -> {target}", "numbers": numbers, "target": target}


def attempts(reached: dict[int, list[str]], generator: random.Random) -> str:
    """Up to ATTEMPTS expressions with their values, drawn without a look at the target: a demonstration of form.

    The expressions are drawn at random, but no value comes twice.
    """
    order = [(value, text) for value, texts in reached.items() for text in texts]
    generator.shuffle(order)
    values = list(dict.fromkeys(value for value, _ in order))[: generator.randint(1, ATTEMPTS)]
    return " ; ".join(f"{generator.choice(reached[value])} = {value}" for value in values)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of words with spaces between them: each number is one."""
    words = ["<eos>", "->", ";", "=", *OPERATORS, *map(str, range(LARGEST + 1))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    wrapped.save_pretrained(directory)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """The rows as a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
