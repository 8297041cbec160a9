"""Rows of JSONL, Parquet and datasets' directories: the same from each, by their names, and what is wrong in a line."""

import datetime
import json

import pyarrow
import pyarrow.parquet
import pytest
from mistakes import error_of

from fastrl.base import dependencies
from fastrl.base.errors import UserError
from fastrl.training.config import settings
from fastrl.training.config.data import HeldOutConfig, Source
from fastrl.training.config.settings import load_settings, parse_command_line
from fastrl.training.data.sources import rows_of

ROWS = [{"question": f"{n}=", "answer": f"#### {n}"} for n in range(1, 6)]
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.parquet}
  - {split: test, path: main/test.parquet}
- config_name: other
  data_files:
  - {split: train, path: main/test.parquet}
---
"""


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path, monkeypatch):
    """No test reaches for the hub, or writes into the user's cache."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def dataset(tmp_path):
    """A dataset's directory as it is on the hub: subsets main and other, splits train and test."""
    write_parquet(tmp_path / "set" / "main" / "train.parquet", ROWS)
    write_parquet(tmp_path / "set" / "main" / "test.parquet", ROWS[:2])
    (tmp_path / "set" / "README.md").write_text(CARD)
    return str(tmp_path / "set")


@pytest.fixture
def each(tmp_path, dataset, write_rows):
    """The same rows in every form."""

    def each(**options):
        yield Source(str(write_rows(ROWS)), **options)
        yield Source(write_parquet(tmp_path / "rows.parquet", ROWS), **options)
        for streaming in (False, True):
            yield Source(dataset, "main", streaming=streaming, **options)

    return each


def test_every_form_has_the_same_rows(each):
    for source in each():
        assert [row for _, row in rows_of(source)] == ROWS, source


def test_columns_get_other_names_and_the_rest_keep_their_own(each):
    for source in each(fields={"prompt": "question"}):
        assert next(rows_of(source))[1] == {"prompt": "1=", "answer": "#### 1"}
    swapped, *_ = each(fields={"question": "answer", "answer": "question", "again": "question"})
    assert next(rows_of(swapped))[1] == {"question": "#### 1", "answer": "1=", "again": "1="}


def test_errors_say_which_row(each):
    places = [error_of(list, rows_of(source)) for source in each(fields={"prompt": "text"})]
    assert [place.split(": no field")[0].rsplit("/", 1)[1] for place in places] == [
        "rows.jsonl:1",
        "rows.parquet: row 1",
        "set (main, train): row 1",
        "set (main, train): row 1",
    ]
    assert all('no field "text", which data.fields names; the row has question, answer' in place for place in places)
    for source in each(fields={"answer": "question"}):
        assert 'names "question" as "answer", but the row has another field of that name' in error_of(
            list, rows_of(source)
        )


def test_splits_and_subsets(dataset):
    def read(*options):
        return [row for _, row in rows_of(Source(dataset, *options))]

    assert read("main", "test") == read("other", "train") == ROWS[:2]
    for options, expected in {
        (None, "train"): "pick one among the available configs: ['main', 'other']",
        ("nope", "train"): "'nope' not found. Available: ['main', 'other']",
        ("main", "nope"): "Unknown split \"nope\". Should be one of ['train', 'test'].",
    }.items():
        error = error_of(read, *options)
        assert error.startswith(f"{dataset}: cannot load the dataset with data.subset = {options[0]!r}")
        assert expected in error and "\n" not in error


def test_files_that_cannot_be_read(tmp_path, each):
    def error(path):
        return error_of(list, rows_of(Source(str(path))))

    for name in ("none.jsonl", "none.parquet", "none/rows.jsonl"):
        assert error(tmp_path / name) == f"{tmp_path / name}: cannot read the dataset: No such file or directory"
    assert "owner/none" in error("owner/none") and "no such file, so the name of a dataset" in error("owner/none")
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1" * 9)
    assert error(damaged).startswith(f"{damaged}: cannot read the dataset as Parquet: ")
    (tmp_path / "set" / "main" / "train.parquet").write_bytes(b"PAR1" * 9)
    assert "cannot load the dataset with" in error_of(list, rows_of(Source(str(tmp_path / "set"), "main")))
    empty = write_parquet(tmp_path / "empty.parquet", [])
    assert error(empty) == f"{empty}: the dataset is empty"
    (tmp_path / "empty").mkdir()
    assert "doesn't contain any data files" in error(tmp_path / "empty")
    (tmp_path / "empty" / "train.jsonl").write_text('{"prompt": ')
    assert "JSON parse error" in error(tmp_path / "empty")
    for name, content in {"rows.pq": b"PAR1\xff", "rows.csv": b"prompt"}.items():
        (tmp_path / name).write_bytes(content)
        assert error(tmp_path / name).endswith("; what does not end in .parquet is read as JSONL")


