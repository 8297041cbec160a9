"""The optional packages that parts of fastrl need: which are missing, and how to install them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from importlib.util import find_spec

#: Module -> requirement for pip. The versions are those of the extras in pyproject.toml; verl's is its adapter's.
REQUIREMENTS = {
    "datasets": "datasets>=4",
    "filelock": "filelock>=3.30",
    "httpx2": "httpx2",
    "matplotlib": "matplotlib",
    "math_verify": "math-verify>=0.9",
    "peft": "peft>=0.18",
    "pyarrow": "pyarrow",
    "pydantic": "pydantic>=2",
    "pydantic_settings": "pydantic-settings>=2",
    "safetensors": "safetensors",
    "tabulate": "tabulate",
    "tensorboard": "tensorboard",
    "tqdm": "tqdm",
    "transformers": "transformers>=5.17",
    "trl": "trl>=1.16",
    "verl": "verl==0.9.1",
    "vllm": "vllm>=0.32",
    "wandb": "wandb",
}
#: The modules that the commands that run a model import.
TRAIN = (
    "transformers",
    "safetensors",
    "tensorboard",
    "matplotlib",
    "tqdm",
    "pydantic",
    "pydantic_settings",
    "filelock",
)


def missing(modules: Iterable[str]) -> list[str]:
    """The modules that are not installed."""
    return [name for name in modules if find_spec(name) is None]


def how_to_install(modules: Iterable[str]) -> str:
    """The command that installs the modules' packages. It never names fastrl, which is another project on PyPI."""
    return f"pip install {shlex.join(REQUIREMENTS[name] for name in modules)}"
