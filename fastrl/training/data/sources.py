"""Rows from a JSONL file, a Parquet file, or a dataset that the library `datasets` loads by its name or directory.

Rows are read as they are asked for, never all at once. Every error names the file and line, or the dataset and row
(counted from 1).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from fastrl.base.errors import UserError
from fastrl.training.config.data import FILES, Source, is_file
from fastrl.training.config.settings import import_for

Rows = Iterator[tuple[str, dict[str, Any]]]


def rows_of(source: Source) -> Rows:
    """Where each row is, for messages, and the row. Raises UserError if there are none, or one cannot be read."""
    hint = ""
    if not is_file(source.path):
        rows = _read_dataset(source)
    elif source.path.endswith(".parquet"):
        rows = _read_parquet(Path(source.path))
    else:
        rows, hint = _read_json_lines(Path(source.path)), "; expected one JSON object per line"
    where = ""
    for where, row in rows:
        yield where, _renamed(source, row, where)
    if not where:
        raise UserError(f"{source.name}: the dataset is empty{hint}")


def _renamed(source: Source, row: dict[str, Any], where: str) -> dict[str, Any]:
    named = {}
    kept = {name: value for name, value in row.items() if name not in source.fields.values()}
    for name, column in source.fields.items():
        named[name] = field_of(row, column, where, ", which data.fields names")
        if name in kept:
            raise UserError(
                f'{where}: data.fields names "{column}" as "{name}", but the row has another field of that name; '
                f'give that one a name too: fields = {{ {name} = "{column}", other = "{name}" }}'
            )
    return named | kept


def field_of(row: Mapping[str, Any], name: str, where: str, because: str = "") -> Any:
    """The value of a field that a row must have."""
    if name not in row:
        raise UserError(f'{where}: no field "{name}"{because}; the row has {", ".join(row) or "no fields"}')
    return row[name]


def _read_json_lines(path: Path) -> Rows:
    """The objects of a JSONL file with their file:line; empty lines are skipped."""
    read_as = "" if path.suffix in FILES else "; what does not end in .parquet is read as JSONL"
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot read the dataset: {error.strerror}") from error
    with file:
        for number, raw in enumerate((raw for line in file for raw in line.splitlines()), start=1):
            where = f"{path}:{number}"
            try:
                text = raw.decode("utf-8-sig").strip()  # some editors begin a file with U+FEFF
                row = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line{read_as}"
                ) from error
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not valid JSON: {error.msg} (column {error.colno}){read_as}") from error
            except (ValueError, RecursionError) as error:  # a number too long, or brackets nested too deep
                raise UserError(f"{where}: cannot be read: {error}") from error
            if not text:
                continue
            if not isinstance(row, dict):
                raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
            yield where, row


def _read_parquet(path: Path) -> Rows:
    """The rows of a Parquet file, a thousand in memory at a time."""
    if not path.is_file():  # its other errors do not say so in a line
        raise UserError(f"{path}: cannot read the dataset: No such file or directory")
    arrow = import_for(f"data.path = {str(path)!r}", "pyarrow")
    parquet = import_for("data.path", "pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(1000) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{path}: row {number}", row
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot read the dataset as Parquet: {_line(error)}") from error


def _read_dataset(source: Source) -> Rows:
    """The rows of a split that `datasets` loads. It runs no code that comes with a dataset."""
    missing = "" if Path(source.path).is_dir() else " (no such file, so the name of a dataset)"
    datasets = import_for(f"data.path = {source.path!r}{missing}", "datasets")
    try:
        rows = datasets.load_dataset(source.path, source.subset, split=source.split, streaming=source.streaming)
    except Exception as error:  # a file of the dataset, or the network, makes it raise nearly anything
        what = f"data.subset = {source.subset!r}, data.split or eval_split = {source.split!r}"
        raise UserError(f"{source.path}: cannot load the dataset{missing} with {what}: {_line(error)}") from error
    number, name = 0, source.name
    try:
        for number, row in enumerate(rows, start=1):
            yield f"{name}: row {number}", row
    except Exception as error:  # as above
        raise UserError(f"{name}: cannot read row {number + 1}: {_line(error)}") from error


def splits_of(source: Source) -> list[str]:
    """The names of the splits that the source's dataset has; a file has none."""
    if is_file(source.path):
        return []
    datasets = import_for("data.path", "datasets")
    try:
        names: list[str] = datasets.get_dataset_split_names(source.path, source.subset)
    except Exception as error:  # as above
        raise UserError(f"{source.name}: cannot list the dataset's splits: {_line(error)}") from error
    return names


def _line(error: BaseException) -> str:
    """An error's message as one line; of an error that `datasets` made of another one that other's, which says why."""
    while type(error).__name__.startswith("DatasetGeneration") and error.__cause__ is not None:
        error = error.__cause__
    text = shorten(str(error), 400, placeholder=" ...") or type(error).__name__
    return text if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: {text}"
