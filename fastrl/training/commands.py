"""The commands of the trainer. A config is checked before the modules that train are imported, which takes seconds."""

from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

from fastrl.base.errors import UserError
from fastrl.base.system import started_processes
from fastrl.training.config.settings import Section, parse_command_line


class Command(NamedTuple):
    """A command that reads a config."""

    config: str
    """Where the config's class is: MODULE:CLASS."""
    module: str
    """The module whose main(config, **switches) does the work and returns the exit status."""
    about: str
    trains: bool = True
    """Whether it can go on from a checkpoint (--resume), and runs on several processes (--nproc, or torchrun)."""
    short: Mapping[str, str] = MappingProxyType({})
    """Another name of an option -> the option."""

    @property
    def kind(self) -> type[Section]:
        """The config's class."""
        module, _, name = self.config.partition(":")
        kind: type[Section] = getattr(import_module(f"fastrl.training.config.{module}"), name)
        return kind


COMMANDS = {
    "train": Command("train:Config", "rl.train", "Train a language model by reinforcement learning."),
    "sft": Command("stages:SFTConfig", "stages.sft", "Fine-tune a language model on prompts and completions."),
    "dpo": Command("stages:DPOConfig", "stages.dpo", "Train a language model on pairs of completions."),
    "reward-model": Command(
        "stages:RewardModelConfig", "stages.reward_model", "Train a reward model on ranked completions."
    ),
    "sample": Command(
        "stages:SampleConfig",
        "stages.sample",
        "Sample completions and their rewards.",
        trains=False,
        short={"best": "output.best"},
    ),
}


def read_command(name: str, argv: list[str]) -> Callable[[], int]:
    """Read `fastrl NAME CONFIG.toml [--section.field value ...]`; returns its work, which returns the exit status.

    Raises UserError for what the user can fix, and SystemExit (argparse) for a missing config or value. With --nproc
    the work is to start so many processes, each of which does the command's.
    """
    command = COMMANDS[name]
    started = started_processes()
    processes, argv = _processes(name, argv) if command.trains else (None, argv)
    if started > 1 and not command.trains:
        raise UserError(f"{name} runs in one process, and torchrun started {started}: start it without torchrun")
    if started > 1 and processes is not None:
        raise UserError(f"--nproc: torchrun has started {started} processes already; leave it out")
    switches = ["resume"] if command.trains else []
    config, given = parse_command_line(command.kind, name, argv, switches, command.short)
    if (processes or 1) > 1:
        return partial(import_module("fastrl.training.parallel.launch").launch, [name, *argv], processes)
    return partial(import_module(f"fastrl.training.{command.module}").main, config, **given)


def _processes(name: str, argv: list[str]) -> tuple[int | None, list[str]]:
    """The value of --nproc, None if it was not given, and the other arguments."""
    parser = ArgumentParser(f"fastrl {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc")
    given, others = parser.parse_known_args(argv)
    if given.nproc is None:
        return None, others
    if not given.nproc.isdecimal() or int(given.nproc) < 1:
        raise UserError(f"--nproc: expected a number of processes of at least 1, got {given.nproc!r}")
    return int(given.nproc), others
