"""What the package promises as a package: a light import, documented names, one direction of imports, whole wheels."""

import importlib.util
import inspect
import re
import runpy
import shutil
import sys
import textwrap
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import torch
from places import ROOT
from python import python

import fastrl
from fastrl import doctor
from fastrl.base import dependencies
from fastrl.objectives.gates import Gate
from fastrl.objectives.objective import KL, KL_FORMULAS, Objective, RolloutCorrection

HEAVY = ("transformers", "triton", "trl", "matplotlib", "tensorboard", "pydantic")

# --- import -----------------------------------------------------------------------------------------------------------


def test_importing_fastrl_imports_neither_transformers_nor_triton():
    # torch looks for triton by itself, so what torch alone imports is not ours to answer for.
    script = (
        "import sys, torch; before = set(sys.modules); import fastrl; found = set(sys.modules) - before\n"
        f"print([x for x in ('triton', 'transformers') if x in before], [x for x in {HEAVY!r} if x in found])"
    )
    # Had torch imported one of them, the second list could not hold it.
    assert python("-c", script, PYTHONPATH=str(ROOT)).strip() == "[] []"


def test_every_public_name_is_there_and_documented():
    assert len(set(fastrl.__all__)) == len(fastrl.__all__)
    for name in fastrl.__all__:
        value = getattr(fastrl, name)
        if inspect.isclass(value) or callable(value):
            # A dataclass or NamedTuple without a docstring is given its signature for one.
            text = (value.__doc__ or "").strip()
            assert text, f"fastrl.{name} has no docstring"
            assert not text.startswith(f"{name}("), f"fastrl.{name} has a generated docstring"


def test_what_can_be_named_in_a_config_is_exported():
    for made in (*fastrl.PRESETS.values(), *Gate.__subclasses__(), Objective, KL, RolloutCorrection):
        assert made.__name__ in fastrl.__all__ and getattr(fastrl, made.__name__) is made


def test_the_pages_of_algorithms_have_every_preset_preference_estimator_and_advantage():
    page = "\n".join(path.read_text() for path in (ROOT / "docs" / "algorithms").glob("*.md"))
    named = [*fastrl.PRESETS, *fastrl.PREFERENCES, *(k for k in KL_FORMULAS if k != "none")]
    named += [name for name in fastrl.__all__ if name.endswith("_advantages")]
    assert [name for name in named if f"`{name}`" not in page] == []


# --- distribution -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A wheel built from the tree, and a wheel built from the tree's sdist: their paths."""
    tree = tmp_path_factory.mktemp("tree") / "fastrl"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignore)
    shutil.rmtree(tree / "runs", ignore_errors=True)  # of the demo
    found = []
    for name, options in (("direct", ["--wheel"]), ("through-sdist", [])):
        out = tree.parent / name
        python("-m", "build", "--no-isolation", "--outdir", out, *options, tree)
        (wheel,) = out.glob("*.whl")
        found.append(wheel)
    return found


SHIPPED = (".cpp", ".h", ".cuh")  # of csrc


def contents(wheel: Path) -> dict[str, bytes]:
    """Name -> bytes, but for the record of hashes and the build's own notes."""
    with zipfile.ZipFile(wheel) as archive:
        return {n: archive.read(n) for n in archive.namelist() if not n.endswith(("/RECORD", "/WHEEL"))}


def test_the_wheel_is_pure_and_holds_the_package_and_nothing_else(distributions):
    wheel = distributions[0]
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(contents(wheel))
    files = [p for p in (ROOT / "fastrl").rglob("*.py") if "kernels" not in p.parts]
    # rglob does not enter links to directories on every version of Python.
    files += (ROOT / "fastrl" / "kernels").glob("*.py")
    expected = {p.relative_to(ROOT).as_posix() for p in files} | {"fastrl/py.typed", "fastrl/__init__.pyi"}
    expected |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "fastrl" / "help").iterdir()}
    expected |= {f"fastrl/{p.relative_to(ROOT)}" for p in (ROOT / "csrc").rglob("*") if p.suffix in SHIPPED}
    assert {n for n in names if ".dist-info/" not in n} == expected
    assert any(n.endswith("/LICENSE") for n in names)
    assert any(n.startswith("fastrl/kernels/") for n in names)
    assert all(any(n.endswith(suffix) for n in names) for suffix in SHIPPED)