def test_a_parquet_file_that_ends_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "rows.parquet"
    with pyarrow.parquet.ParquetWriter(path, pyarrow.schema([("prompt", pyarrow.string())])) as writer:
        for n in range(3):
            writer.write_table(pyarrow.table({"prompt": [f"{n}" * 4000]}))
    content = path.read_bytes()
    path.write_bytes(content[:20] + b"\xff" * 40 + content[60:])
    assert error_of(list, rows_of(Source(str(path)))).startswith(f"{path}: cannot read the dataset as Parquet: ")


def test_what_is_not_installed_is_named(tmp_path, dataset, monkeypatch):
    def missing(package):
        raise ImportError(f"No module named {package!r}")

    parquet = write_parquet(tmp_path / "rows.parquet", ROWS)
    monkeypatch.setattr(settings, "import_module", missing)
    assert error_of(list, rows_of(Source(parquet))).endswith("pip install pyarrow")
    for path in (dataset, "owner/name"):
        error = error_of(list, rows_of(Source(path)))
        assert path in error and error.endswith(f"pip install '{dependencies.REQUIREMENTS['datasets']}'")


def test_columns_of_other_types_are_kept(tmp_path):
    day = datetime.date(2026, 1, 2)
    path = write_parquet(tmp_path / "rows.parquet", [{"prompt": "1=", "day": day, "parts": [{"x": 1}]}])
    assert next(rows_of(Source(path)))[1] == {"prompt": "1=", "day": day, "parts": [{"x": 1}]}


# --- the table of a config --------------------------------------------------------------------------------------------


@pytest.fixture
def parse(tmp_path):
    def parse(text):
        (tmp_path / "config.toml").write_text(text)
        return load_settings(HeldOutConfig, tmp_path / "config.toml")

    return parse


def test_files_are_paths_even_if_they_are_missing_and_other_names_the_hubs(parse, tmp_path):
    (tmp_path / "here").write_text("")
    for text in ("none.jsonl", "data/none.parquet", "none.json", "here", "./x", "a/b/c"):
        assert parse(f"path = '{text}'").source.path == str(tmp_path / text)
    for text in ("gsm8k", "openai/gsm8k", "owner/name-1.5"):
        assert parse(f"path = '{text}'").source.path == text


def test_held_out_rows_are_those_of_a_path_a_split_or_both(parse, tmp_path):
    def held_out(text):
        source = parse("path = 'owner/name'\nsubset = 'main'\n" + text).eval_source
        return source and (source.path, source.subset, source.split)

    assert held_out("") is None
    assert held_out("eval_split = 'dev'") == ("owner/name", "main", "dev")
    assert held_out("eval_path = 'owner/other'") == ("owner/other", "main", "test")
    assert held_out("eval_path = 'eval.jsonl'")[0] == str(tmp_path / "eval.jsonl")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("path = ' '", "path: expected a file or the name of a dataset, got ' '"),
        ("path = 'x.jsonl'\nsplit = 'train'", "split: a file has no splits"),
        ("path = 'x.jsonl'\neval_split = 'test'", "eval_split: a file has no splits"),
        ("path = 'x.jsonl'\nsubset = 'main'", "subset: a file has no subsets"),
        ("path = 'x.jsonl'\nchat_template_kwargs = { tokenize = true }", '"tokenize" is not for a dataset to choose'),
        ("path = 'x.jsonl'\nfields = { prompt = 1 }", "fields.prompt: Input should be a valid string"),
    ],
)
def test_what_does_not_go_together(parse, text, expected):
    assert expected in error_of(parse, text)


def test_the_command_line_takes_tables(tmp_path, parse):
    (tmp_path / "config.toml").write_text("path = 'owner/name'\n")
    kwargs = {"enable_thinking": False, "n": 2}
    given = ["--fields", json.dumps({"prompt": "question"}), "--chat_template_kwargs", json.dumps(kwargs)]
    config, _ = parse_command_line(HeldOutConfig, "train", [str(tmp_path / "config.toml"), *given])
    assert config.fields == {"prompt": "question"} and config.chat_template_kwargs == kwargs


@pytest.mark.parametrize("given", ["enable_thinking=false", "{enable_thinking: false}", "[1]", "1"])
def test_the_command_line_takes_no_table_but_json(tmp_path, given):
    (tmp_path / "config.toml").write_text("path = 'owner/name'\n")
    arguments = [str(tmp_path / "config.toml"), "--chat_template_kwargs", given]
    with pytest.raises(UserError) as caught:
        parse_command_line(HeldOutConfig, "train", arguments)
    assert str(caught.value).startswith("--chat_template_kwargs: expected a table as JSON")
    assert str(caught.value).endswith(repr(given))


def test_a_config_of_python_may_have_paths(tmp_path):
    config = HeldOutConfig(path=tmp_path / "x.jsonl", eval_path=tmp_path / "y.jsonl")
    assert (config.source.path, config.eval_source.path) == (str(tmp_path / "x.jsonl"), str(tmp_path / "y.jsonl"))
