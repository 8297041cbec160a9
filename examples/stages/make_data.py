"""Writes this directory's datasets, which are committed: run it again only to change them.

The numbers are those of ../reverse_digits/train.jsonl: the first 200 for fine-tuning, the next 400 for preferences,
and the 500 after the first 200, which include those, for ranks. Held-out rows are from ../reverse_digits/eval.jsonl.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
RANDOM = random.Random(0)


def main() -> None:
    """Write the six files."""
    train, held_out = (read(HERE.parent / "reverse_digits" / f"{name}.jsonl") for name in ("train", "eval"))
    write("sft.jsonl", [demonstration(row) for row in train[:200]])
    write("sft_eval.jsonl", [demonstration(row) for row in held_out[:50]])
    write("dpo.jsonl", [pair(row) for row in train[200:600]])
    write("dpo_eval.jsonl", [pair(row) for row in held_out[:50]])
    write("reward_model.jsonl", [ranked(row) for row in train[200:700]])
    write("reward_model_eval.jsonl", [ranked(row) for row in held_out[:50]])


def demonstration(row: dict[str, str]) -> dict[str, object]:
    """The prompt and its answer."""
    return {"prompt": row["prompt"], "completion": row["answer"]}


def pair(row: dict[str, str]) -> dict[str, object]:
    """The answer, preferred to one with a digit wrong."""
    return {"prompt": row["prompt"], "chosen": row["answer"], "rejected": spoilt(row["answer"], 1)}


def ranked(row: dict[str, str]) -> dict[str, object]:
    """Three answers with 0 to 2 digits wrong, and one with 2 more, in a random order, ranked by how many are wrong."""
    wrong = [0, 1, 2, 2]
    RANDOM.shuffle(wrong)
    return {
        "prompt": row["prompt"],
        "responses": [spoilt(row["answer"], count) for count in wrong],
        "ranks": [count + 1 for count in wrong],
    }


def spoilt(answer: str, count: int) -> str:
    """The answer with wrong digits at `count` places."""
    digits = list(answer)
    for place in RANDOM.sample(range(len(digits)), count):
        digits[place] = RANDOM.choice([digit for digit in "0123456789" if digit != digits[place]])
    return "".join(digits)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(name: str, rows: list[dict[str, object]]) -> None:
    """The rows as a JSONL file beside this one."""
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
