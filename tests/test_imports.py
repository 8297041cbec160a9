"""Imports point down: a folder may import those before it, and no modules form a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter

from places import LEVELS, ROOMS, ROOT

import fastrl

#: The kernels are part of the backends; of the rest they import the plain tuples only.
TUPLES = ("fastrl.backend.contract", "fastrl.objectives.rows")
#: Above the losses the package is used as its users do: by `import fastrl`.
USERS = LEVELS[LEVELS.index("models") :]


def modules() -> dict[str, set[str]]:
    """Each module of the package, and the modules that it imports, at its top or inside functions."""
    paths = [p for p in (ROOT / "fastrl").rglob("*.py") if "kernels" not in p.parts]
    paths += (ROOT / "fastrl" / "kernels").glob("*.py")  # a link, which rglob enters on some versions of Python only
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    return {name: set(imports(ast.parse(path.read_text()), set(names))) - {name} for name, path in names.items()}


def imports(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Modules of the package that a module imports; every import is absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fastrl")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names if (node.module or "").split(".")[0] == "fastrl" else ():
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in names else str(node.module)


def folder(module: str) -> str:
    """The folder of a module, "" for those at the root."""
    parts = module.split(".")
    return "backend" if parts[1:2] == ["kernels"] else parts[1] if len(parts) > 1 and parts[1] in LEVELS else ""


def test_imports_point_down() -> None:
    wrong = []
    for module, imported in modules().items():
        own = folder(module)
        for other in imported if own else ():
            up = (
                own not in USERS
                if other == "fastrl"
                else not folder(other) or LEVELS.index(folder(other)) > LEVELS.index(own)
            )
            if up or (module.startswith("fastrl.kernels") and not other.startswith(("fastrl.kernels", *TUPLES))):
                wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(sorted(wrong))


def test_imports_of_the_trainers_rooms_point_down() -> None:
    def room(module: str) -> str:
        *_, own = (*module.split(".")[:3], "")[:3]
        return own if module.startswith("fastrl.training.") and own in ROOMS else ""

    wrong = []
    for module, imported in modules().items():
        for other in imported if room(module) else ():
            if other.startswith("fastrl.training"):
                apart = {room(module), room(other)} == {"rl", "stages"}
                if apart or not room(other) or ROOMS.index(room(other)) > ROOMS.index(room(module)):
                    wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(sorted(wrong))
    folders = {path.parent.name for path in (ROOT / "fastrl" / "training").glob("*/*.py")}
    assert folders == {*ROOMS}


def test_rooms_can_be_read() -> None:
    """No file is longer than 300 lines, no room than 2,500; the thin trainer itself has at most 1,500."""
    files = list((ROOT / "fastrl" / "training").rglob("*.py"))
    lines = {path: len(path.read_text().splitlines()) for path in files}
    assert not [str(path) for path, count in lines.items() if count > 300]
    rooms = {room: sum(lines[path] for path in files if path.parent.name == room) for room in ROOMS}
    assert max(rooms.values()) <= 2500 and rooms["rl"] <= 1500, rooms


def test_no_modules_form_a_circle() -> None:
    list(TopologicalSorter(modules()).static_order())  # CycleError names one


def test_every_folder_says_what_it_is_for() -> None:
    for name in LEVELS:
        assert ast.get_docstring(ast.parse((ROOT / "fastrl" / name / "__init__.py").read_text())), name
    assert {p.name for p in (ROOT / "fastrl").glob("*.py")} == {"__init__.py", "__main__.py", "cli.py", "doctor.py"}


def test_no_module_has_the_name_of_a_public_one() -> None:
    """`import fastrl.name.part` would find the function, which has no parts."""
    public = set(fastrl.__all__)
    assert not public & {name.split(".")[1] for name in modules() if "." in name}