def test_the_sdist_builds_the_same_wheel(distributions):
    direct, through_sdist = map(contents, distributions)
    assert direct == through_sdist


def test_the_wheel_alone_passes_the_check_of_a_release(distributions, tmp_path):
    with zipfile.ZipFile(distributions[0]) as archive:
        archive.extractall(tmp_path)
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (script,) = re.findall(r"<<'END'\n(.*?)^ *END$", workflow, re.MULTILINE | re.DOTALL)
    assert "(" in script
    printed = python("-P", "-", stdin=textwrap.dedent(script), PYTHONPATH=str(tmp_path))
    assert printed == f"{fastrl.__version__} {tmp_path / 'fastrl' / '__init__.py'}\n"


def test_the_hubs_kernel_is_the_library_under_another_name(tmp_path, monkeypatch):
    """As the kernels of the hub are loaded: from a path, with the module _ops that their builder adds."""
    runpy.run_path(str(ROOT / "release" / "hub_kernel.py"))["lay_out"](tmp_path / "kernel")
    assert tomllib.loads((tmp_path / "kernel" / "build.toml").read_text())["general"]["name"] == "fastrl"
    package = tmp_path / "kernel" / "torch-ext" / "fastrl"
    assert not (package / "training").exists() and (package / "csrc" / "rows.cpp").is_file()
    name = "_fastrl_1234567"
    (package / "_ops.py").write_text(f"def add_op_namespace_prefix(name):\n    return '{name}::' + name\n")
    spec = importlib.util.spec_from_file_location(name, package / "__init__.py")
    kernel = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "modules", sys.modules | {name: kernel})
    spec.loader.exec_module(kernel)
    own = "".join(path.read_text() for path in package.rglob("*.py"))
    assert not re.search(r"^ *(import|from) fastrl|import_module\(f?.fastrl", own, re.MULTILINE)
    hidden, head = torch.randn(4, 8), torch.randn(50, 8)
    ours, theirs = (module.linear_token_logprobs(hidden, head, torch.arange(4)) for module in (fastrl, kernel))
    assert torch.equal(ours.logprobs, theirs.logprobs) and type(ours) is not type(theirs)
    advantages = {"advantages": torch.ones(4)}
    ours, theirs = (
        module.linear_policy_loss(hidden, head, torch.arange(4), objective=module.DAPO(), **advantages)
        for module in (fastrl, kernel)
    )
    assert torch.equal(ours.loss, theirs.loss) and ours.metrics["tokens"] == 4
    assert torch.ops._fastrl_1234567.linear_forward_gradient is not torch.ops.fastrl.linear_forward_gradient


# --- versions ---------------------------------------------------------------------------------------------------------


def test_the_dockerfile_has_the_versions_that_ran_on_a_gpu():
    page, recipe = (ROOT / "docs" / "features.md").read_text(), (ROOT / "Dockerfile").read_text()
    torch_, cuda, triton, transformers, version = re.search(
        r"with torch (\S+), CUDA (\S+), Triton (\S+), transformers (\S+)\s+and\sPython (\d\S+)\.\s", page
    ).groups()
    pins = {f"torch=={torch_}", f"triton=={triton}", f"transformers=={transformers}"}
    assert set(re.findall(r"[a-z]+==[\d.]+", recipe)) == pins
    assert f"whl/cu{cuda.replace('.', '')}\n" in recipe and f"CUDA {cuda} " in recipe
    assert f"FROM python:{version}-" in recipe
    copied = re.findall(r"^COPY (.*) \S+$", recipe, re.MULTILINE)
    assert all((ROOT / name).exists() for names in copied for name in names.split())


