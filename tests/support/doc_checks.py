"""What the pages' code blocks are held against: the names of packages, the configs of commands, their parsers."""

from __future__ import annotations

import ast
import inspect
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from doc_pages import Block, Page
from places import ROOT

import fastrl
from fastrl.cli import main

# --- Python -----------------------------------------------------------------------------------------------------------


def code_of(block: Block) -> Any:
    """The compiled block. Its lines have the numbers of the page, so that a traceback shows them there."""
    return compile("\n" * block.line + block.text, str(ROOT / block.page.name), "exec")


def wrong_names(block: Block) -> list[str]:
    """What a block that is not run imports, reads of fastrl or passes to it, and that does not exist."""
    found = wrong_in(ast.parse(block.text), {})
    return [f"{block.page.name}:{block.line + line}: {what}" for line, what in found]


def wrong_in_prose(page: Page) -> list[str]:
    """The same of the code within sentences, where fastrl's own names stand alone too; and files that are not there."""
    found = []
    for line, code in page.spans:
        folder = code.partition("/")[0]
        if (
            re.fullmatch(r"(?!\.\./)[\w.-]+(/[\w.-]+)+/?", code)
            and (ROOT / folder).is_dir()
            and not (ROOT / code).exists()
        ):
            found.append(f"{page.name}:{line}: there is no {code}")
        if code in LOGGERS or re.fullmatch(r"[\w.]*\.[A-Z]+", code):  # a name to be put in
            continue
        try:
            tree = ast.parse(code)
        except SyntaxError:
            continue
        own = {name: getattr(fastrl, name) for name in fastrl.__all__}
        found += [f"{page.name}:{line}: `{code}`: {what}" for _, what in wrong_in(tree, own)]
    return found


#: Whose names are not those of modules.
LOGGERS = ("fastrl.cpp", "fastrl.trl", "fastrl.verl")


def wrong_in(tree: ast.AST, known: dict[str, Any]) -> list[tuple[int, str]]:
    """The lines of what does not exist, and what it is. `known`: names beside fastrl and torch, and what they are."""
    found: list[tuple[int, str]] = []
    bound: dict[str, Any] = {**known, "fastrl": fastrl, "torch": torch}
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Import):
                _bind_modules(node, bound)
            elif isinstance(node, ast.ImportFrom):
                _bind_names(node, bound)
        except _Missing as error:
            found.append((node.lineno, str(error)))
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Attribute):
                _value(node, bound)
            elif isinstance(node, ast.Call):
                _check_arguments(node, _value(node.func, bound))
        except _Missing as error:
            found.append((node.lineno, str(error)))
    return sorted(set(found))


class _Missing(Exception):
    pass


_UNKNOWN = object()


def _module(name: str) -> ModuleType | None:
    """The module, or None if it belongs to a package that is not installed, or needs one."""
    package = name.partition(".")[0]
    if find_spec(package) is None:
        return None
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == package:
            raise _Missing(f"there is no module {error.name}") from error
        return None


def _bind_modules(node: ast.Import, bound: dict[str, Any]) -> None:
    for alias in node.names:
        module = _module(alias.name)
        whole = module if alias.asname else _module(alias.name.partition(".")[0])
        bound[alias.asname or alias.name.partition(".")[0]] = _UNKNOWN if whole is None else whole


def _bind_names(node: ast.ImportFrom, bound: dict[str, Any]) -> None:
    module = _module(node.module or "")
    for alias in node.names:
        bound[alias.asname or alias.name] = _UNKNOWN
        if module is None or alias.name == "*":
            continue
        # A package that imports lazily lists its names without importing what they need.
        if alias.name not in dir(module) and not hasattr(module, alias.name):
            try:
                import_module(f"{module.__name__}.{alias.name}")
            except ModuleNotFoundError as error:
                raise _Missing(f"{module.__name__} has no {alias.name}") from error
        if module.__name__.partition(".")[0] == "fastrl":
            bound[alias.asname or alias.name] = getattr(module, alias.name)


