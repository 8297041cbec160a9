"""`fastrl init`: a commented config for a model and a dataset, from what a look at both shows.

The config is a start that its command takes as it is. What a command chooses well by itself is left to it.
"""

import argparse
import json
import os
import shlex
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import torch

from fastrl import rewards
from fastrl.base.errors import UserError
from fastrl.init.look import EXACT, MATH, ROWS, Look, look
from fastrl.rewards.names import BUILT_IN
from fastrl.training.commands import COMMANDS
from fastrl.training.config.data import Source, is_file
from fastrl.training.config.settings import load_settings
from fastrl.training.models.decoder import max_positions
from fastrl.training.parallel.machine import find_device

FRAME = "reward.py"  # the file of a reward function that is to be written
_TRAINED = 16  # bytes of a parameter: weight, gradient, the optimizer's two moments
_CACHED = 65_536  # tokens of prompts and completions that a GPU draws at a time
_REWARD = '''"""What a completion is worth."""


def reward(prompts, completions, **columns):
    """A number for each completion, the higher the better.

    `prompts`, `completions` and each column of the data hold one entry per completion.
    """
    texts = {texts}
    # For example: return [float("because" in text) for text in texts]
    raise NotImplementedError("write the reward here")
'''


class Line(NamedTuple):
    """A field of a table, and why it has its value. What is off is written as a comment."""

    name: str
    value: Any
    why: str
    off: bool = False


_MICRO = Line("micro_batch_tokens", 8192, "tokens at a time: fewer take less memory", off=True)


def main(argv: list[str]) -> int:
    """`fastrl init --model MODEL --data DATA [--output CONFIG.toml]`. Raises UserError for what the user can fix."""
    parser = argparse.ArgumentParser(
        prog="fastrl init", description="Write a commented config for a model and a dataset.", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="its directory, or its name on the hub")
    parser.add_argument("--data", required=True, help="a JSONL or Parquet file, or a dataset's name on the hub")
    parser.add_argument("--subset", help="of a hub's dataset")
    parser.add_argument("--split", help="of a hub's dataset; the default is train")
    parser.add_argument("--reward", metavar="FILE.py:FUNCTION", help="your reward function, or exact, math, ...")
    parser.add_argument("--output", type=Path, metavar="CONFIG.toml", help="the default is COMMAND.toml")
    print(make(parser.parse_args(argv)))
    return 0


def make(options: argparse.Namespace) -> str:
    """Write the config, and the frame of a reward function where one is needed. Returns what was seen and written.

    Raises UserError for a model and a dataset that no command would take, and for a file that is there already.
    """
    if not options.data.strip():
        raise UserError(f"--data: expected a file or the name of a dataset, got {options.data!r}")
    if is_file(options.data) and (options.subset or options.split):
        raise UserError(f"--subset, --split: a file has none, so leave them out; --data is {options.data}")
    reward = BUILT_IN + options.reward if options.reward in rewards.__all__ else options.reward
    seen = look(options.model, Source(options.data, options.subset, options.split or "train"), reward)
    command = seen.task.command
    path = options.output or Path(f"{command}.toml")
    files, following = {path: text_of(tables_of(seen, options, path))}, f"fastrl {command} {shlex.quote(str(path))}"
    if command == "train" and seen.task.reward is None:
        frame, text = path.with_name(FRAME), 'completion[-1]["content"]' if seen.is_chat else "completion"
        files[frame] = _REWARD.format(texts=f"[{text} for completion in completions]")
        following = f"write the reward in {frame}, then {following}"
    for file in files:
        if file.exists():
            option = "--output" if file == path else "--reward FILE.py:FUNCTION"
            raise UserError(f"{file}: is there already; remove it, or name another by {option}")
    try:
        with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent) as trial:
            trial.write(files[path])
            trial.flush()
            load_settings(COMMANDS[command].kind, Path(trial.name))
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot write the config: {reason}") from error
    return "\n".join([*_summary(seen, options), f"written: {', '.join(map(str, files))}", f"next: {following}"])


def _summary(seen: Look, options: argparse.Namespace) -> list[str]:
    context, rows = max_positions(seen.model), len(seen.rows)
    lines = [
        f"model: {options.model}: {_model_text(seen)}" + ("" if context is None else f", a context of {context:,}"),
        f"data: {options.data}: {rows:,} rows{' or more' if rows == ROWS else ''} with {seen.columns}",
        f"  prompts: {seen.form}; {seen.prompts}",
    ]
    if seen.others is not None:
        lines.append(f"  {'answers' if seen.task.command == 'train' else 'with their answers'}: {seen.others}")
    return [*lines, f"command: {seen.task.command}, because {seen.task.why}"]


def _model_text(seen: Look) -> str:
    parameters = seen.model.num_parameters()
    amount = f"{parameters / 1e9:.2f} billion" if parameters >= 10**8 else f"{parameters:,}"
    return f"{seen.model.config.model_type}, {amount} parameters"


# --- the tables -------------------------------------------------------------------------------------------------------


def tables_of(seen: Look, options: argparse.Namespace, path: Path) -> dict[str, list[Line]]:
    """The config's tables for what was seen; `path` is where it goes."""
    device = find_device("auto")
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    room = _room(seen, memory > 0)
    tables = {"model": _model(seen, _place(options.model, path), memory), "data": _data(seen, options, path, room[0])}
    if seen.task.command == "train":
        tables |= _sampling(seen, path, memory > 0, room)
    else:
        tables["training"] = [Line("epochs", 1, "passes over the data"), _MICRO]
    if seen.task.command == "dpo":
        tables["loss"] = [Line("name", "dpo", "or another of fastrl.PREFERENCES")]
    names = (path.stem if number == 1 else f"{path.stem}-{number}" for number in count(1))
    name = next(name for name in names if not (path.parent / "runs" / name).exists())
    return tables | {"logging": [Line("output_dir", f"runs/{name}", "metrics, checkpoints and the report")]}


