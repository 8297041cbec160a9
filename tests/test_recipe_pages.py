"""The commands on the pages of docs/recipes: they fit the configs, and vLLM knows them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import doc_checks
import pytest
from doc_pages import Block, page_of
from places import EXAMPLES, ROOT

from fastrl.training.commands import _processes
from fastrl.training.config.settings import parse_command_line
from fastrl.training.config.train import Config

PAGES = ROOT / "docs" / "recipes"
RECIPES = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "README")
ENGINE = ROOT / ".venv-engine" / "bin" / "python"


def blocks(name: str) -> list[Block]:
    """The commands of a page."""
    return page_of(f"docs/recipes/{name}.md").of("sh")


def commands(name: str, *programs: str) -> list[list[str]]:
    """The words of a page's commands of these programs, without what precedes them; those of what torchrun starts."""
    found = []
    for block in blocks(name):
        for first, *rest in doc_checks.commands(block):
            words = [Path(first).name, *rest]
            if words[0] == "torchrun":
                words = words[words.index("-m") + 1 :]
            found += [words] if words[0] in programs else []
    return found


def parsed(words: list[str]) -> Config:
    """The config of a command `fastrl train`."""
    _, arguments = _processes("train", words[2:])
    config, _ = parse_command_line(Config, "train", arguments, {"resume": ""})
    return config


def trainings(name: str) -> list[Config]:
    return [parsed(words) for words in commands(name, "fastrl") if words[1] == "train"]


def servers(name: str) -> list[tuple[list[str], Config]]:
    """The words of each server's command, with the config of the first training after it."""
    words = [words for words in commands(name, "vllm", "fastrl") if words[1] in ("serve", "train")]
    pairs = zip(words, [*words[1:], []], strict=True)
    return [(first, parsed(second)) for first, second in pairs if first[0] == "vllm"]


def test_each_recipe_has_a_page_that_the_index_names() -> None:
    assert set(RECIPES) == {path.stem for path in (EXAMPLES / "real").glob("*.toml")} - {
        "gsm8k",  # the part that some share
        "gsm8k_qwen3_0.6b_one_gpu",  # on the page of the other one
    }
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"(?m)^\| \[(.+?)\]\(\1\.md\)", index)) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_the_pages_commands_train_the_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert "**Not run yet**" in text
    whole = parsed(["fastrl", "train", f"examples/real/{name}.toml"])
    assert trainings(name)[0] == whole  # the others are read, which checks their options
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (PAGES / link).exists(), link


@pytest.mark.parametrize("name", RECIPES)
def test_the_server_is_started_with_what_the_config_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    texts = [block.text for block in blocks(name) if "vllm serve" in block.text]
    assert texts and all("VLLM_SERVER_DEV_MODE=1" in text for text in texts)
    found = servers(name)
    assert len(found) == len(texts)
    for words, config in found:
        assert words[:3] == ["vllm", "serve", config.model.path]
        options = words[3:]
        values = {name: value for name, value in zip(options, [*options[1:], "--"], strict=True) if name[:2] == "--"}
        assert config.rollout.url == f"http://{values['--host']}:{values['--port']}"
        assert values["--dtype"] == config.model.dtype
        assert int(values["--max-model-len"]) == (config.data.max_prompt_tokens or 0) + config.rollout.max_new_tokens
        assert values["--logprobs-mode"] == "processed_logprobs" and "--enable-scale-out" in values
        assert values["--weight-transfer-config"] == '{"backend": "fastrl"}'
        assert ("--return-sampling-mask" in values) == config.rollout.truncates
        assert ("--enable-return-routed-experts" in values) == config.rollout.keep_routing
        assert ("--enable-sleep-mode" in values) == config.rollout.sleep


def test_every_server_is_started_for_this_machine_alone() -> None:
    """Whoever reaches it can replace its weights."""
    found = 0
    for path in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("fastrl/**/*.py")]:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"(?m)^.*(?:openai\.api_server|sglang\.launch_server|bin/vllm serve) .*$", text):
            found += 1
            assert "--host 127.0.0.1" in line, (path, line)
    assert found >= 10


@pytest.mark.parametrize("name", RECIPES)
def test_a_plan_is_quoted_as_output(name: str) -> None:
    """tests/docs/test_blocks.py compares what is marked so with what the command prints."""
    (plan,) = [block for block in blocks(name) if block.text.startswith("fastrl plan")]
    assert plan.output is not None


@pytest.mark.engine
@pytest.mark.skipif(not ENGINE.exists(), reason="needs the environment of `make engine`")
def test_vllm_knows_every_option_on_the_pages(tmp_path: Path) -> None:
    """The parser of `vllm serve` is that of this module, whose command the CPU build has too."""
    command = [ENGINE, "-m", "vllm.entrypoints.openai.api_server", "--help=all"]
    known = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    known_options = set(re.findall(r"--[a-z0-9-]+", known))
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    used = set(re.findall(r"(?m)^\| `(--[a-z-]+)", index))
    for name in RECIPES:
        used |= {word for words in commands(name, "vllm") for word in words if word.startswith("--")}
    assert len(used) > 8 and used <= known_options, used - known_options