def _value(node: ast.expr, bound: dict[str, Any]) -> Any:
    """What a dotted name is, as far as it leads through fastrl's and torch's modules and classes."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, _UNKNOWN)
    if not isinstance(node, ast.Attribute):
        return _UNKNOWN
    owner = _value(node.value, bound)
    if not isinstance(owner, ModuleType | type):
        return _UNKNOWN
    name = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    if name.partition(".")[0] not in ("fastrl", "torch"):
        return _UNKNOWN
    if hasattr(owner, node.attr):
        return getattr(owner, node.attr)
    if isinstance(owner, ModuleType) and hasattr(owner, "__path__"):
        try:
            return _module(f"{name}.{node.attr}") or _UNKNOWN
        except _Missing:
            pass
    raise _Missing(f"{owner.__name__} has no {node.attr}")


def _check_arguments(call: ast.Call, function: Any) -> None:
    if function is _UNKNOWN or not str(getattr(function, "__module__", "")).startswith("fastrl"):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    positional = [x for x in call.args if not (isinstance(x, ast.Constant) and x.value is ...)]
    if any(isinstance(x, ast.Starred) for x in positional):
        positional = []
    keywords = {x.arg: None for x in call.keywords if x.arg is not None}
    try:
        signature.bind_partial(*positional, **keywords)
        made = getattr(fastrl, str(signature.return_annotation), None)
        if isinstance(made, type) and any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values()):
            # A preset: what it does not name is a field of what it makes.
            named = {name for name, x in signature.parameters.items() if x.kind is not x.VAR_KEYWORD}
            inspect.signature(made).bind_partial(**{name: None for name in keywords if name not in named})
    except TypeError as error:
        raise _Missing(f"{function.__name__}{signature}: {error}") from error


# --- TOML -------------------------------------------------------------------------------------------------------------

_STAGE = {"model": {"path": "owner/model"}, "data": {"path": "data.jsonl"}}
_SAMPLED = {**_STAGE, "reward": {"function": "reward.py:reward"}}
#: Command -> the least that a config says.
CONFIGS: dict[str, dict[str, dict[str, str]]] = {
    "train": {**_SAMPLED, "objective": {"name": "grpo"}},
    "sft": _STAGE,
    "dpo": _STAGE,
    "reward-model": _STAGE,
    "sample": _SAMPLED,
}
#: Table -> the fields of which one is enough, so that a block that has it is given no other.
_ENOUGH = {"model": ("path", "config"), "reward": ("function", "model", "steps")}


def check_config(block: Block, folder: Path) -> None:
    """Raises an error of pydantic's or ValueError for a part of a config that the command would not take."""
    from fastrl.training.commands import COMMANDS  # needs pydantic
    from fastrl.training.config.settings import load_settings

    command = block.notes.get("config") or "train"
    if command not in CONFIGS:
        raise ValueError(f"config: expected one of {', '.join(CONFIGS)}, got {command!r}")
    part = tomllib.loads(block.text)
    base = part.pop("base", None)
    tree = {table: dict(fields) for table, fields in CONFIGS[command].items()}
    for table, fields in _ENOUGH.items():
        if any(name in part.get(table, {}) for name in fields):
            tree.pop(table, None)
    if "tokenizer" not in part.get("model", {}) and "config" in part.get("model", {}):
        tree["model"] = {"tokenizer": "tokenizer"}
    if "evaluation" in part:
        tree["data"]["eval_path"] = "eval.jsonl"
    if (part.get("distillation") or {}).get("policy_coef") == 0:
        del tree["reward"], tree["objective"]
    path = folder / "least.toml"
    path.write_text("".join(f"[{table}]\n{_assignments(fields)}" for table, fields in tree.items()))
    if base is not None:  # as if the block were a file beside the recipes
        path = next(x for x in (ROOT / base, ROOT / "examples/recipes" / base) if x.exists())
    load_settings(COMMANDS[command].kind, path, part)


def _assignments(fields: dict[str, str]) -> str:
    return "".join(f'{name} = "{value}"\n' for name, value in fields.items())


def least_config(command: str) -> str:
    """The text of the shortest config of a command."""
    return "".join(f"[{table}]\n{_assignments(fields)}" for table, fields in CONFIGS[command].items())


# --- shell ------------------------------------------------------------------------------------------------------------

#: Files that a page's reader has or makes: they need not exist.
PLACEHOLDERS = frozenset(
    [
        "config.toml",
        "my_config.toml",
        "train.toml",
        "sft.toml",
        "dpo.toml",
        "sample.toml",
        "my_script.py",
        "train.py",
        "script.py",
    ]
)
_BEFORE = ("env", "exec", "nohup", "sudo", "time", "do", "then", "else", "if", "while", "!", "{")


