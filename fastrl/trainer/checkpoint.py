"""Checkpoints in the Hugging Face format: ``from_pretrained`` on the directory gives model and tokenizer back."""

import shutil
from pathlib import Path

from .policy import Policy


def save_checkpoint(policy: Policy, directory: Path) -> None:
    """Write the model (safetensors) and the tokenizer to ``directory``, which exists only once it is complete."""
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    policy.model.save_pretrained(unfinished)
    policy.tokenizer.save_pretrained(unfinished)
    if directory.exists():
        shutil.rmtree(directory)
    unfinished.rename(directory)
