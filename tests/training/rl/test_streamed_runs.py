"""Runs on Parquet files, in memory and streamed: the numbers of JSONL, and of a run without a stop."""

import json
import shutil

import pyarrow
import pyarrow.parquet
import pytest
from run_files import repeatable

from fastrl.training.rl.train import train


@pytest.fixture
def tables(tmp_path, example):
    """Ten prompts, one of them long, as Parquet with another name for their column."""
    rows = [json.loads(line) for line in (example / "train.jsonl").read_text().splitlines()[:10]]
    rows[3]["prompt"] = "12345="
    columns = {"question": [row["prompt"] for row in rows], "answer": [row["answer"] for row in rows]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet")
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "train.parquet"), "fields": {"prompt": "question"}}
    return {"data": data, "evaluation": {"every": None}}


def test_the_form_of_the_rows_changes_no_number(trained, tables, tmp_path):
    tables["data"] |= {"eval_path": None}
    tables["evaluation"] |= {"metrics": []}
    plain = tables | {"data": tables["data"] | {"path": str(tmp_path / "same.jsonl"), "fields": {}}}
    assert repeatable(trained("parquet", **tables)) == repeatable(trained("jsonl", **plain))


@pytest.mark.parametrize("streaming", [False, True], ids=["in memory", "streamed"])
def test_a_dataset_of_two_splits_is_trained_and_evaluated_on(trained, tables, tmp_path, monkeypatch, streaming):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    plain = tables | {"data": tables["data"] | {"eval_path": tables["data"]["path"]}, "evaluation": {"every": 1}}
    (tmp_path / "set").mkdir()
    for split in ("train", "test"):
        shutil.copy(tmp_path / "train.parquet", tmp_path / "set" / f"{split}.parquet")
    both = {"path": str(tmp_path / "set"), "eval_path": None, "eval_split": "test"}
    dataset = plain | {"data": plain["data"] | both | {"streaming": streaming}}
    plain["data"]["streaming"] = streaming
    numbers = repeatable(trained("dataset", **dataset))
    assert numbers == repeatable(trained("parquet", **plain)) and "eval/exact_match" in numbers[0]


@pytest.mark.parametrize("streaming", [False, True], ids=["in memory", "streamed"])
def test_a_resumed_run_draws_the_prompts_of_an_unbroken_one(make_config, tables, streaming):
    """Four steps of six of ten prompts, of which one is dropped, with a buffer of four: the stop is in an epoch."""
    tables["data"] |= {"streaming": streaming, "shuffle_buffer": 4, "eval_path": None, "max_prompt_tokens": 4}
    tables["data"]["overlong_prompts"] = "drop"
    tables["evaluation"] |= {"metrics": []}

    def run(folder, steps, resume=False):
        training = {"steps": steps, "minibatches": 2, "device": "cpu"}
        config = make_config(folder, **tables, training=training, optimizer={"lr": 0.01, "schedule": "constant"})
        return config, train(config, resume=resume)

    whole, summary = run("whole", 4)
    run("stopped", 2)
    resumed, again = run("stopped", 4, resume=True)
    assert repeatable(resumed) == repeatable(whole) and len(repeatable(whole)) == 4
    assert summary["dropped_prompts"] == again["dropped_prompts"] > 0
