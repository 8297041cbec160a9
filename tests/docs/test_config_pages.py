"""docs/config/ is what docs/site/config_pages.py writes: each field of each command's config."""

from __future__ import annotations

import re
import sys
from collections import Counter

import pytest
from places import ROOT

from fastrl import cli

sys.path.insert(0, str(ROOT / "docs" / "site"))
import config_pages
import help_texts

PAGES = config_pages.config_pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_page_is_current(path):
    assert path.read_text(encoding="utf-8") == PAGES[path], "write it anew: python docs/site/config_pages.py"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_commands_help_is_of_its_options(command):
    written = cli.help_file(command).read_text(encoding="utf-8")
    assert written == help_texts.help_text(command), "write it anew: python docs/site/help_texts.py"


@pytest.mark.parametrize("command", config_pages.CONFIGS)
def test_every_option_of_the_command_line_has_its_heading(command, capsys):
    assert cli.main([command, "--help"]) == 0
    words = capsys.readouterr().out.split()
    options = {word.removeprefix("--").rstrip(",") for word in words if word.startswith("--") and "." in word}
    page = PAGES[config_pages.FOLDER / f"{command.replace('-', '_')}.md"]
    headings = Counter(line.removeprefix("### ") for line in page.splitlines() if line.startswith("### "))
    assert options == set(headings)
    assert set(headings.values()) == {1}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_table_and_field_says_what_it_is(path):
    texts = re.findall(r"^(##+ .+)\n\n(.*)\n", re.sub(r"(### .+\n\n).+\n\n", r"\1", PAGES[path]), re.MULTILINE)
    assert len(texts) > 20
    assert not [heading for heading, text in texts if not re.search(r"[a-z]{2}.*[a-z]", text)]
