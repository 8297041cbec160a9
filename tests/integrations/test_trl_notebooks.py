"""examples/notebooks: valid, without outputs, and every cell runs, with a tiny model in the place of the named one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from places import EXAMPLES
from tiny_models import tiny_model

from fastrl.planning import announce

NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
#: What each says of its plan, besides that fastrl is active.
SAYS = {
    "plain_loop": [],
    "transformers": ["the loss of transformers' Trainer"],
    "trl": ["TRL's GRPO", "the head of TRL's trainers"],
}
pytestmark = pytest.mark.filterwarnings("ignore")


def cells(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5) and notebook["metadata"]["kernelspec"]
    found: list[dict[str, Any]] = notebook["cells"]
    assert len({cell["id"] for cell in found}) == len(found)
    for cell in found:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"cell_type", "id", "metadata", "source"} | code
        assert not cell.get("outputs") and cell.get("execution_count") is None, "clear the outputs"
    return found


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == [*SAYS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model of one layer and a tokenizer of bytes."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    tokenizer = byte_tokenizer("<eos>", "<pad>")
    tokenizer.pad_token = "<pad>"
    tokenizer.save_pretrained(folder)
    values = {"eos_token_id": 0, "pad_token_id": 1, "max_position_embeddings": 256}
    tiny_model("qwen2", vocab_size=len(tokenizer), **values).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_runs(
    notebook: Path,
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announce, "_announced", set())
    caplog.set_level(logging.INFO, "fastrl")  # which the notebook does too; put back at the end
    settings, *rest = ["".join(cell["source"]) for cell in cells(notebook) if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    exec(compile(settings, f"{notebook.name}: settings", "exec"), names)
    tiny = {"MODEL": model, "STEPS": 2, "OUTPUT": str(tmp_path), "LENGTH": 6}
    names |= {name: value for name, value in tiny.items() if name in names}
    for number, source in enumerate(rest):
        exec(compile(source, f"{notebook.name}: code cell {number + 1}", "exec"), names)
    assert " after 2 steps" in capsys.readouterr().out.splitlines()[-1]
    said = [line.partition(": plan ")[0] for line in caplog.messages if ": plan " in line]
    assert said == [f"fastrl computes {adapter}" for adapter in SAYS[notebook.stem]]
    assert bool(said) == any("fastrl is active in " in line for line in caplog.messages)
