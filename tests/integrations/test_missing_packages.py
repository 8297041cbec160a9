"""An adapter whose package is missing says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "package", "version"),
    [("transformers", "transformers", "5.17"), ("routing", "transformers", "5.17"), ("trl", "trl", "1.16")],
)
def test_the_missing_package_is_named(module: str, package: str, version: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; import fastrl.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0 and f"pip install '{package}>={version}'" in done.stderr
