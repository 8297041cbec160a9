"""Writes fastrl/help/: what `fastrl COMMAND --help` prints, from the parsers and the models of the configs.

python docs/site/help_texts.py
"""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from textwrap import fill
from unittest.mock import patch

from config_pages import facts, tables_of
from meanings import meaning

from fastrl.cli import MODULES, help_file
from fastrl.training.commands import COMMANDS
from fastrl.training.config.settings import fields, usage_of

# Of the commands that train.
_RESUME = "go on from the newest checkpoint in logging.output_dir, if it holds one, to the same end"
_NPROC = "the number of processes of this machine that share the work, one for each GPU, as torchrun starts them"
_SIGNALS = (
    "SIGTERM, SIGHUP and Ctrl-C finish the step, save a checkpoint and exit with 143, 129 and 130; a second one ends "
    "at once."
)
WIDTH = 100
_filled = partial(fill, width=WIDTH, break_on_hyphens=False, break_long_words=False)


def help_text(command: str) -> str:
    """What `fastrl COMMAND --help` prints."""
    return _of_config(command) if command in COMMANDS else _of_parser(MODULES[command])


def _of_parser(module: str) -> str:
    """What the module's argparse parser prints."""
    text = io.StringIO()
    with patch.dict(os.environ, COLUMNS=str(WIDTH)), redirect_stdout(text):
        try:
            import_module(f"fastrl.{module}").main(["--help"])
        except SystemExit:
            return text.getvalue()
    raise AssertionError(f"{module}: main() went on after --help")


def _of_config(name: str) -> str:
    """The options of a command that reads a config, by table."""
    command = COMMANDS[name]
    short = {option: f"--{other}" for other, option in command.short.items()}
    lines = [
        f"usage: {usage_of(name, ['resume'] * command.trains, [*command.short, *['nproc'] * command.trains])}",
        "",
        _filled(f"{command.about} {_SIGNALS}" if command.trains else command.about),
        "",
        _filled(
            "CONFIG is a TOML file. Every option below is also a field of it, and wins over it: --model.path x stands"
            ' for path = "x" in the table [model]. A list is given with commas between, a table as JSON.'
        ),
        "",
        *([_option("--resume", "", _RESUME)] if command.trains else []),
        *([_option("--nproc", "integer, default 1", _NPROC)] if command.trains else []),
    ]
    tables, seen = tables_of(command.kind), None
    for (*above, field_name), field in fields(command.kind):
        if (table := ".".join(above)) != seen:
            seen = table
            model, absent = tables[table]
            about = f"[{table}] {(model.__doc__ or '').strip()}{' Absent by default.' if absent else ''}"
            lines += ["", _filled(about)]
        option = f"{table}.{field_name}"
        names = ", ".join(filter(None, (f"--{option}", short.get(option))))
        lines.append(_option(names, facts(field).replace("`", ""), meaning(tables[table][0], field_name)))
    return "\n".join(lines) + "\n"


def _option(names: str, about: str, text: str) -> str:
    indent = " " * 6
    first = _filled(f"  {names}  {about}".rstrip(), subsequent_indent=indent)
    return f"{first}\n{_filled(text, initial_indent=indent, subsequent_indent=indent)}"


if __name__ == "__main__":
    for command in (*COMMANDS, *MODULES):
        help_file(command).write_text(help_text(command), encoding="utf-8")
