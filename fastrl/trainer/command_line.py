"""The command line of ``fastrl train``, which pydantic-settings generates from the config's own models."""

import argparse
from pathlib import Path

from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict

from .config import Config, load_config


class _CommandLine(Config, BaseSettings):
    """Only the command-line source reads it: its values stay text until Config checks them with the file's."""

    model_config = SettingsConfigDict(extra="forbid", cli_avoid_json=True, cli_implicit_flags=False)


def parse_command_line(argv: list[str]) -> tuple[Config, bool]:
    """The config that ``CONFIG.toml --section.field value ...`` describes, and whether ``--resume`` was among it.

    Raises UserError for a file or a value that cannot be used, and SystemExit(2) (argparse) for an unknown option.
    """
    parser = argparse.ArgumentParser(
        prog="fastrl train",
        usage="fastrl train CONFIG [--resume] [--section.field value ...]",
        description="Train a language model by reinforcement learning. Every --section.field overrides one of CONFIG. "
        "SIGTERM and Ctrl-C finish the step, save a checkpoint and exit with 143 and 130; a second one ends at once.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="CONFIG", type=Path, help="TOML file")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in logging.output_dir, to the same end"
    )
    source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        _CommandLine, root_parser=parser, cli_hide_none_type=True
    )
    arguments = vars(parser.parse_args(argv))
    path, resume = arguments.pop("file"), arguments.pop("resume")
    return load_config(path, source(parsed_args=arguments)()), resume
