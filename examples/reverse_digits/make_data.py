"""Writes this example's dataset and tokenizer, which are committed: run it again only to change them.

train.jsonl holds 800 of the 1000 three-digit strings, eval.jsonl the other 200.
"""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
CHARACTERS = ["<eos>", "=", *"0123456789"]


def main() -> None:
    """Write train.jsonl, eval.jsonl and tokenizer/ beside this file."""
    numbers = [f"{n:03d}" for n in range(1000)]
    random.Random(0).shuffle(numbers)
    for name, part in (("train", numbers[:800]), ("eval", numbers[800:])):
        rows = [json.dumps({"prompt": f"{digits}=", "answer": digits[::-1]}) for digits in part]
        (HERE / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")

    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(CHARACTERS)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    wrapped.save_pretrained(HERE / "tokenizer")


if __name__ == "__main__":
    main()
