"""verl's own files, loaded without what verl imports, and the numbers that its tests allow."""

import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from peer_cases import folder_of, load_file, stand_in

CLOSE = {"rtol": 2e-5, "atol": 5e-6}

#: Numbers that bind for a dozen tokens.
POLICY_LOSS = {
    "ppo_kl_coef": 0.3,
    "dro_beta": 0.4,
    "clip_cov_ratio": 0.2,
    "clip_cov_lb": -0.2,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.3,
}


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
    policy_loss: types.SimpleNamespace = field(default_factory=lambda: types.SimpleNamespace(**POLICY_LOSS))
    global_batch_info: dict = field(default_factory=dict)

    def get(self, name, default=None):
        return getattr(self, name, default)


@contextmanager
def loaded():
    """verl.trainer.ppo.core_algos, and the two modules with its fused kernels, in sys.modules inside the block."""
    folder = folder_of("verl")
    # Modules that verl's files import and these tests do not need.
    contents = {
        "omegaconf": {"DictConfig": dict},
        "tensordict": {"TensorDict": dict},
        "verl": {"__version__": (folder / "version" / "version").read_text().strip()},
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
    real = (
        "utils.import_utils",
        "utils.torch_functional",
        "trainer.ppo.core_algos",
        "utils.experimental.torch_functional",
        "utils.kernel.linear_cross_entropy",
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, values in contents.items():
            if name.startswith("verl") or name not in sys.modules:
                stand_in(patch, name, **values)
        for name in real:
            parent, _, leaf = f"verl.{name}".rpartition(".")
            module = load_file(patch, f"verl.{name}", folder / f"{name.replace('.', '/')}.py")
            setattr(sys.modules[parent], leaf, module)
        yield sys.modules["verl.trainer.ppo.core_algos"]
