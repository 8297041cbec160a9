"""Models and tokenizers of the Hugging Face format, and what is wrong with those that cannot be used.

Transformers starts weights that a file lacks at random, passes over those that it has no place for, and asks the hub
for a directory that is not there. Here each of these is an error that names them.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fastrl.base.errors import UserError
from fastrl.training.common.sections import ModelConfig
from fastrl.training.common.settings import looks_like_path

# What a directory may hold that is one JSON object; transformers' own words for others do not name the file.
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
    """What messages call the model."""
    return str(config.config if config.path is None else config.path)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that a model's config names. Raises UserError if there is none, or it cannot be read."""
    name = config.path if config.tokenizer is None else config.tokenizer
    assert name is not None  # ModelConfig's check
    _check_source(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a damaged file makes it raise nearly anything
        raise _cannot_load("tokenizer", name, error) from error
    files = {"tokenizer.json", "tokenizer_config.json", *(tokenizer.vocab_files_names or {}).values()}
    if Path(name).is_dir() and not any((Path(name) / file).exists() for file in files):
        # From the config of the model alone transformers makes one without a vocabulary.
        raise UserError(f"{name}: holds no tokenizer; expected one of {', '.join(sorted(files))}")
    return tokenizer


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
            found = AutoConfig.for_model(**values, **extra)
        else:
            found = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code, **extra)
    except Exception as error:  # a wrong value makes it raise nearly anything
        raise _cannot_load("model", name, error) from error
    text = found.get_text_config()
    for field in ("vocab_size", "hidden_size"):
        value = getattr(text, field, None)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f"{name}: {field} in the model's config must be at least 1, got {value!r}")
    return found


def load_weights(config: ModelConfig, kind: Any = AutoModelForCausalLM, *, new_head: bool = False, **extra: Any) -> Any:
    """The model of one of transformers' Auto classes on the CPU in float32, with adapters that it came with not merged.

    ``extra`` are values of its config. Raises UserError for one that cannot be loaded, and listing them, for weights
    that are missing, left over or of another shape. With ``new_head`` a model of another kind may lend its decoder:
    what lies outside of that may be missing, and then starts at random, or be left over.
    """
    found = load_config(config, **extra)
    options = {"dtype": torch.float32, "trust_remote_code": config.trust_remote_code}
    if config.attention is not None:
        options["attn_implementation"] = config.attention
    name = name_of(config)
    base = None if config.path is None else _base_of_adapters(name)
    with _quiet():
        try:
            if config.config is not None:
                return kind.from_config(found, **options)
            # Shapes that differ are told like the other differences; transformers would raise without naming them.
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = kind.from_pretrained(base or name, **options, **extra)
        except Exception as error:  # a damaged file makes it raise nearly anything
            raise _cannot_load("model", base or name, error) from error
        kinds = ", ".join(found.architectures or [])
        borrowed = new_head and "ForSequenceClassification" not in kinds
        _check_weights(base or name, model, info, f"{model.base_model_prefix}." if borrowed else "")
        if base is not None:
            _load_adapters(model, name)
    return model


def _load_adapters(model: Any, name: str) -> None:
    before = set(model.state_dict())
    try:
        info = model.load_adapter(name, ignore_mismatched_sizes=True)
    except ImportError as error:
        raise UserError(f"{name}: holds adapters, which need peft ({error}): pip install peft") from error
    except Exception as error:  # as above
        raise _cannot_load("adapters", name, error) from error
    # All weights but the adapters' are from elsewhere.
    missing = {key for key in info.missing_keys if key not in before}
    found = {"missing_keys": missing, "unexpected_keys": info.unexpected_keys, "mismatched_keys": info.mismatched_keys}
    _check_weights(name, model, found, "")


def _check_weights(name: str, model: Any, info: dict[str, Any], needed: str) -> None:
    """Raise UserError if what was loaded is not the whole model and no more, among names that begin with ``needed``."""
    missing, left = (
        {key for key in info[kind] if key.startswith(needed)} for kind in ("missing_keys", "unexpected_keys")
    )
    lines = []
    if missing:
        lines.append(f"missing, and would start at random: {listed(missing)}")
    if left:
        lines.append(f"left over, without a place in the model: {listed(left)}")
    shapes: dict[str, list[str]] = {}
    for key, given, expected in info["mismatched_keys"]:
        shapes.setdefault(f"{tuple(given)}, expected {tuple(expected)}", []).append(key)
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
    """Names of weights, those that differ in numbers alone as one: ``model.layers.{0-2,5}.mlp.weight``."""
    groups: dict[tuple[str, ...], list[list[int]]] = {}
    for name in names:
        parts = re.split(r"(?<=\.)(\d+)(?=\.|$)", name)
        groups.setdefault(tuple(parts[::2]), []).append([int(number) for number in parts[1::2]])
    found = []
    for texts, numbers in groups.items():
        slots = [_ranges(set(slot)) for slot in zip(*numbers, strict=True)]
        found.append("".join(text + slot for text, slot in zip(texts, [*slots, ""], strict=True)))
    return ", ".join(sorted(found))


def _ranges(numbers: set[int]) -> str:
    """Numbers in braces as ranges, one alone as it is."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"


def _check_source(name: str) -> None:
    """Raise UserError for a path where nothing is, and for a directory whose JSON files are none."""
    path = Path(name)
    if not name.strip():
        raise UserError(f"expected a directory or a name on the hub as a model, got {name!r}")
    if path.is_dir():
        for file in _OBJECTS:
            if (path / file).exists():
                _read_object(path / file)
    elif path.exists():
        raise UserError(f"{name}: expected a directory, got a file")
    elif looks_like_path(name):
        raise UserError(f"{name}: no such directory")


def _base_of_adapters(name: str) -> str | None:
    """The model for which a local directory's adapters were made, if adapters are all that it holds."""
    file = Path(name) / "adapter_config.json"
    if not file.exists() or (file.parent / "config.json").exists():
        return None
    base = _read_object(file).get("base_model_name_or_path")
    if not isinstance(base, str) or (looks_like_path(base) and not Path(base).is_dir()):
        raise UserError(f"{file}: base_model_name_or_path: no such directory, {base!r}")
    return base


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read it: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _cannot_load(what: str, name: str, error: Exception) -> UserError:
    said = (str(error).strip().splitlines() or [""])[0]
    if said.endswith(":"):  # it goes on behind that
        said = shorten(str(error), 240, placeholder=" ...")
    if isinstance(error, SafetensorError):
        files = [path for path in sorted(Path(name).glob("*.safetensors")) if not _readable(path)]
        said = f"{', '.join(path.name for path in files) or 'a file of weights'}: damaged, or not copied whole ({said})"
    elif not isinstance(error, OSError | ValueError | ImportError | RuntimeError):
        said = f"{type(error).__name__}: {said}"
    elif isinstance(error, OSError) and not Path(name).exists():
        said = f"no such directory, and as a name on the hub: {said}"
    return UserError(f"{name}: cannot load the {what}: {said}")


def _readable(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except (SafetensorError, OSError):
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of what was missing or left over: it is an error here, or as it should be."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
