"""Which checkpoint a run goes on from: those that are kept, and what is refused in one line."""

import errno
import json
import math
import os
import shutil
import subprocess

import pytest
from mistakes import error_of
from run_files import checkpoints, strict_json

import fastrl.training.run.checkpoint as module
import fastrl.training.run.folder as folder
from fastrl.base.errors import UserError
from fastrl.training.rl.train import train
from fastrl.training.run.checksums import CHECKSUMS, damage, write_checksums
from fastrl.training.run.folder import NUMBERS


@pytest.mark.parametrize(("keep", "left"), [(None, [2, 3, 4]), (0, [1, 2, 3, 4]), (1, [4])])
def test_old_checkpoints_are_pruned(trained, keep, left):
    kept = {} if keep is None else {"keep_checkpoints": keep}
    config = trained(training={"steps": 4}, logging={"checkpoint_every": 1, **kept})
    assert checkpoints(config) == [f"step-{step:06d}" for step in left]


def test_a_full_disk_costs_no_checkpoint(make_config, monkeypatch):
    """What cannot be written does not take the place of what was, and nothing is pruned for it."""
    config = make_config(training={"steps": 4}, logging={"checkpoint_every": 1, "keep_checkpoints": 1})

    def save(tensors, path, save=module.save_file, calls=[]):  # noqa: B006
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(tensors, path)

    monkeypatch.setattr(module, "save_file", save)
    folder = config.logging.output_dir / "checkpoints"
    assert error_of(train, config) == (
        f"step 3: cannot save a checkpoint in {folder}: [Errno 28] No space left on device; the last good checkpoint "
        f"is {folder / 'step-000002'}"
    )
    assert checkpoints(config) == ["step-000002"]
    assert train(config, resume=True)["steps"] == 4
    assert checkpoints(config) == ["step-000004"]


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"training": {"seed": 3}}, ["training.seed was 0 and is now 3"]),
        ({"training": {"steps": 9}}, ["training.steps was 1 and is now 9"]),  # the example's schedule is linear
        (
            {"optimizer": {"lr": 1.0}, "rollout": {"top_p": 0.5}},
            ["optimizer.lr was 0.002 and is now 1.0", "; ", "rollout.top_p was 1.0 and is now 0.5"],
        ),
        ({"objective": {"name": "dapo"}}, ["objective.name was 'grpo' and is now 'dapo'"]),
        ({"model": {"dtype": "bfloat16"}}, ["model.dtype was 'float32' and is now 'bfloat16'"]),
        ({"reward": {"function": "reward.py:exact_match"}}, ["reward.function was"]),
        ({"kl": {"coef": 0.2}}, ["kl was None and is now"]),
        ({"advantages": {"ddof": 1}}, ["advantages.ddof was 0 and is now 1"]),
    ],
)
def test_another_config_is_refused_field_by_field(make_config, trained, tables, expected):
    trained(training={"steps": 1})
    other = make_config(**tables | {"training": {"steps": 1} | tables.get("training", {})})
    error = error_of(train, other, resume=True)
    for part in ("step-000001: cannot be resumed with another config: ", *expected):
        assert part in error
    assert error.count(" was ") == len(tables)


def test_a_field_that_an_earlier_version_did_not_know_had_its_default(make_config):
    before = make_config().model_dump(mode="json")
    del before["model"]["logits_dtype"]
    assert folder._changes(before, make_config(), "training.steps") == []
    other = make_config(model={"logits_dtype": "float32"})
    assert folder._changes(before, other, "training.steps") == ["model.logits_dtype was None and is now 'float32'"]


def test_numbers_that_json_lacks_are_compared_too_also_with_what_an_earlier_version_wrote(
    trained, make_config, write_reward
):
    function = write_reward("return [0.0] * len(prompts)")

    def tables(limit, norm=math.inf):
        return {
            "reward": {"function": function, "arguments": {"reward": {"answer": limit}}},
            "optimizer": {"max_grad_norm": norm, "schedule": "constant", "warmup_updates": 0},
            "training": {"steps": 1},
        }

    config = trained(**tables(math.inf))
    directory = config.logging.output_dir / "checkpoints" / "step-000001"
    numbers = strict_json((directory / NUMBERS).read_bytes())
    assert numbers["config"] == strict_json((config.logging.output_dir / "config.json").read_bytes())
    for other, change in (
        (tables(-math.inf), "arguments was {'reward': {'answer': 'Infinity'}} and is now {'reward': {'answer': '-Inf"),
        (tables(math.inf, 1.0), "optimizer.max_grad_norm was 'Infinity' and is now 1.0"),
    ):
        assert change in error_of(train, make_config(**other), resume=True)
    numbers["config"]["optimizer"]["max_grad_norm"] = math.inf
    (directory / CHECKSUMS).unlink()
    (directory / NUMBERS).write_text(json.dumps(numbers))  # as an earlier version did
    write_checksums(directory)
    longer = make_config(**tables(math.inf) | {"training": {"steps": 2}})
    assert train(longer, resume=True)["steps"] == 2


def test_another_dataset_is_refused(trained, example, tmp_path):
    """Of another length, or of as many other prompts."""
    lines = (example / "train.jsonl").read_text().splitlines(keepends=True)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(lines[:10]))
    config = trained(data={"path": str(file)})
    file.write_text("".join(lines[:9]))
    with pytest.raises(UserError, match=r"step-000002: .*data\.path had 10 rows and now has 9"):
        train(config, resume=True)
    file.write_text("".join(lines[10:20]))
    with pytest.raises(UserError, match=r"data\.path has other rows now"):
        train(config, resume=True)


def test_a_damaged_checkpoint_is_named_and_the_newest_intact_one(trained):
    config = trained(training={"steps": 4}, logging={"checkpoint_every": 1, "keep_checkpoints": 4})
    folder = config.logging.output_dir / "checkpoints"

    def refused():
        error = error_of(train, config, resume=True)
        return error.removeprefix(f"{folder / 'step-000004'}: the checkpoint is damaged: ")

    weights = folder / "step-000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    intact = "the newest intact one is step-000003; move step-000004 away to go on from there"
    assert refused() == f"model.safetensors is not as it was written; {intact}"
    (folder / "step-000004" / NUMBERS).unlink()  # the checkpoint does not pass for an unfinished one then
    assert refused() == f"{NUMBERS} is missing; {intact}"
    (folder / "step-000003" / "config.json").unlink()
    assert refused().endswith(
        "; the newest intact one is step-000002; move step-000003 step-000004 away to go on from there"
    )
    for name in ("step-000001", "step-000002"):  # one without checksums may be anything
        (folder / name / CHECKSUMS).unlink()
    assert refused().endswith(f"{NUMBERS} is missing; there is no intact one before it")
    (folder / "step-000004" / CHECKSUMS).unlink()
    for name in ("step-000003", "step-000004"):
        shutil.rmtree(folder / name)
    with pytest.raises(UserError, match=f"step-000002: the checkpoint is damaged: {CHECKSUMS} is missing; there is no"):
        train(config, resume=True)


def test_a_disk_that_does_not_read_is_damage_too(tmp_path, monkeypatch):
    """And checksums are sha256sum's, in whatever order the files are found."""
    (tmp_path / "below").mkdir()
    for name in ("b", "a", "below/c"):
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path)
    assert damage(tmp_path) is None
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", CHECKSUMS], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["a: OK", "b: OK", "below/c: OK"] and done.returncode == 0, done.stderr
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()
    assert damage(tmp_path) == "a cannot be read (Is a directory)"
    assert damage(tmp_path, "b") is None
