"""Lay out the library as a source of Hugging Face's kernel-builder: python release/hub_kernel.py build/hub-kernel

A kernel from the hub is imported under a name of its own, several versions beside each other. So the copy's imports are
relative, and its operators are registered under the name that the builder gives them. It holds the losses with all
backends, without the trainer, the adapters, the benchmarks and the commands.
"""

import ast
import shutil
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "fastrl"
LEFT_OUT = {"__main__.py", "bench", "cli.py", "doctor.py", "help", "integrations", "models", "rewards", "training"}
#: Version 0 is the hub's for interfaces that may still change. A backend is what a loss can run on.
BUILD = """[general]
name = "fastrl"
version = 0
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda", "rocm"]

[torch-noarch]
pyext = ["py", "cpp", "h", "cuh"]
"""
FLAKE = """{
  description = "Fused vocabulary losses for reinforcement learning of language models";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }: kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""
#: How operator.py names an operator, and how in a kernel: the function is in the _ops.py that the builder adds.
OWN_NAME, HUBS_NAME = 'f"fastrl::{self.__name__}"', "add_op_namespace_prefix(self.__name__)"


def relative(source: str, dots: str) -> str:
    """A module's source with imports of the package relative to it."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "fastrl" for alias in node.names):
            raise SystemExit(f"line {node.lineno}: only `from fastrl... import` can be made relative")
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fastrl":
            line = lines[node.lineno - 1]
            start = f"from {dots}{node.module.removeprefix('fastrl').removeprefix('.')} import"
            lines[node.lineno - 1] = line.replace(f"from {node.module} import", start)
    return "".join(lines)


def lay_out(target: Path) -> None:
    """Write the kernel's source to a directory, which is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    package = target / "torch-ext" / "fastrl"

    def ignored(folder: str, names: list[str]) -> set[str]:
        return {"__pycache__"} | (LEFT_OUT if Path(folder) == PACKAGE else set())

    shutil.copytree(PACKAGE, package, ignore=ignored)  # what the links kernels and csrc point to, too
    # The public names are imported at once: the package's own __init__.py looks for their modules by absolute names.
    (package / "__init__.pyi").rename(package / "__init__.py")
    for path in package.rglob("*.py"):
        dots = "." * len(path.relative_to(package).parts)
        path.write_text(relative(path.read_text(), dots))
    operators = package / "passes" / "operator.py"
    source = operators.read_text()
    if OWN_NAME not in source:
        raise SystemExit(f"{operators}: names operators in another way than {OWN_NAME}")
    imported = source.replace("\nimport torch\n", "\nimport torch\n\nfrom .._ops import add_op_namespace_prefix\n", 1)
    operators.write_text(imported.replace(OWN_NAME, HUBS_NAME))
    (target / "build.toml").write_text(BUILD)
    (target / "flake.nix").write_text(FLAKE)


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
