"""The packages that parts of fastrl need beyond its own dependencies: which are missing, and how to install those."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from importlib.util import find_spec

#: Module -> what pip is asked for. The versions are those of the extras in pyproject.toml, and verl's of its adapter.
REQUIREMENTS = {
    "matplotlib": "matplotlib",
    "peft": "peft>=0.18",
    "pydantic": "pydantic>=2",
    "pydantic_settings": "pydantic-settings>=2",
    "safetensors": "safetensors",
    "tabulate": "tabulate",
    "tensorboard": "tensorboard",
    "tqdm": "tqdm",
    "transformers": "transformers>=5.17",
    "trl": "trl>=1.16",
    "verl": "verl==0.9.1",
    "wandb": "wandb",
}
#: What the commands that run a model import.
TRAIN = ("transformers", "safetensors", "tensorboard", "matplotlib", "tqdm", "pydantic", "pydantic_settings")


def missing(modules: Iterable[str]) -> list[str]:
    """Those of the modules that are not installed."""
    return [name for name in modules if find_spec(name) is None]


def how_to_install(modules: Iterable[str]) -> str:
    """The command that installs the modules' packages. It never names fastrl: on the index that is another project."""
    return f"pip install {shlex.join(REQUIREMENTS[name] for name in modules)}"
