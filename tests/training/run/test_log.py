"""What a run writes: samples, a line per step, the report at its end, and Weights & Biases through a module like it."""

import datetime
import json
import math
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from run_files import json_lines, records, strict_json

from fastrl.base.errors import UserError
from fastrl.report.report import write_report
from fastrl.training.parallel.world import World
from fastrl.training.rl.train import SHOWN, train
from fastrl.training.run.banner import run_facts
from fastrl.training.run.log import FILES, RunLog

LINE = re.compile(
    r"step (\d)/2  reward [\d.e-]+  (?:eval/reward [\d.e-]+  )?entropy [\d.]+  clip_frac [\d.e-]+  "
    r"length [\d.]+  grad_norm [\d.e-]+  time/step [\d.e-]+  left (\d\d:\d\d)"
)
# Line separators that JSON leaves as they are, which str.splitlines takes for ends.
STRANGE = "one\u2028two\u2029three\u0085four\nfive\x0bsix \u00e9 \U0001f600"


def rows(config):
    return json_lines(config.logging.output_dir / "samples.jsonl")


@pytest.fixture
def open_log(make_config):
    """A log of four steps in the run's directory; `step` as RunLog's own."""

    def open_log(folder="run", step=0, facts=None, **logging):
        config = make_config(folder, logging=logging)
        return RunLog(config, "grpo", 4, SHOWN, step, facts or {})

    return open_log


@pytest.fixture
def wandb(monkeypatch):
    """A module named wandb that notes what it is called with, and gives its runs the ids a, b ..."""
    module, ids = ModuleType("wandb"), iter("abc")
    module.calls = []

    def init(**arguments):
        module.calls.append(("init", arguments))
        return SimpleNamespace(
            id=arguments["id"] or next(ids),
            log=lambda record, step: module.calls.append(("log", step, record)),
            finish=lambda exit_code: module.calls.append(("finish", exit_code)),
        )

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.drawn
def test_a_run_leaves_samples_a_report_and_curves_and_prints_a_line_a_step(trained, capfd):
    config = trained(logging={"samples": 3})
    run = config.logging.output_dir
    found = rows(config)
    assert [row["step"] for row in found] == [1, 1, 1, 2, 2, 2]
    assert [set(row) for row in found] == [{"step", "prompt", "columns", "completion", "reward", "rewards"}] * 6
    assert all(row["columns"] == {"answer": row["prompt"][2::-1]} for row in found)
    assert all(row["rewards"] == {"reward": row["reward"]} for row in found)
    assert len({row["prompt"] for row in found}) == 2  # four of each prompt, and it is the first three that are kept
    assert all(re.fullmatch(r"\d{3}=", row["prompt"]) and 0 <= row["reward"] <= 2 for row in found)
    report = (run / "report.html").read_text()
    assert all(row["prompt"] in report for row in found) and "grad_norm" in report
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    first, *lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert re.fullmatch(r"step 0/2  eval/reward [\d.]+", first)  # and no kl, where the objective has no such term
    assert len(lines) == 2
    for step, line in enumerate(lines, 1):
        match = LINE.fullmatch(line)
        assert match and int(match[1]) == step, line
    assert match[2] == "00:00"


@pytest.mark.drawn
def test_no_samples_where_none_are_asked_for(trained):
    config = trained(logging={"samples": 0}, training={"steps": 1})
    assert not (config.logging.output_dir / "samples.jsonl").exists()
    assert (config.logging.output_dir / "report.html").exists()


def test_how_long_is_left_is_what_the_steps_of_this_part_took(open_log, monkeypatch, capsys):
    """Three steps after a resume at 1, of a minute and a half each."""
    now = [1000.0]
    with open_log() as log:
        log.write(1, {"reward": 0.0})
    capsys.readouterr()
    monkeypatch.setattr("fastrl.training.run.log.time.monotonic", lambda: now[0])
    with open_log(step=1) as log:
        for step in (2, 3, 4):
            now[0] += 90
            log.write(step, {"reward": 0.25, "grad_norm": 1234567.0, "nobody": 1.0})
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    shown = "reward 0.25  grad_norm 1.235e+06"
    assert lines == [f"step {n}/4  {shown}  left {left}" for n, left in ((2, "03:00"), (3, "01:30"), (4, "00:00"))]


