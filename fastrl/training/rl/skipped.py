"""The batches of updates that were skipped because their loss or gradient was not finite, saved for inspection."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from fastrl.training.common.policy import Policy
from fastrl.training.common.rollout import Rollout

KEPT = 3  # batches; more would repeat the same


def save_batch(policy: Policy, batch: Rollout, directory: Path) -> None:
    """Write `rollout.safetensors` (every tensor of the batch) and `texts.jsonl` (its rows, with special tokens).

    Keeps the newest of the directory's siblings, KEPT including this one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    values = dict(vars(batch))
    if batch.sampling_mask is not None:
        values |= {f"sampling_mask.{name}": value for name, value in batch.sampling_mask.state_dict().items()}
    tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)}
    save_file(tensors, directory / "rollout.safetensors", {"prompt_length": str(batch.prompt_length)})
    with (directory / "texts.jsonl").open("w", encoding="utf-8") as file:
        halves = {"prompt": slice(batch.prompt_length), "completion": slice(batch.prompt_length, None)}
        for tokens, used in zip(batch.input_ids, batch.attention_mask, strict=True):
            row = {name: policy.tokenizer.decode(tokens[half][used[half]]) for name, half in halves.items()}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    others = [path for path in directory.parent.iterdir() if path != directory]
    for old in sorted(others, key=lambda path: path.stat().st_mtime)[: 1 - KEPT]:
        shutil.rmtree(old)
