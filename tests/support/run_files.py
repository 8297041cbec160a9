"""A run's config as a file, and what the run leaves in its folder: of its config, or of the folder itself."""

import json
from pathlib import Path

from fastrl.training.commands import COMMANDS
from fastrl.training.run.folder import NUMBERS


def folder_of(run):
    return run if isinstance(run, Path) else run.logging.output_dir


def json_lines(path):
    # Not splitlines: JSON leaves line separators as they are.
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def strict_json(data):
    """The value of JSON in bytes, without what only Python takes for JSON."""

    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    return json.loads(data.decode(), parse_constant=refuse)


def write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def records(run):
    """The lines of metrics.jsonl, but for what was measured before the first step."""
    return [line for line in json_lines(folder_of(run) / "metrics.jsonl") if line["step"]]


def repeatable(run):
    """The lines of metrics.jsonl, without the metrics that no two runs share."""
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in records(run)]


def checkpoints(run):
    return sorted(path.name for path in (folder_of(run) / "checkpoints").iterdir())


def state(run, step):
    """A step's checkpoint: the bytes of its files of tensors, and its numbers, without the config."""
    directory = folder_of(run) / "checkpoints" / f"step-{step:06d}"
    numbers = json.loads((directory / NUMBERS).read_text())
    del numbers["config"]
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}, numbers


def write_toml(path, tables):
    """Write a config as TOML, one dotted key per line. Returns the path as a command takes it."""

    def lines(table, place=""):
        for name, value in table.items():
            if isinstance(value, dict):
                yield from lines(value, f"{place}{name}.")
            elif value is not None:
                yield f"{place}{name} = {json.dumps(value)}\n"

    path.write_text("".join(lines(tables)))
    return str(path)


def config_of(module):
    """The class of the configs that a command's module takes."""
    return next(command.kind for command in COMMANDS.values() if module.__name__.endswith(f".{command.module}"))
