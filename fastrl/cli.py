"""The command `fastrl`. Subcommands are imported when they are called, because a core install has no trainer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from fastrl import __version__
from fastrl.base import dependencies


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
    run, _ = _COMMANDS[options.command]
    try:
        return run(options.arguments)
    except KeyboardInterrupt:
        print("fastrl: interrupted", file=sys.stderr)
        return 130


def _train(argv: list[str]) -> int:
    from fastrl.doctor import missing_for_train

    if missing := missing_for_train():
        return _fail_for_packages("train", missing)
    from fastrl.training.rl.train import main as train

    return _run(train, argv)


def _stage(name: str) -> Callable[[list[str]], int]:
    """The command of a module of fastrl.training.stages."""

    def run(argv: list[str]) -> int:
        from fastrl.doctor import missing_for_train

        if missing := missing_for_train():
            return _fail_for_packages(name, missing)
        return _run(import_module(f"fastrl.training.stages.{name.replace('-', '_')}").main, argv)

    return run


def _bench(argv: list[str]) -> int:
    from fastrl.bench import main as bench

    return bench(argv)


def _doctor(argv: list[str]) -> int:
    from fastrl.doctor import main as doctor

    argparse.ArgumentParser(prog="fastrl doctor", description=_COMMANDS["doctor"][1]).parse_args(argv)
    return doctor()


def _plan(argv: list[str]) -> int:
    from fastrl.planning.table import main as plan

    return plan(argv)


def _report(argv: list[str]) -> int:
    if missing := dependencies.missing(["matplotlib"]):
        return _fail_for_packages("report", missing)
    from fastrl.training.common.report import main as report

    return _run(report, argv)


def _plot_gates(argv: list[str]) -> int:
    if missing := dependencies.missing(["matplotlib"]):
        return _fail_for_packages("plot-gates", missing)
    from fastrl.bench.plot_gates import main as plot_gates

    return _run(plot_gates, argv)


def _run(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """The command's exit status; 2 and one line for a mistake that the user can correct."""
    from fastrl.base.errors import UserError
    from fastrl.planning.budget import BudgetTooSmall

    try:
        return command(argv)
    except UserError as error:
        return _fail(str(error))
    except BudgetTooSmall as error:  # for what no config contains, such as the size of recorded supports
        return _fail(f"training.memory_budget: {error}")


def _fail_for_packages(command: str, missing: list[str]) -> int:
    return _fail(f"{command} needs packages that are not installed: {dependencies.how_to_install(missing)}")


def _fail(message: str) -> int:
    print(f"fastrl: {message}", file=sys.stderr)
    return 2


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "train": (_train, "train a language model: fastrl train CONFIG.toml [--section.field value ...]"),
    "sft": (_stage("sft"), "fine-tune on prompts and completions: fastrl sft CONFIG.toml"),
    "dpo": (_stage("dpo"), "train on preferred and rejected completions: fastrl dpo CONFIG.toml"),
    "reward-model": (_stage("reward-model"), "a reward model from ranked completions: fastrl reward-model CONFIG.toml"),
    "sample": (_stage("sample"), "completions with their rewards, or the best: fastrl sample CONFIG.toml [--best K]"),
    "report": (_report, "a run's curves, samples, timings and config in one HTML file: fastrl report RUN_DIR"),
    "bench": (_bench, "measure the losses on this machine, beside their peers"),
    "doctor": (_doctor, "versions, devices, backends, and why one is missing"),
    "plan": (_plan, "which memory plan a linear loss would take within a budget, and what it costs"),
    "plot-gates": (_plot_gates, "draw what each algorithm makes of the ratio: the weight on grad log pi"),
}


if __name__ == "__main__":
    sys.exit(main())
