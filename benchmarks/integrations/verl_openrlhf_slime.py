"""verl's fused head and OpenRLHF's log-probabilities beside ours, and a slime-style loss beside eager torch.

    OMP_NUM_THREADS=1 python benchmarks/integrations/verl_openrlhf_slime.py  # 1024 tokens, H 256, V 32768, float32

The packages' own files are read from where `make test` puts them (.venv/share/fastrl-peers), with stand-ins for what
they import. Processor time, median of 5; memory is what a call and its backward hold beyond inputs, outputs and
gradients.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.bench.measure import Outcome, Run, peak_temporary_bytes
from fastrl.integrations import losses_from_logits, openrlhf, verl

TOKENS, HIDDEN, VOCAB, REPEATS = 1024, 256, 32768, 5
PEERS = Path(sys.prefix) / "share" / "fastrl-peers"


def load(path: str, stand_ins: dict[str, dict[str, Any]]) -> Any:
    """One file of a package, whose imports find these modules."""
    for name, values in stand_ins.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(values)
        sys.modules.setdefault(name, module)
    name = path.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, PEERS / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def report(title: str, contenders: dict[str, Callable[[], Tensor]], inputs: tuple[Tensor, ...]) -> None:
    print(title)
    for name, loss in contenders.items():

        def call(loss: Callable[[], Tensor] = loss) -> Outcome:
            gradients = torch.autograd.grad(loss(), inputs)
            return Outcome(None, None, None, dict(enumerate(gradients)))  # type: ignore[arg-type]

        call()
        seconds = []
        for _ in range(REPEATS):
            began = time.process_time()
            call()
            seconds.append(time.process_time() - began)
        peak = (peak_temporary_bytes(Run(call), "cpu") or 0) / 2**20
        print(f"  {name:28} {1000 * statistics.median(seconds):6.0f} ms {peak:6.0f} MiB")


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    hidden = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    weight = (torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5).requires_grad_()
    ids = torch.randint(VOCAB, (1, TOKENS))
    slope, slope2 = torch.randn(1, TOKENS), torch.randn(1, TOKENS)
    nothing: dict[str, dict[str, Any]] = {"verl": {}, "verl.utils": {}, "verl.utils.experimental": {}}
    theirs = load("verl/utils/experimental/torch_functional.py", nothing).FusedLinearForPPO()

    def head(module: Any) -> Tensor:
        logprobs, entropy = module.forward(hidden, weight, ids, temperature=1.0)
        return (logprobs * slope + entropy * slope2).sum()

    ours = verl.FusedLinearForPPO()
    report(
        "verl: log-probabilities, entropies and both gradients from hidden states",
        {"verl (torch)": lambda: head(theirs), "fastrl": lambda: head(ours)},
        (hidden, weight),
    )

    logits = (hidden @ weight.T).detach().requires_grad_()
    utils = load("openrlhf/models/utils.py", {"deepspeed": {}, "openrlhf": {}, "openrlhf.models": {}})
    report(
        "OpenRLHF: log-probabilities and the gradient from logits",
        {
            "OpenRLHF": lambda: (utils.log_probs_from_logits(logits, ids) * slope).sum(),
            "fastrl": lambda: (openrlhf.log_probs_from_logits(logits, ids) * slope).sum(),
        },
        (logits,),
    )

    batch = {
        "unconcat_tokens": [ids[0]],
        "total_lengths": [TOKENS],
        "response_lengths": [TOKENS - 1],
        "loss_masks": [torch.ones(TOKENS - 1)],
        "advantages": [slope[0, 1:]],
        "log_probs": [torch.randn(TOKENS - 1) * 0.1 - 10.9],
    }
    slime = losses_from_logits.slime_loss(fastrl.PPO(0.2))

    def eager() -> Tensor:
        logprobs = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        entropy = torch.distributions.Categorical(logits=logits[0, :-1]).entropy().detach()  # for the metrics
        ratio = (logprobs - batch["log_probs"][0]).exp()
        return -torch.minimum(ratio * slope[0, 1:], ratio.clamp(0.8, 1.2) * slope[0, 1:]).mean() + 0 * entropy.sum()

    arguments = types.SimpleNamespace()
    report(
        "slime: PPO's loss and the gradient from logits",
        {"eager torch": eager, "fastrl": lambda: slime(arguments, batch, logits, torch.mean)[0]},
        (logits,),
    )


if __name__ == "__main__":
    main()
