"""Load models and tokenizers in the Hugging Face format, with errors that say why one cannot be used.

Transformers initialises weights that a file lacks at random, ignores those that the model has no place for, and asks
the hub for a directory that does not exist. Here each of these is an error that names them.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as WRITERS
from transformers.utils import logging as transformers_logging

from fastrl.base.errors import UserError
from fastrl.training.config.sections import ModelConfig
from fastrl.training.models.adapters import base_of_adapters, with_merged
from fastrl.training.models.differences import check_weights
from fastrl.training.models.names import cannot_load, check_source, name_of, read_object
from fastrl.training.parallel.world import ALONE, World


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that a model's config names. Raises UserError if there is none, or it is another model's."""
    name = config.path if config.tokenizer is None else config.tokenizer
    assert name is not None  # ModelConfig's check
    tokenizer = _tokenizer(name, config.trust_remote_code)
    files = {"tokenizer.json", "tokenizer_config.json", *(tokenizer.vocab_files_names or {}).values()}
    if not _has_one_of(files, name):
        # From the model's config alone, transformers makes a tokenizer without a vocabulary.
        raise UserError(f"{name}: holds no tokenizer; expected one of {', '.join(sorted(files))}")
    if config.path not in (None, name) and _has_one_of(files, config.path):
        own, given = _tokenizer(config.path, config.trust_remote_code).get_vocab(), tokenizer.get_vocab()
        if wrong := own.items() - given.items():
            token, number = min(wrong, key=lambda item: item[1])
            raise UserError(
                f"{name}: is not the tokenizer of {config.path}, whose token {token!r} has the id {number}, here "
                f"{given.get(token, 'none')}; leave model.tokenizer out"
            )
    return tokenizer


def _has_one_of(files: Iterable[str], name: str) -> bool:
    """Whether a directory has one of these files; True for a name on the hub."""
    return not os.path.isdir(name) or any((Path(name) / file).exists() for file in files)


def _tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    check_source(name)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file makes it raise nearly anything
        if os.path.isdir(name) and not any(
            re.match("tok|vocab|spiece|sentencepiece|tekken", x) for x in os.listdir(name)
        ):
            raise UserError(f"{name}: holds no tokenizer, only {', '.join(sorted(os.listdir(name)))}") from error
        raise cannot_load("tokenizer", name, error) from error


def load_config(config: ModelConfig, **extra: Any) -> Any:
    """Transformers' config of the model, without its weights. Raises UserError if it cannot be read."""
    name = name_of(config)
    if config.config is not None:
        values = read_object(config.config)
        if not isinstance(values.get("model_type"), str):
            raise UserError(f'{config.config}: expected a JSON object with a "model_type"')
    else:
        check_source(name)
        name = base_of_adapters(name) or name
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise UserError(f"{name}: holds no model; expected a directory with config.json and weights")
    try:
        if config.config is not None:
            model_config = AutoConfig.for_model(**values, **extra)
        else:
            model_config = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code, **extra)
        text = model_config.get_text_config()  # raises for models of sound, which have several
    except Exception as error:  # a wrong value makes it raise nearly anything
        raise cannot_load("model", name, error) from error
    for field in ("vocab_size", "hidden_size"):
        value = getattr(text, field, None)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f"{name}: {field} in the model's config must be at least 1, got {value!r}")
    return model_config


def load_skeleton(config: ModelConfig) -> Any:
    """The language model without weights, on the device "meta". Raises UserError for a model that writes no text."""
    model_config = load_config(config)
    kinds = model_config.architectures or []
    if kinds and {*kinds}.isdisjoint(WRITERS.values()):
        raise UserError(f"{name_of(config)}: expected a causal language model, which writes text, got {kinds[0]}")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a wrong value makes it raise nearly anything
        raise cannot_load("model", name_of(config), error) from error


def load_weights(
    config: ModelConfig, kind: Any = AutoModelForCausalLM, *, new_head: bool = False, world: World = ALONE, **extra: Any
) -> Any:
    """The model, loaded by a transformers Auto class, on the CPU in float32, with the adapters of its directory merged.

    `extra` are values of its config. Raises UserError for a model that cannot be loaded, and for weights (which it
    lists) that are missing, left over or of another shape. With `new_head` a model of another kind may provide only its
    decoder: weights outside it may be missing, and then start at random, or be left over. Of several ranks, rank 0
    alone reads weights; the models of the others have none, and are otherwise like it.
    """
    model_config = load_config(config, **extra)
    options = {"dtype": torch.float32, "trust_remote_code": config.trust_remote_code}
    if config.attention is not None:
        options["attn_implementation"] = config.attention
    loaded: list[Any] = []

    def load() -> tuple[Any, Any]:
        loaded.append(_read_weights(config, kind, model_config, options, new_head, extra))
        # Adapters that were merged may have changed the one, and a file of its own has the other.
        return loaded[0].config, getattr(loaded[0], "generation_config", None)

    own_config, generation_config = world.first(load)
    if loaded:
        return loaded[0]
    with _quiet(), torch.device("meta"):
        model = kind.from_config(own_config, **options)
    model.generation_config = generation_config
    return model


def _read_weights(
    config: ModelConfig, kind: Any, model_config: Any, options: dict[str, Any], new_head: bool, extra: dict[str, Any]
) -> Any:
    """The model with its weights, in this process alone."""
    name = name_of(config)
    base = None if config.path is None else base_of_adapters(name)
    with _quiet():
        try:
            if config.config is not None:
                return kind.from_config(model_config, **options)
            # Shapes that differ are reported like the other differences; transformers would raise without naming them.
            checked = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = kind.from_pretrained(base or name, **options, **checked, **extra)
        except Exception as error:  # a damaged file makes it raise nearly anything
            raise cannot_load("model", base or name, error) from error
    kinds = ", ".join(model_config.architectures or [])
    borrowed = new_head and "ForSequenceClassification" not in kinds
    check_weights(base or name, model, info, f"{model.base_model_prefix}." if borrowed else "")
    return model if base is None else with_merged(model, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' report of missing and left-over weights: here they are an error, or intended."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
