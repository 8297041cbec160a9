"""verl's own files, loaded without what verl imports, and the numbers that its tests allow.

`make test` puts verl's files, without its dependencies, into .venv/share/fastrl-peers; the modules under test import
little of it, and stand-ins take the place of the rest.
"""

import importlib.util
import site
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CLOSE = {"rtol": 2e-5, "atol": 5e-6}


def folder_of(package):
    """Where a package's files are, or a skip."""
    for root in (Path(sys.prefix) / "share" / "fastrl-peers", *map(Path, site.getsitepackages())):
        if (root / package).is_dir():
            return root / package
    pytest.skip(f"{package} is not installed beside the tests (make test does it)")


@dataclass
class ActorConfig:
    """The fields of verl's class that its policy losses read."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = 0.1
    clip_ratio_high: float | None = 0.15
    clip_ratio_c: float = 1.4
    tau_pos: float = 0.9
    tau_neg: float = 1.3
    use_kl_loss: bool = False
    policy_loss: types.SimpleNamespace = field(default_factory=lambda: types.SimpleNamespace(ppo_kl_coef=0.3))
    global_batch_info: dict = field(default_factory=dict)

    def get(self, name, default=None):
        return getattr(self, name, default)


def stand_ins(version):
    """Modules that verl's files import and these tests do not need."""
    contents = {
        "omegaconf": {"DictConfig": dict},
        "tensordict": {"TensorDict": dict},
        "verl": {"__version__": version},
        "verl.trainer": {},
        "verl.trainer.ppo": {},
        "verl.trainer.config": {"AlgoConfig": type("AlgoConfig", (), {})},
        "verl.utils": {"as_torch_index": None, "group_mean_std": None},
        "verl.utils.experimental": {},
        "verl.utils.kernel": {},
        "verl.workers": {},
        "verl.workers.config": {"ActorConfig": ActorConfig},
        "verl.utils.device": {"get_device_name": None, "get_torch_device": None},
    }
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(values)
        yield name, module


@contextmanager
def loaded():
    """verl.trainer.ppo.core_algos, and the two modules with its fused kernels, in sys.modules inside the block."""
    folder = folder_of("verl")
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "verl"}
    version = (folder / "version" / "version").read_text().strip()
    fresh = dict(stand_ins(version))
    fresh = {name: module for name, module in fresh.items() if name.startswith("verl") or name not in sys.modules}
    sys.modules.update(fresh)
    real = (
        "utils.import_utils",
        "utils.torch_functional",
        "trainer.ppo.core_algos",
        "utils.experimental.torch_functional",
        "utils.kernel.linear_cross_entropy",
    )
    for name in real:
        spec = importlib.util.spec_from_file_location(f"verl.{name}", folder / f"{name.replace('.', '/')}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"verl.{name}"] = fresh[f"verl.{name}"] = module
        parent, _, leaf = f"verl.{name}".rpartition(".")
        setattr(sys.modules[parent], leaf, module)
        spec.loader.exec_module(module)
    yield sys.modules["verl.trainer.ppo.core_algos"]
    for name in fresh:
        del sys.modules[name]
    sys.modules.update(before)