def logical_lines(text: str) -> list[str]:
    """The lines of a shell's text without comments, those that are continued in one piece."""
    text = re.sub(r"(?ms)<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n.*?^\s*\2$", r"\3", text)  # without here-documents
    lines, line, quote, i = [], "", "", 0
    while i < len(text):
        char = text[i]
        if char == "\\" and quote != "'" and i + 1 < len(text):
            line += "" if text[i + 1] == "\n" else text[i : i + 2]
            i += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (not line or line[-1] in " \t;("):
            i = text.find("\n", i)
            continue
        elif char == "\n":
            lines.append(line)
            line = ""
            i += 1
            continue
        line += char
        i += 1
    return [x.strip() for x in [*lines, line] if x.strip()]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command in a sh block, without assignments and redirections before or after them."""
    for line in logical_lines(block.text):
        line = re.sub(r"(?<=\s)[012](?=[<>])", "", line)  # the number of what is redirected
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        words: list[str] = []
        skip = False
        for word in [*lexer, ";"]:
            if skip:
                skip = False
            elif re.fullmatch(r"[<>&|();]*[<>][<>&|();]*", word):
                skip = True
            elif re.fullmatch(r"[();|&]+", word):
                if words:
                    yield words
                words = []
            elif words or not (re.match(r"[A-Za-z_]\w*=", word) or word in _BEFORE):
                words.append(word)


def wrong_command(words: list[str], page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Why a command on a page would fail, as far as can be said without running it."""
    program, rest = Path(words[0]).name, words[1:]
    if program == "$":
        return "a sh block has no prompt `$`; what a command prints has a text block of its own"
    if program == "fastrl":
        return _wrong_fastrl(rest, page, folder, monkeypatch)
    if program == "make":
        unknown = [x for x in rest if "=" not in x and not x.startswith("-") and x not in _targets()]
        return f"the Makefile has no target {', '.join(unknown)}" if unknown else None
    if "pip" in (program, *rest[:2]):
        asked = [re.fullmatch(r"(?:\.|.*fastrl_lm-[^/]*\.whl|fastrl-lm.*?)\[([^]]*)\].*", x) for x in rest]
        extras = {extra.strip() for x in asked if x for extra in x[1].split(",")}
        unknown = sorted(extras - set(_project()["optional-dependencies"]))
        return f"pyproject.toml has no extra {', '.join(unknown)}" if unknown else None
    if re.fullmatch(r"python[\d.]*|torchrun|pytest|bash|sh", program):
        return _wrong_script(program, rest, page)
    return None


def _wrong_script(program: str, rest: list[str], page: Page) -> str | None:
    if rest[:1] == ["-c"]:
        try:
            compile(rest[1], "python -c", "exec")
        except SyntaxError as error:
            return str(error)
        return None
    module = rest[rest.index("-m") + 1] if "-m" in rest and program != "pytest" else ""
    if module.partition(".")[0] == "fastrl" and find_spec(module) is None:
        return f"there is no module {module}"
    scripts = [x.partition("::")[0] for x in rest if x.partition("::")[0].endswith((".py", ".sh"))]
    if program == "pytest" or module == "pytest":
        scripts += [x for x in rest if x.startswith(("tests", "benchmarks"))]
    missing = [x for x in scripts if x not in PLACEHOLDERS | page.files.keys() and not (ROOT / x).exists()]
    return f"there is no file {', '.join(missing)}" if missing else None


@cache
def _targets() -> frozenset[str]:
    """The Makefile's targets that are names."""
    rules = re.findall(r"(?m)^([a-z][a-z -]*):(?!=)", (ROOT / "Makefile").read_text())
    return frozenset(target for rule in rules for target in rule.split())


@cache
def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


class _Read(BaseException):
    """Raised in place of the command's work, when its arguments have been read."""


#: Command -> the function that does its work, in its module, after its arguments have been read.
_WORK = {
    "init": "init.command.make",
    "train": "training.rl.train.train",
    "sft": "training.stages.sft.train",
    "dpo": "training.stages.dpo.train",
    "reward-model": "training.stages.reward_model.train",
    "sample": "training.stages.sample.sample",
    "report": "report.report.write_report",
    "bench": "bench.machine.describe",
    "doctor": "bench.machine.describe",
    "plot-gates": "bench.plot_gates.figure",
}


def _wrong_fastrl(words: list[str], page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Why `fastrl WORDS` would not begin its work: the command itself reads its arguments and its config."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Read

    command = words[0] if words else ""
    if command in CONFIGS:
        monkeypatch.chdir(ROOT)
        words = [command, *(_config_file(x, command, page, folder) for x in words[1:])]
    else:
        monkeypatch.chdir(folder)
    # Plans are made: that takes no time, and finds what is wrong with their numbers.
    if command in _WORK:
        module, _, name = _WORK[command].rpartition(".")
        monkeypatch.setattr(import_module(f"fastrl.{module}"), name, stop)
    if "--nproc" in words:
        monkeypatch.setattr(import_module("fastrl.training.parallel.launch"), "launch", stop)
    if command == "bench":
        monkeypatch.setattr(import_module("fastrl.bench.command"), "_check_packages", lambda *args: None)
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            status = main(words)
    except _Read:
        return None
    except SystemExit as error:
        status = error.code or 0
    return said.getvalue().strip() if status else None


def _config_file(word: str, command: str, page: Page, folder: Path) -> str:
    """The word, or where it names a config of the reader's, a file: the page's own, else the shortest config."""
    if not word.endswith(".toml") or (word not in PLACEHOLDERS and word not in page.files) or (ROOT / word).exists():
        return word
    path = folder / word
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.files.get(word) or least_config(command))
    return str(path)
