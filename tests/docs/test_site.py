"""The site's build finds its links: docs/site/site_links.py."""

from __future__ import annotations

import sys

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "docs" / "site"))
import site_links as links


@pytest.mark.parametrize(
    ("path", "at"),
    [
        ("README.md", "index.md"),
        ("docs/data.md", "data.md"),
        ("docs/integrations", "integrations/README.md"),
        ("docs/gates.png", "gates.png"),
        ("CONTRIBUTING.md", "repository/CONTRIBUTING.md"),
        ("LICENSE", "repository/LICENSE.md"),
        ("examples/recipes", "repository/examples/recipes/README.md"),
        ("examples/recipes/dapo.toml", "repository/examples/recipes/dapo.toml.md"),
        ("examples/stages/dpo.jsonl", "repository/examples/stages/dpo.jsonl"),
    ],
)
def test_each_file_has_its_place(path, at):
    assert links.place(path) == at


@pytest.mark.parametrize(
    ("path", "link", "within_the_site"),
    [
        ("README.md", "docs/data.md#gsm8k", "data.md#gsm8k"),
        ("README.md", "examples/recipes", "repository/examples/recipes/README.md"),
        ("docs/data.md", "rewards.md", "rewards.md"),
        ("docs/data.md", "#gsm8k", "#gsm8k"),
        ("docs/data.md", "../README.md", "index.md"),
        ("docs/recipes/README.md", "../../examples/real", "../repository/examples/real/README.md"),
        ("examples/recipes", "dapo.toml", "dapo.toml.md"),
        ("docs/data.md", "https://arxiv.org/abs/1707.06347", "https://arxiv.org/abs/1707.06347"),
        ("docs/data.md", "no_such_page.md", "no_such_page.md"),  # the build then says so
    ],
)
def test_links_lead_to_these_places(path, link, within_the_site):
    page = "See [this]({0}).\n\n```python\nx = [f]({0})\n```\n"
    moved = "See [this]({1}).\n\n```python\nx = [f]({0})\n```\n"
    assert links.rewritten(page.format(link), path) == moved.format(link, within_the_site)


def test_a_source_file_and_a_folder_are_pages():
    assert links.content("fastrl/base/checks.py").startswith("# fastrl/base/checks.py\n\n````python\n")
    listed = links.content("examples/recipes")
    assert "- [dapo.toml](dapo.toml)" in listed and "__pycache__" not in listed
    assert {"examples/recipes/dapo.toml", "examples/recipes/sapo.toml"} <= links.linked("examples/recipes")
