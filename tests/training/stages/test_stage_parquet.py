"""Stages on Parquet: the numbers of the same rows in JSONL, columns by other names, and what JSON has no value for."""

import datetime

import pyarrow
import pyarrow.parquet
from run_files import json_lines, repeatable

from fastrl.training.stages import sample, sft

ROWS = [{"question": f"{n}=", "solution": f"{n}", "prompt": None} for n in range(12, 20)]


def write(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_the_form_of_the_rows_changes_no_number(settings, write_rows, tmp_path):
    plain = write_rows([{"prompt": row["question"], "completion": row["solution"]} for row in ROWS])
    fields = {"prompt": "question", "completion": "solution", "empty": "prompt"}
    data = {"fields": fields, "eval_path": write(tmp_path / "held_out.parquet", ROWS[:2])}

    def numbers(folder, path, data):
        logging = {"output_dir": str(tmp_path / folder)}
        config = sft.SFTConfig.model_validate(settings(path, data=data, logging=logging))
        sft.train(config)
        return [{name: value for name, value in record.items() if "eval/" not in name} for record in repeatable(config)]

    assert numbers("parquet", write(tmp_path / "rows.parquet", ROWS), data) == numbers("jsonl", plain, {})


def test_sample_writes_prompts_with_the_system_prompt_and_columns_of_any_type(policy, tmp_path, capsys):
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    policy.model.save_pretrained(tmp_path / "chat")
    policy.tokenizer.save_pretrained(tmp_path / "chat")
    (tmp_path / "rewards.py").write_text("def zero(prompts, completions, day):\n    return [day[0].year] * len(day)\n")
    rows = [{"question": text, "day": datetime.date(2026, 1, 2)} for text in ("1", "23", "123456789")]
    config = {
        "model": {"path": str(tmp_path / "chat")},
        "data": {
            "path": write(tmp_path / "rows.parquet", rows),
            "fields": {"prompt": "question"},
            "system_prompt": "7",
            "max_prompt_tokens": 4,
            "overlong_prompts": "drop",
        },
        "reward": {"function": f"{tmp_path}/rewards.py:zero"},
        "rollout": {"num_generations": 1, "max_new_tokens": 2},
        "training": {"device": "cpu", "threads": 1},
        "output": {"path": str(tmp_path / "samples.jsonl")},
    }
    sample.sample(sample.SampleConfig.model_validate(config))
    lines = json_lines(tmp_path / "samples.jsonl")
    assert [line["prompt"][1]["content"] for line in lines] == ["1", "23"]
    assert lines[0]["prompt"][0] == {"role": "system", "content": "7"}
    assert (lines[0]["day"], lines[0]["reward"]) == ("2026-01-02", 2026)
    assert "1 of 3 prompts dropped, which have more than 4 tokens" in capsys.readouterr().err