def test_what_is_not_finite_is_null_and_nan_on_the_line(open_log, capsys):
    with open_log() as log:
        log.write(1, {"reward": math.nan, "entropy": math.inf, "kl": 0.5})
        summary = log.summarize({"steps": 1})
    assert summary == {"reward": None, "entropy": None, "kl": 0.5, "steps": 1}
    assert json.loads(log.path.read_text()) == {"step": 1, "reward": None, "entropy": None, "kl": 0.5}
    assert "reward nan  entropy inf  kl 0.5" in capsys.readouterr().out


def test_every_file_is_json_whatever_it_holds(open_log, make_config):
    message = {"role": "user", "content": "1=", "name": "\ud800", "weight": math.nan, "day": datetime.date(2026, 1, 2)}
    arguments = {"reward": {"arguments": {"reward": {"limit": math.inf, "mark": "\udfff"}}}}
    config = make_config(**arguments, optimizer={"max_grad_norm": math.inf})
    with RunLog(config, "grpo", 1, SHOWN, 0, {}) as log:
        log.write(1, {"reward": math.nan}, [{"prompt": [message], "completion": "\udc80", "reward": None}])
        log.summarize({"seconds": math.inf})
    read = {
        name: strict_json((log.directory / name).read_bytes()) for name in FILES if name.endswith((".json", ".jsonl"))
    }
    assert read["metrics.jsonl"] == {"step": 1, "reward": None}
    assert read["summary.json"] == {"reward": None, "seconds": None}
    assert read["samples.jsonl"]["prompt"] == [message | {"weight": None, "day": "2026-01-02"}]
    assert read["samples.jsonl"]["completion"] == "\udc80"
    assert read["config.json"]["reward"]["arguments"] == {"reward": {"limit": "Infinity", "mark": "\udfff"}}
    assert read["config.json"]["optimizer"]["max_grad_norm"] == "Infinity"
    assert type(config).model_validate(read["config.json"]).optimizer == config.optimizer
    assert "\\udc80" not in write_report(log.directory).read_text()  # of which a page shows a mark


def test_the_facts_of_a_run(open_log, make_config):
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 1))
    config = make_config(training={"seed": 3, "threads": 1, "device": "cpu"})
    facts = run_facts(config, config.name, model, World(torch.device("cpu")))
    assert list(facts) == ["objective", "model", "parameters", "dtype", "device", "seed", "versions"]
    assert facts["objective"] == "grpo" and facts["parameters"] == "1,261, all trained" and facts["seed"] == "3"
    assert facts["model"] == str(config.model.config or config.model.path)
    assert facts["device"].endswith("(CPU, 1 thread)") and f"torch {torch.__version__}" in facts["versions"]
    model[0].requires_grad_(False)
    narrow = make_config("narrow", model={"dtype": "bfloat16", "logits_dtype": "float32", "lora_rank": 2})
    facts = run_facts(narrow, narrow.name, model, World(torch.device("meta")))
    assert facts["parameters"] == "31 trained of 1,261, in adapters of rank 2" and facts["device"] == "meta"
    assert facts["dtype"] == "products in bfloat16, logits in float32; weights in float32"
    stage = SimpleNamespace(
        model=config.model, training=config.training, loss=SimpleNamespace(name="ipo"), distillation=config.model
    )
    assert run_facts(stage, "dpo", model, World(torch.device("cpu")))["objective"] == "ipo, with a teacher"
    for step, label in ((0, "started"), (2, "resumed after step 2")):
        with open_log(step=step, facts=facts) as log:
            written = json.loads((log.directory / "facts.json").read_text())
        assert [label, *facts] == list(written) and {**written, **facts} == written


