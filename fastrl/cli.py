"""The command `fastrl`. Subcommands are imported when they are called: torch takes seconds, and a core install has no
trainer."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from fastrl import __version__
from fastrl.base import dependencies
from fastrl.base.dependencies import TRAIN
from fastrl.base.errors import UserError, out_of_memory
from fastrl.base.spelling import nearest
from fastrl.base.system import started_processes
from fastrl.training.run.interruption import ending_at_once

USAGE = """usage: fastrl COMMAND ...

Fused vocabulary losses for reinforcement learning of language models.

commands:
{commands}
fastrl COMMAND --help lists the options of a command, fastrl --version prints the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastrl COMMAND ...`; returns the exit status: 2, after one line of explanation, if the user can fix it."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's: a path may hold any bytes
    try:
        status = _run(command, arguments)
        sys.stdout.flush()  # not at the exit, where an error could not be caught
        return status
    except UserError as error:
        return _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _fail(f"out of memory: {(str(error).splitlines() or [''])[0]}")
    except BrokenPipeError:
        standard_output = select.poll()
        standard_output.register(1, 0)
        if not standard_output.poll(0):  # it is another pipe, such as one to a worker
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `fastrl ... | head`: nobody reads the rest
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("fastrl: interrupted", file=sys.stderr)
        return 130


def _run(command: str, argv: list[str]) -> int:
    if command in ("--help", "-h"):
        print(USAGE.format(commands="".join(f"  {name:<14}{text}\n" for name, text in COMMANDS.items())))
        return 0
    if command == "--version":
        version = f"fastrl {__version__}"
        print(version)
        return 0
    if command not in COMMANDS:
        return _fail(f"{command}: no such command{nearest(command, COMMANDS)}; fastrl --help lists them")
    if {"--help", "-h"} & set(argv):
        print(help_file(command).read_text(encoding="utf-8"), end="")
        return 0
    if unknown := _unknown_option(command, argv):
        return _fail(f"{unknown}: no such option of fastrl {command}{_meant(command, unknown)}")
    needs = _NEEDS.get(command, () if command in MODULES else TRAIN)
    if missing := dependencies.missing(needs):
        return _fail(f"{command} needs packages that are not installed: {dependencies.how_to_install(missing)}")
    if command in MODULES:
        with ending_at_once():
            module = import_module(f"fastrl.{MODULES[command]}")
        status: int = module.main(argv)
        return status
    if started_processes() == 1:
        return _train(command, argv)
    with ending_at_once():
        from fastrl.training.parallel.launch import on_rank
    return on_rank(lambda: _train(command, argv))


def _options(command: str) -> list[str]:
    return re.findall(r"--\w[\w-]*(?:\.\w+)*", help_file(command).read_text(encoding="utf-8"))


def _unknown_option(command: str, argv: list[str]) -> str | None:
    """The first option that the command does not have; found here, before the seconds that imports take."""
    given = (text.partition("=")[0] for text in argv if text.startswith("--"))
    return next((name for name in given if name not in _options(command)), None)


def _meant(command: str, unknown: str) -> str:
    """What an unknown option was probably meant to be: the fields of this name in any table, or the nearest name."""
    fields = sorted({name for name in _options(command) if name.rpartition(".")[2] == unknown.lstrip("-")})
    return f"; did you mean {' or '.join(fields)}?" if fields else nearest(unknown, _options(command))


def _train(command: str, argv: list[str]) -> int:
    with ending_at_once():
        from fastrl.planning.budget import BudgetTooSmall
        from fastrl.training.commands import read_command

        work = read_command(command, argv)
    try:
        return work()
    except BudgetTooSmall as error:  # for what no config contains, such as the size of recorded supports
        raise UserError(f"training.memory_budget: {error}") from error


def _fail(message: str) -> int:
    print(f"fastrl: {message}", file=sys.stderr)
    return 2


def help_file(command: str) -> Path:
    """What `fastrl COMMAND --help` prints. A file, because parsers are built from modules that import torch.

    `docs/site/help_texts.py` writes it.
    """
    return Path(__file__).with_name("help") / f"{command}.txt"


#: Command -> help.
COMMANDS: dict[str, str] = {
    "init": "write a commented config for your model and data: fastrl init --model MODEL --data DATA",
    "train": "train a language model: fastrl train CONFIG.toml [--section.field value ...]",
    "sft": "fine-tune on prompts and completions: fastrl sft CONFIG.toml",
    "dpo": "train on preferred and rejected completions: fastrl dpo CONFIG.toml",
    "reward-model": "a reward model from ranked completions: fastrl reward-model CONFIG.toml",
    "sample": "completions with their rewards, or the best: fastrl sample CONFIG.toml [--best K]",
    "report": "curves, samples, timings and config of a run, or several, in one HTML file: fastrl report RUN_DIR ...",
    "bench": "measure the losses on this machine, beside their peers",
    "doctor": "versions, devices, backends, and why one is missing",
    "plan": "which memory plan a linear loss would take within a budget, and what it costs",
    "plot-gates": "draw what each algorithm makes of the ratio: the weight on grad log pi",
}
#: Command -> its module with main(argv), for those without a config.
MODULES = {
    "init": "init.command",
    "report": "report.report",
    "bench": "bench",
    "doctor": "doctor",
    "plan": "planning.command",
    "plot-gates": "bench.plot_gates",
}
#: The modules that must be installed for one of these; those with a config need TRAIN.
_NEEDS: dict[str, Sequence[str]] = {"init": TRAIN, "report": ("matplotlib",), "plot-gates": ("matplotlib",)}


if __name__ == "__main__":
    sys.exit(main())
