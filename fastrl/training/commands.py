"""The commands of the trainer. A config is checked before the modules that train are imported, which takes seconds."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

from fastrl.training.common.settings import Section, parse_command_line

_RESUME = {"resume": "go on from the newest checkpoint in logging.output_dir, if it holds one, to the same end"}
_SIGNALS = (
    "SIGTERM, SIGHUP and Ctrl-C finish the step, save a checkpoint and exit with 143, 129 and 130; a second one ends "
    "at once."
)


class Command(NamedTuple):
    """A command that reads a config."""

    config: str
    """Where the config's class is: MODULE:CLASS."""
    module: str
    """The module whose main(config, **switches) does the work and returns the exit status."""
    about: str
    switches: Mapping[str, str] = MappingProxyType({})
    """Options without a value, and their help texts."""
    short: Mapping[str, str] = MappingProxyType({})
    """Another name of an option -> the option."""

    @property
    def kind(self) -> type[Section]:
        """The config's class."""
        module, _, name = self.config.partition(":")
        kind: type[Section] = getattr(import_module(f"fastrl.training.{module}"), name)
        return kind


COMMANDS = {
    "train": Command(
        "rl.config:Config", "rl.train", f"Train a language model by reinforcement learning. {_SIGNALS}", _RESUME
    ),
    "sft": Command(
        "stages.config:SFTConfig",
        "stages.sft",
        f"Fine-tune a language model on prompts and completions. {_SIGNALS}",
        _RESUME,
    ),
    "dpo": Command(
        "stages.config:DPOConfig", "stages.dpo", f"Train a language model on pairs of completions. {_SIGNALS}", _RESUME
    ),
    "reward-model": Command(
        "stages.config:RewardModelConfig",
        "stages.reward_model",
        f"Train a reward model on ranked completions. {_SIGNALS}",
        _RESUME,
    ),
    "sample": Command(
        "stages.config:SampleConfig",
        "stages.sample",
        "Sample completions and their rewards.",
        short={"best": "output.best"},
    ),
}


def read_command(name: str, argv: list[str]) -> Callable[[], int]:
    """Read `fastrl NAME CONFIG.toml [--section.field value ...]`; returns its work, which returns the exit status.

    Raises UserError for what the user can fix, and SystemExit (argparse) for a missing config or value.
    """
    command = COMMANDS[name]
    config, switches = parse_command_line(command.kind, name, argv, command.switches, command.short)
    return partial(import_module(f"fastrl.training.{command.module}").main, config, **switches)
