"""Load models and tokenizers in the Hugging Face format, with errors that say why one cannot be used.

Transformers initialises weights that a file lacks at random, ignores those that the model has no place for, and asks
the hub for a directory that does not exist. Here each of these is an error that names them.
"""

import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as WRITERS
from transformers.utils import find_adapter_config_file
from transformers.utils import logging as transformers_logging

from fastrl.base.errors import UserError, one_line
from fastrl.training.config.sections import MARK, ModelConfig
from fastrl.training.config.settings import looks_like_path
from fastrl.training.parallel.world import ALONE, World

# How long the hub may take to say whether it has a model.
_HUB_SECONDS = 10
# Files that must hold one JSON object if a directory has them; transformers' own errors do not name the file.
_OBJECTS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


def name_of(config: ModelConfig) -> str:
    """The model's name in messages."""
    return str(config.config if config.path is None else config.path)


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
    _check_source(name)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file makes it raise nearly anything
        if os.path.isdir(name) and not any(
            re.match("tok|vocab|spiece|sentencepiece|tekken", x) for x in os.listdir(name)
        ):
            raise UserError(f"{name}: holds no tokenizer, only {', '.join(sorted(os.listdir(name)))}") from error
        raise _cannot_load("tokenizer", name, error) from error


def load_config(config: ModelConfig, **extra: Any) -> Any:
    """Transformers' config of the model, without its weights. Raises UserError if it cannot be read."""
    name = name_of(config)
    if config.config is not None:
        values = _read_object(config.config)
        if not isinstance(values.get("model_type"), str):
            raise UserError(f'{config.config}: expected a JSON object with a "model_type"')
    else:
        _check_source(name)
        name = _base_of_adapters(name) or name
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise UserError(f"{name}: holds no model; expected a directory with config.json and weights")
    try:
        if config.config is not None:
            model_config = AutoConfig.for_model(**values, **extra)
        else:
            model_config = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code, **extra)
        text = model_config.get_text_config()  # raises for models of sound, which have several
    except Exception as error:  # a wrong value makes it raise nearly anything
        raise _cannot_load("model", name, error) from error
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
        raise _cannot_load("model", name_of(config), error) from error


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
    base = None if config.path is None else _base_of_adapters(name)
    with _quiet():
        try:
            if config.config is not None:
                return kind.from_config(model_config, **options)
            # Shapes that differ are reported like the other differences; transformers would raise without naming them.
            checked = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = kind.from_pretrained(base or name, **options, **checked, **extra)
        except Exception as error:  # a damaged file makes it raise nearly anything
            raise _cannot_load("model", base or name, error) from error
    kinds = ", ".join(model_config.architectures or [])
    borrowed = new_head and "ForSequenceClassification" not in kinds
    _check_weights(base or name, model, info, f"{model.base_model_prefix}." if borrowed else "")
    return model if base is None else _with_merged(model, name)


def _with_merged(model: Any, name: str) -> Any:
    """The model with the adapters of `name` merged into its weights: like any other, with the logits it has in peft."""
    try:
        from peft import PeftConfig, PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.save_and_load import load_peft_weights
    except ImportError as error:
        raise UserError(f"{name}: holds adapters, which need peft ({error}): pip install peft") from error
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft's, of a head that is the embedding
        try:
            settings = PeftConfig.from_pretrained(name)
            if settings.is_prompt_learning:
                raise UserError(f"{name}: adapters of kind {settings.peft_type.value} cannot be merged into weights")
            wrapped = PeftModel(model, settings)
            _fill(wrapped, name, load_peft_weights(name, device="cpu"))
            if tied:  # merging changes weights in place, and adapters may tell the two apart
                head.weight = torch.nn.Parameter(head.weight.detach().clone())
            merged: Any = wrapped.merge_and_unload(safe_merge=True)
            if left := [key for key, module in merged.named_modules() if isinstance(module, BaseTunerLayer)]:
                raise UserError(f"{name}: peft cannot merge the adapters of several kinds on {listed(left)}")
        except UserError:
            raise
        except Exception as error:  # as for the model; and a kind that the installed peft does not know or cannot merge
            raise _cannot_load("adapters", name, error) from error
    if tied:
        embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
        still = torch.equal(head.weight, embedding.weight)
        if still:
            head.weight = embedding.weight
        merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = still
    return merged.requires_grad_(True)


def _fill(wrapped: Any, name: str, adapters: dict[str, Tensor]) -> None:
    """Load adapters into peft's wrapper around a model. Raises UserError unless they are what its config names."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    shapes = [
        (key, adapters[key].shape, tensor.shape)
        for key, tensor in expected.items()
        if key in adapters and adapters[key].shape != tensor.shape
    ]
    loaded: Any = None if shapes else set_peft_model_state_dict(wrapped, adapters)
    differences = {
        "missing_keys": expected.keys() - adapters.keys(),
        "unexpected_keys": () if shapes else loaded.unexpected_keys,
        "mismatched_keys": shapes,
    }
    _check_weights(name, wrapped.get_base_model(), differences, "")


def _check_weights(name: str, model: Any, info: dict[str, Any], needed: str) -> None:
    """Raise UserError unless exactly the model's weights were loaded, among names that begin with `needed`."""
    missing, unexpected = (
        {key for key in info[kind] if key.startswith(needed)} for kind in ("missing_keys", "unexpected_keys")
    )
    lines = []
    if missing:
        lines.append(f"missing, and would start at random: {listed(missing)}")
    if unexpected:
        lines.append(f"left over, without a place in the model: {listed(unexpected)}")
    shapes: dict[str, list[str]] = {}
    for key, actual, expected in info["mismatched_keys"]:
        shapes.setdefault(f"{tuple(actual)}, expected {tuple(expected)}", []).append(key)
    for text, keys in shapes.items():
        lines.append(f"another shape: {listed(keys)} {text}")
    if not lines:
        return
    vocabulary = model.get_input_embeddings()
    names = {key for key, parameter in model.named_parameters() if parameter is getattr(vocabulary, "weight", None)}
    if names & {key for key, *_ in info["mismatched_keys"]}:
        lines[-1] += f"; its config has vocab_size {model.config.get_text_config().vocab_size}"
    kind = type(model).__name__
    raise UserError(
        f"{name}: the weights are not those of the {kind} that its config describes\n  " + "\n  ".join(lines)
    )


