"""Where models are: names that exist, files that can be read, and errors that say why one cannot be loaded."""

import json
import os
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from safetensors import SafetensorError, safe_open

from fastrl.base.errors import UserError, one_line
from fastrl.base.terminal import say
from fastrl.training.config.sections import MARK, ModelConfig
from fastrl.training.config.settings import looks_like_path

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


def check_source(name: str) -> None:
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
                read_object(path / file)
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
    say(f"{name}: no such directory; asking the hub")
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
        say(f"{name}: {reason}; what is cached is used")
        constants.HF_HUB_OFFLINE = True


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError naming the file if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read it: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def cannot_load(what: str, name: str, error: Exception) -> UserError:
    """The error of a `what` that transformers cannot load, with the reason in a line."""
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