def test_workflows_have_the_torch_of_the_constraints():
    pinned = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE).group()
    texts = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    assert {pin for text in texts for pin in re.findall(r"torch==\S+", text)} == {pinned}


def test_every_source_of_a_kernel_is_of_a_kind_that_is_shipped():
    assert {p.suffix for p in (ROOT / "csrc").rglob("*") if p.is_file()} <= {*SHIPPED, ".md"}
    assert {p.suffix for p in (ROOT / "kernels").iterdir() if p.is_file()} <= {".py", ".md"}


# --- names on the package index ---------------------------------------------------------------------------------------


def test_the_wheel_has_a_name_of_its_own_and_leaves_triton_to_torch(distributions):
    """The index's fastrl is another project; torch's builds bring the Triton for their GPUs under different names."""
    files = contents(distributions[0])
    (metadata,) = (message_from_bytes(text) for name, text in files.items() if name.endswith("/METADATA"))
    assert distributions[0].name.startswith("fastrl_lm-") and metadata["Name"] == "fastrl-lm"
    names = {re.match(r"[\w.-]+", line).group() for line in metadata.get_all("Requires-Dist")}
    assert "torch" in names
    assert not {name for name in names if "triton" in name or name.replace("_", "-") in ("fastrl", "fastrl-lm")}


#: `pip install` of either name, or an extra of one: what an index would answer. A path to a wheel is none.
FROM_INDEX = re.compile(
    r"""\bpip3?\s+install\b[^`\n]*?[\s'"]fastrl([-_]lm)?(?=[\s'"\[<>=~!`,;)]|[.:](\s|$)|$)|\bfastrl([-_]lm)?\[[a-z,]+\]"""
)
WRITTEN = {".py", ".md", ".toml", ".txt", ".sh", ".in", ".cfg", ".ini", ".yml", ".yaml", *SHIPPED, ""}
NOT_OURS = (".venv", ".venv-engine", ".git", "build", "dist", "runs")


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("pip install {}", True),
        ("run `pip install {}` first", True),
        ("python -m pip install --upgrade {}>=0.1", True),
        ("pip install '{}[train]'", True),
        ('dev = ["{}[train]"]', True),
        ("pip install torch {}-lm", True),
        ("pip install -e '.[train]'", False),
        ("pip install dist/{}_lm-0.1.0-py3-none-any.whl", False),
        ("pip install {}lock", False),
        ("pip install {}.", True),
        ("pip install 'trl>=1.16', for {}.integrations.trl", False),
        ("import {}", False),
    ],
)
def test_what_an_index_would_answer_is_found(line, asks):
    assert bool(FROM_INDEX.search(line.format("fastrl"))) == asks


def test_no_file_says_to_install_fastrl_from_an_index():
    told = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.suffix not in WRITTEN or not path.is_file() or parts[0] in NOT_OURS:
            continue
        if any(part.endswith((".egg-info", "_cache", "__pycache__")) for part in parts):
            continue
        lines = path.read_text(errors="ignore").splitlines()
        told += [f"{path.relative_to(ROOT)}:{i}: {line}" for i, line in enumerate(lines, 1) if FROM_INDEX.search(line)]
    assert not told, "\n".join(told)


def test_messages_ask_for_the_packages_of_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {line for name, extra in extras.items() if name not in ("bench", "dev") for line in extra}
    declared |= {"tabulate"} & set(extras["bench"])
    peers = set(re.search(r"^PEERS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split())
    assert set(dependencies.REQUIREMENTS.values()) <= declared | peers
    assert {dependencies.REQUIREMENTS[name] for name in dependencies.TRAIN} == set(extras["train"])


def test_the_page_and_the_doctor_name_the_same_tested_versions():
    page = (ROOT / "docs" / "features.md").read_text()
    (line,) = re.findall(r"^## Versions\n.*?(?=^## )", page, re.MULTILINE | re.DOTALL)
    for name, versions in doctor.TESTED.items():
        for version in versions:
            # transformers by its minor version: that is how it is released.
            assert version.removesuffix(".0") in line, (name, version)