def _model(seen: Look, name: str, memory: int) -> list[Line]:
    """`memory` is that of the GPU in bytes, 0 without one."""
    lines, parameters = [Line("path", name, _model_text(seen))], seen.model.num_parameters()
    if memory and _TRAINED * parameters > 0.7 * memory and seen.task.command != "reward-model":
        why = f"adapters (peft): to train all weights takes {_TRAINED * parameters / 2**30:.0f} GiB"
        lines.append(Line("lora_rank", 16, why))
    lines.append(Line("dtype", "bfloat16", "of the matrix products, on a GPU; weights stay float32", off=not memory))
    if parameters >= 10**9:
        lines.append(Line("gradient_checkpointing", True, "less memory for a third more time"))
    return lines


def _data(seen: Look, options: argparse.Namespace, path: Path, longest: int) -> list[Line]:
    lines = [Line("path", _place(options.data, path), f"rows with {seen.columns}")]
    given = {"subset": options.subset, "split": options.split}
    lines += [Line(name, value, "of the dataset") for name, value in given.items() if value is not None]
    if seen.task.fields:
        lines.append(Line("fields", seen.task.fields, "what the command reads = the column that holds it"))
    if seen.system_prompt is not None:
        lines.append(Line("system_prompt", seen.system_prompt, f'the prompts are {seen.form}; "": no system message'))
    if seen.is_chat and "enable_thinking" in str(seen.tokenizer.chat_template):
        lines.append(Line("chat_template_kwargs", {"enable_thinking": False}, "answers without a thought", off=True))
    if seen.task.command == "train":
        lines.append(Line("max_prompt_tokens", longest, f"the prompts have {seen.prompts}"))
        lines.append(Line("overlong_prompts", "drop", "longer ones are left out, and counted"))
    if seen.held_out is not None:
        return [*lines, Line("eval_split", seen.held_out, "rows that are never trained on")]
    return [*lines, Line("eval_path", "held_out.jsonl", "rows of the same form, never trained on", off=True)]


def _sampling(seen: Look, path: Path, on_gpu: bool, room: tuple[int, int]) -> dict[str, list[Line]]:
    """The tables of `fastrl train` alone."""
    reward, why = seen.task.reward, seen.task.why
    file, colon, name = (reward or "").rpartition(":")
    function = f"{_place(file, path)}:{name}" if colon else reward or f"{FRAME}:reward"  # beside the config
    prompts, completions = min(32 if on_gpu else 8, len(seen.rows)), 8 if on_gpu else 4
    rollout = [
        Line("prompts_per_step", prompts, "more give a steadier gradient"),
        Line("num_generations", completions, "completions of each prompt, which are compared with each other"),
        Line("max_new_tokens", room[1], "ends a completion: raise it if the metric truncated is high"),
    ]
    if on_gpu and (size := max(_CACHED // sum(room), 1)) < prompts * completions:
        rollout.append(Line("batch_size", size, "completions that are drawn at a time"))
    return {
        "reward": [
            Line("function", function, why if seen.task.reward else f"to be written: {why}"),
            Line("workers", 4, "processes, in which a call may take 10 seconds", off=reward != MATH),
        ],
        "objective": [Line("name", "dapo", "without a reference model; or another of fastrl.PRESETS")],
        "rollout": rollout,
        "training": [Line("steps", 100, "each with new completions"), _MICRO],
        "evaluation": [Line("every", 25, "steps: completions of the held-out prompts", off=seen.held_out is None)],
    }


def _room(seen: Look, on_gpu: bool) -> tuple[int, int]:
    """The most tokens of a prompt and of a completion, which the model's context holds together."""
    new, longest, context = (
        1024 if seen.is_chat and on_gpu else 256,
        _rounded(seen.prompts.longest),
        max_positions(seen.model),
    )
    if seen.others is not None:  # the answers that completions are compared with
        repeats = seen.task.reward == EXACT and not seen.is_chat
        new = max(16, 2 * seen.others.longest) if repeats else max(new, _rounded(seen.others.most))
    if context is None:
        return longest, new
    new = min(new, max(context - seen.prompts.longest, context // 4))
    longest = min(longest, context - new)
    if seen.prompts.shortest > longest and seen.task.command == "train":
        raise UserError(
            f"the model's context of {context} tokens leaves {longest} for a prompt beside a completion of {new}: all "
            f"prompts are longer, with {seen.prompts}"
        )
    return longest, new


def _rounded(tokens: int) -> int:
    return -(-tokens // 64) * 64


# --- the text ---------------------------------------------------------------------------------------------------------


def text_of(tables: dict[str, list[Line]]) -> str:
    """The tables as TOML, with a comment behind each field."""
    lines = ["# Written by `fastrl init`, to be changed. Paths are relative to this file."]
    for table, fields in tables.items():
        lines += ["", f"[{table}]"]
        for name, value, why, off in fields:
            comment = " ".join(why.split())  # a column's name may hold anything
            lines.append(f"{'# ' if off else ''}{name} = {_toml(value)}  # {comment}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _place(path: str, config: Path) -> str:
    """A path as the config names it: relative to the config, unless it is absolute or a hub's name."""
    return os.path.relpath(path, config.parent) if os.path.exists(path) and not os.path.isabs(path) else path
