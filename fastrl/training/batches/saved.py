"""A batch in files, to look at: that of an update that was skipped."""

import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fastrl.base.errors import UserError
from fastrl.base.json_text import to_json
from fastrl.training.batches.rollout import Rollout
from fastrl.training.models.policy import Policy

KEPT = 3  # saved batches of skipped updates; more would repeat the same


def save_batch(policy: Policy, batch: Rollout, directory: Path) -> None:
    """Write `rollout.safetensors` (every tensor of the batch) and `texts.jsonl` (its rows, with special tokens).

    Keeps the newest of the directory's siblings, KEPT including this one. Raises UserError if it cannot.
    """
    try:
        _write_batch(policy, batch, directory)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory}: cannot save the batch of a skipped update: {error}") from error


def _write_batch(policy: Policy, batch: Rollout, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    values = dict(vars(batch))
    if (mask := batch.sampling_mask) is not None:
        values |= {f"sampling_mask.{name}": value for name, value in mask.state_dict().items()}
    tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, Tensor)}
    save_file(tensors, directory / "rollout.safetensors", {"prompt_length": str(batch.prompt_length)})
    with (directory / "texts.jsonl").open("w", encoding="utf-8") as file:
        halves = {"prompt": slice(batch.prompt_length), "completion": slice(batch.prompt_length, None)}
        for tokens, used in zip(batch.input_ids, batch.attention_mask, strict=True):
            row = {name: policy.tokenizer.decode(tokens[half][used[half]]) for name, half in halves.items()}
            file.write(to_json(row) + "\n")
    others = [path for path in directory.parent.iterdir() if path != directory]
    for old in sorted(others, key=lambda path: path.stat().st_mtime)[: 1 - KEPT]:
        shutil.rmtree(old)
