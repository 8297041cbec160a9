"""The data-parallel loop of the guide to several GPUs, in two processes."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from places import ROOT
from ranks import Ranks

PAGE = ROOT / "docs" / "guides" / "several_gpus.md"


def loop() -> dict[str, Any]:
    """What the page's script defines."""
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))
    (code,) = [code for code in blocks if code.startswith("# train.py")]
    namespace: dict[str, Any] = {"__name__": "train"}
    exec(compile(code, str(PAGE), "exec"), namespace)
    return namespace


def trained() -> list[float]:
    history: list[float] = loop()["train"](steps=15)
    return history


def differences() -> list[float]:
    """Between this rank's averaged gradient and that of one process over both ranks' responses, for each weight."""
    found, fastrl = loop(), __import__("fastrl")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = found["LlamaConfig"](
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
        )
        models.append(found["LlamaForCausalLM"](config).eval())
    tokens, advantages = torch.randint(1, 64, (6, 12)), torch.randn(6)
    mask = torch.arange(8) < torch.tensor([8, 8, 7, 1, 2, 3])[:, None]  # the ranks have different counts
    loss = {"objective": fastrl.DAPO(), "advantages": advantages, "mask": mask}
    found["PolicyLoss"](models[0])(tokens, 4, **loss).loss.backward()
    mine = slice(0, 3) if dist.get_rank() == 0 else slice(3, 6)
    wrapped = found["DistributedDataParallel"](found["PolicyLoss"](models[1]))
    share = found["global_share"](mask[mine])
    own = {"objective": fastrl.DAPO(), "advantages": advantages[mine], "mask": mask[mine], "denominator": share}
    wrapped(tokens[mine], 4, **own).loss.backward()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return [float((a.grad - b.grad).abs().max() / a.grad.abs().max()) for a, b in pairs]


def test_the_loop_has_the_gradient_of_the_whole_batch_and_learns() -> None:
    ranks = Ranks(2)
    try:
        for of_rank in ranks.run(differences):
            assert max(of_rank) < 1e-5
        for history in ranks.run(trained):
            assert history[0] < 0.1 and history[-1] > 0.2
    finally:
        ranks.stop()
