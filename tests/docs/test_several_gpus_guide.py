"""The guide to several GPUs: its data-parallel loop in two processes, and what the trainer refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import rank_runs
import torch
import torch.distributed as dist
from digit_models import TOKENIZER, narrowed
from places import EXAMPLES, ROOT
from ranks import Ranks

from fastrl.base.errors import UserError
from fastrl.cli import main
from fastrl.training.parallel import launch
from fastrl.training.parallel import world as parallel
from fastrl.training.parallel.world import World

PAGE = ROOT / "docs" / "guides" / "several_gpus.md"


def loop() -> dict[str, Any]:
    """What the page's script defines."""
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))
    (code,) = [code for code in blocks if code.startswith("# train.py")]
    namespace: dict[str, Any] = {"__name__": "train"}
    exec(compile(code, str(PAGE), "exec"), namespace)
    return namespace


def trained() -> list[float]:
    history: list[float] = loop()["train"](steps=15)
    return history


def differences() -> list[float]:
    """Between this rank's averaged gradient and that of one process over both ranks' responses, for each weight."""
    found, fastrl = loop(), __import__("fastrl")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = found["LlamaConfig"](
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
        )
        models.append(found["LlamaForCausalLM"](config).eval())
    tokens, advantages = torch.randint(1, 64, (6, 12)), torch.randn(6)
    mask = torch.arange(8) < torch.tensor([8, 8, 7, 1, 2, 3])[:, None]  # the ranks have different counts
    loss = {"objective": fastrl.DAPO(), "advantages": advantages, "mask": mask}
    found["PolicyLoss"](models[0])(tokens, 4, **loss).loss.backward()
    mine = slice(0, 3) if dist.get_rank() == 0 else slice(3, 6)
    wrapped = found["DistributedDataParallel"](found["PolicyLoss"](models[1]))
    share = found["global_share"](mask[mine])
    own = {"objective": fastrl.DAPO(), "advantages": advantages[mine], "mask": mask[mine], "denominator": share}
    wrapped(tokens[mine], 4, **own).loss.backward()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return [float((a.grad - b.grad).abs().max() / a.grad.abs().max()) for a, b in pairs]


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    processes = Ranks(2)
    yield processes
    processes.stop()


def test_the_loop_has_the_gradient_of_the_whole_batch_and_learns(pair: Ranks) -> None:
    for of_rank in pair.run(differences):
        assert max(of_rank) < 1e-5
    for history in pair.run(trained):
        assert history[0] < 0.1 and history[-1] > 0.2


def said(call: Callable[..., object], *args: object) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    return str(caught.value)


def refused(pair: Ranks, tables: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """What mistakes on several processes are answered with, in the order of the page's table."""

    def command(*words: str) -> str:
        assert main(words) == 2
        return capsys.readouterr().err.removeprefix("fastrl: ").strip()

    def on_ranks(table: str, command: str = "sft", **fields: object) -> str:
        one, other = pair.run(rank_runs.train, command, tables | {table: tables.get(table, {}) | fields})
        assert isinstance(one, str) and one == other
        return one

    def unlike(name: str, *values: object) -> str:
        with patch.object(World, "gathered", lambda *_: [{name: value} for value in values]):
            return said(World(torch.device("cpu"), size=2).check_alike, {})

    started = (patch.dict("os.environ", WORLD_SIZE="2", RANK="0"), patch.object(launch, "on_rank", lambda work: work()))
    yield command("sft", "sft.toml", "--nproc", "0")
    with started[0], started[1]:
        yield command("sft", "sft.toml", "--nproc", "2")
    yield command("sample", "sample.toml", "--nproc", "2")
    with started[0], started[1]:
        yield command("sample", "sample.toml")
    yield on_ranks("training", shard=3)
    with patch.object(parallel, "find_device", torch.device):
        yield said(parallel._device_of, "cuda:0", 0)
    yield unlike("training.seed", 0, 1)
    yield unlike("version of torch", "2.13.0", "2.12.0")
    yield unlike("data.path", "2 rows, digest 3f0a", "3 rows, digest 77c1")


def test_what_is_refused_is_quoted_as_it_is(pair: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = PAGE.read_text(encoding="utf-8").partition("\n### What is refused\n")[2].partition("\n### ")[0]
    tables = {
        "model": {"config": str(narrowed(tmp_path)), "tokenizer": TOKENIZER},
        "data": {"path": str(EXAMPLES / "stages" / "sft.jsonl")},
        "training": {"device": "cpu"},
        "logging": {"output_dir": str(tmp_path / "run")},
    }
    assert re.findall(r"^\| `(.+?)` \|", part, re.MULTILINE) == list(refused(pair, tables, capsys))
    assert not (tmp_path / "run").exists()


def test_what_is_said_of_a_lost_rank_is_quoted_as_it_is() -> None:
    page = PAGE.read_text(encoding="utf-8")
    (reason,) = re.findall(r"^fastrl: rank 0 has lost another rank: (.*); --resume", page, re.MULTILINE)
    gloo = f"[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] {reason}. The other end has closed it."
    with (
        pytest.raises(UserError) as caught,
        patch.dict("os.environ", RANK="0"),
        patch.object(launch, "_first_to_fail", lambda: True),
    ):
        launch.on_rank(Mock(side_effect=RuntimeError(gloo)))
    assert f"\nfastrl: {caught.value}\n" in page
