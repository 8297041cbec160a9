"""Saving models and tokenizers as transformers does, and finding out before a run whether that will work."""

from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from fastrl.base.errors import UserError

_GENERATION = "generation_config.json"


def save_pretrained(model: Any, directory: Path, **options: Any) -> None:
    """`model.save_pretrained(directory, **options)`, with the generation config as it was loaded.

    Releases of transformers refuse to save one that they only warned about when it was loaded, such as a temperature
    without `do_sample`; how a model is sampled by default is nothing that training changes.
    """
    loaded = getattr(model, "generation_config", None)
    if loaded is None:
        model.save_pretrained(directory, **options)
        return
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(directory, **options)
    finally:
        model.generation_config = loaded
    if (directory / _GENERATION).exists():  # not beside adapters
        loaded.to_json_file(directory / _GENERATION, keys_to_pop=["compile_config"])


def check_savable(name: str, tokenizer: PreTrainedTokenizerBase, models: list[Any], output_dir: Path) -> None:
    """Raise UserError unless all that is saved of the models, called `name`, but their weights can be written.

    It is written to the run's folder, and removed.
    """
    try:
        with TemporaryDirectory(prefix=".trial-", dir=output_dir) as directory:
            for model in models:
                save_pretrained(model, Path(directory), state_dict={})
            tokenizer.save_pretrained(directory)
    except Exception as error:  # a model's or a tokenizer's own code may raise anything
        reason = shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...")
        raise UserError(
            f"{name}: cannot be saved in {output_dir}, so what is trained would be lost: {reason}"
        ) from error