# --- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.drawn
def test_after_a_resume_no_step_and_no_sample_is_there_twice(open_log):
    """Killed in step 4 when step 2 was saved; and a completion may hold any character."""

    def sample(step, part):
        return {"prompt": f"{part} {step}", "completion": STRANGE, "reward": None}

    with open_log() as log:
        for step in (1, 2, 3):
            log.write(step, {"reward": float(step)}, [sample(step, "first"), sample(step, "second")])
    samples = log.directory / "samples.jsonl"
    with samples.open("ab") as file:
        file.write(b'{"step": 4, "prompt": "fir\xe2\x80')  # and half a character
    with open_log(step=2) as log:
        assert log.last == {"reward": 2.0}
        for step in (3, 4):
            log.write(step, {"reward": 10.0 * step}, [sample(step, "again")])
        assert log.summarize({})["reward"] == 40.0
    found = json_lines(samples)
    assert [row["prompt"] for row in found] == ["first 1", "second 1", "first 2", "second 2", "again 3", "again 4"]
    assert all(row["completion"] == STRANGE for row in found)
    assert [record["reward"] for record in json_lines(log.path)] == [1, 2, 30, 40]
    assert (log.directory / "report.html").exists()
    assert not list(log.directory.glob("*.unfinished"))


def test_a_resumed_run_has_each_steps_samples_once(make_config, fail_in_step):
    config = make_config(training={"steps": 3}, logging={"checkpoint_every": 1}, evaluation={"every": None})
    fail_in_step(config, 3)
    train(config, resume=True)
    assert [row["step"] for row in rows(config)] == [1] * 4 + [2] * 4 + [3] * 4


# --- Weights & Biases -----------------------------------------------------------------------------------------------


def test_wandb_gets_the_config_every_step_and_the_end(trained, wandb):
    config = trained(logging={"wandb": "mine"})
    (_, arguments), *logs, end = wandb.calls
    given = {"project": "mine", "dir": config.logging.output_dir, "config": config.model_dump(mode="json")}
    given["config"]["training"]["micro_batch_tokens"] = 96  # a whole minibatch, which fits
    assert arguments == given | {"id": None, "resume": None}
    assert [(kind, step) for kind, step, _ in logs] == [("log", 0), ("log", 1), ("log", 2)]
    assert [{"step": step, **record} for _, step, record in logs[1:]] == records(config)
    assert end == ("finish", 0)


def test_a_resumed_run_goes_on_under_its_id_and_a_new_one_does_not(open_log, wandb):
    with open_log(wandb="mine") as log:
        log.write(1, {"reward": math.nan})
    with pytest.raises(KeyError), open_log(step=1, wandb="mine"):
        raise KeyError
    with open_log(overwrite=True, wandb="mine"):
        pass
    with open_log("plain") as log:  # a run that was not logged there may be from a resume on
        log.write(1, {})
    with open_log("plain", step=1, wandb="mine"):
        pass
    inits = [(arguments["id"], arguments["resume"]) for kind, arguments, *_ in wandb.calls if kind == "init"]
    assert inits == [(None, None), ("a", "allow"), (None, None), (None, None)]
    assert ("log", 1, {"reward": None}) in wandb.calls
    assert [code for kind, code, *_ in wandb.calls if kind == "finish"] == [0, 1, 0, 0]


def test_without_wandb_the_package_is_named_and_nothing_is_lost(make_config, trained, monkeypatch):
    """The run that was there stays, and a new directory does not look like a run afterwards."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    asked = make_config(logging={"wandb": "mine"})
    with pytest.raises(UserError, match=r"logging\.wandb needs wandb .*: pip install wandb$"):
        train(asked)
    plain = trained()
    before = records(plain)
    with pytest.raises(UserError, match=r"logging\.wandb needs wandb"):
        trained(logging={"wandb": "mine", "overwrite": True})
    assert records(plain) == before and (plain.logging.output_dir / "checkpoints").exists()


def test_a_wandb_that_cannot_start_leaves_no_half_a_run(make_config, wandb, monkeypatch):
    """No network, say: the same command must work once there is one."""

    def offline(**arguments):
        raise OSError("no network")

    config = make_config(logging={"wandb": "mine"})
    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", offline)
        with pytest.raises(OSError, match="no network"):
            train(config)
    train(config)
    assert len(records(config)) == 2
