"""The command `fastrl`. Subcommands are imported when they are called, because a core install has no trainer."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module

from fastrl import __version__
from fastrl.base import dependencies
from fastrl.base.dependencies import TRAIN
from fastrl.base.errors import UserError
from fastrl.planning.budget import BudgetTooSmall


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastrl COMMAND ...`; returns the exit status: 2, after one line of explanation, if the user can fix it."""
    parser = argparse.ArgumentParser(
        prog="fastrl",
        description="Fused vocabulary losses for reinforcement learning of language models.",
        epilog="commands:\n" + "".join(f"  {name:<14}{text}\n" for name, (_, text) in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fastrl {__version__}")
    parser.add_argument("command", choices=_COMMANDS, metavar="command", help="one of those below; each has its --help")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the command takes")
    options = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr's: a path may hold any bytes
    try:
        return _run(options.command, options.arguments)
    except UserError as error:
        return _fail(str(error))
    except BudgetTooSmall as error:  # for what no config contains, such as the size of recorded supports
        return _fail(f"training.memory_budget: {error}")
    except KeyboardInterrupt:
        print("fastrl: interrupted", file=sys.stderr)
        return 130


def _run(command: str, argv: list[str]) -> int:
    from fastrl.doctor import missing_for_train

    needs = _NEEDS.get(command, ())
    if missing := missing_for_train() if needs is TRAIN else dependencies.missing(needs):
        return _fail(f"{command} needs packages that are not installed: {dependencies.how_to_install(missing)}")
    status: int = import_module(f"fastrl.{_COMMANDS[command][0]}").main(argv)
    return status


def _fail(message: str) -> int:
    print(f"fastrl: {message}", file=sys.stderr)
    return 2


#: Command -> module with its `main`, help.
_COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("training.rl.train", "train a language model: fastrl train CONFIG.toml [--section.field value ...]"),
    "sft": ("training.stages.sft", "fine-tune on prompts and completions: fastrl sft CONFIG.toml"),
    "dpo": ("training.stages.dpo", "train on preferred and rejected completions: fastrl dpo CONFIG.toml"),
    "reward-model": (
        "training.stages.reward_model",
        "a reward model from ranked completions: fastrl reward-model CONFIG.toml",
    ),
    "sample": (
        "training.stages.sample",
        "completions with their rewards, or the best: fastrl sample CONFIG.toml [--best K]",
    ),
    "report": (
        "training.common.report",
        "a run's curves, samples, timings and config in one HTML file: fastrl report RUN_DIR",
    ),
    "bench": ("bench", "measure the losses on this machine, beside their peers"),
    "doctor": ("doctor", "versions, devices, backends, and why one is missing"),
    "plan": ("planning.command", "which memory plan a linear loss would take within a budget, and what it costs"),
    "plot-gates": ("bench.plot_gates", "draw what each algorithm makes of the ratio: the weight on grad log pi"),
}
#: The modules that must be installed for a command.
_NEEDS: dict[str, Sequence[str]] = dict.fromkeys(("train", "sft", "dpo", "reward-model", "sample"), TRAIN)
_NEEDS |= dict.fromkeys(("report", "plot-gates"), ("matplotlib",))


if __name__ == "__main__":
    sys.exit(main())