def listed(names: Iterable[str]) -> str:
    """Names of weights, with those that differ only in numbers as one: `model.layers.{0-2,5}.mlp.weight`."""
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    for name in names:
        parts = re.split(r"(?<=\.)(\d+)(?=\.|$)", name)
        groups.setdefault(tuple(parts[::2]), []).append([int(number) for number in parts[1::2]])
    merged = []
    for texts, numbers in groups.items():
        slots = [_ranges(set(slot)) for slot in zip(*numbers, strict=True)]
        merged.append("".join(text + slot for text, slot in zip(texts, [*slots, ""], strict=True)))
    return ", ".join(sorted(merged))


def _ranges(numbers: set[int]) -> str:
    """Numbers as ranges in braces; a single number without braces."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"


def _check_source(name: str) -> None:
    """Raise UserError for a path or a name that does not exist, a run's folder, and JSON files that are not valid."""
    path = Path(name)
    if not name.strip():
        raise UserError(f"expected a directory or a name on the hub as a model, got {name!r}")
    if os.path.isdir(name):  # of a name that is too long, Path's functions raise OSError
        if (path / MARK).exists():
            models = [path / "model", *sorted(path.glob("checkpoints/step-*"), reverse=True)]
            use = next((f"use {model}" for model in models if model.is_dir()), "it holds no model yet")
            raise UserError(f"{name}: expected a model's directory, got a run's; {use}")
        for file in _OBJECTS:
            if (path / file).exists():
                _read_object(path / file)
    elif os.path.exists(name):
        raise UserError(f"{name}: expected a directory, got a file")
    elif looks_like_path(name):
        raise UserError(f"{name}: no such directory")
    else:
        _ask_hub(name)


@cache
def _ask_hub(name: str) -> None:
    """Ask the hub once whether it has a model: without a network, transformers tries again for a minute.

    Where the hub does not answer, what is cached of the model is used. Raises UserError if there is no such model, or
    nothing is cached.
    """
    if constants.HF_HUB_OFFLINE:
        return
    print(f"fastrl: {name}: no such directory; asking the hub", file=sys.stderr)
    try:
        HfApi().model_info(name, timeout=_HUB_SECONDS)
    except RepositoryNotFoundError as error:
        raise UserError(f"{name}: no such directory, and the hub has no such model, or not for you") from error
    except (HfHubHTTPError, HFValidationError):
        pass  # transformers asks in another way, and says what is wrong
    except Exception as error:  # of httpx or of httpx2, by the version of huggingface_hub
        reason = f"the hub does not answer ({one_line(error)})"
        if not (Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")).is_dir():
            raise UserError(f"{name}: no such directory, and {reason}") from error
        print(f"fastrl: {name}: {reason}; what is cached is used", file=sys.stderr)
        constants.HF_HUB_OFFLINE = True


def _base_of_adapters(name: str) -> str | None:
    """The base model of the adapters that a directory or a repository on the hub holds, or None if it holds none."""
    try:
        file = find_adapter_config_file(name)
    except OSError as error:  # no name that the hub could have
        raise _cannot_load("model", name, error) from error
    if file is None:
        return None
    base = _read_object(Path(file)).get("base_model_name_or_path")
    if not isinstance(base, str) or (looks_like_path(base) and not os.path.isdir(base)):
        raise UserError(f"{file}: base_model_name_or_path: no such directory, {base!r}")
    if find_adapter_config_file(base) is not None:
        raise UserError(f"{file}: base_model_name_or_path: {base} holds adapters itself; merge them into their base")
    return base


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read it: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _cannot_load(what: str, name: str, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [""])[0].rstrip()
    if reason.endswith(":"):  # the message continues after that
        reason = shorten(str(error), 240, placeholder=" ...")
    if isinstance(error, SafetensorError):
        files = [path for path in sorted(Path(name).glob("*.safetensors")) if not _readable(path)]
        reason = (
            f"{', '.join(path.name for path in files) or 'a file of weights'}: damaged, or not copied whole ({reason})"
        )
    elif not isinstance(error, OSError | ValueError | ImportError | RuntimeError):
        reason = f"{type(error).__name__}: {reason}"
    elif isinstance(error, OSError) and not os.path.exists(name):
        reason = f"no such directory, and as a name on the hub: {reason}"
    return UserError(f"{name}: cannot load the {what}: {reason}")


def _readable(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except (SafetensorError, OSError):
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' report of missing and left-over weights: here they are an error, or intended."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
