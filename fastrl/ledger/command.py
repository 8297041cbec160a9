"""`fastrl plan`: the plans of a linear loss within a memory budget, and the ledger of the one that it takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec

from fastrl.ledger import calls
from fastrl.ledger.record import pretend
from fastrl.ledger.table import text_of
from fastrl.objectives.presets import PRESETS, any_numbers
from fastrl.planning.devices import DEVICES
from fastrl.planning.table import DTYPES, plan_memory

_GPUS = [name for name, device in DEVICES.items() if device.kind == "cuda"]


def main(argv: Sequence[str]) -> int:
    """Runs `fastrl plan` with these arguments and returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        print(_plans(options))
    except ValueError as error:
        print(f"fastrl plan: {error}", file=sys.stderr)
        return 2
    return 0


def _plans(options: argparse.Namespace) -> str:
    """What the command prints. Raises ValueError for a wrong option."""
    gpu = None if options.ledger is None else DEVICES[options.ledger]
    if gpu is not None and options.device == "cpu":
        raise ValueError(f"--ledger prices the launches on a GPU, {gpu.name}, got --device cpu")
    if gpu is not None and find_spec("triton") is None:
        raise ValueError("--ledger lists the launches of Triton kernels: triton is not installed")
    if gpu is not None and options.unrecorded:
        raise ValueError(f"--ledger takes no --unrecorded tokens, got {options.unrecorded}")
    sizes, dtype = (options.tokens, options.hidden, options.vocab), DTYPES[options.dtype]
    gradients = [x for x in options.gradients.split(",") if x not in ("", "none")]
    shared = {
        "objective": None if options.objective == "logprobs" else any_numbers(options.objective),
        "gradients": gradients,
        "on_policy": options.on_policy,
        "longest": options.longest,
        "kept": options.kept,
        "budget": options.budget,
    }
    device = options.device if gpu is None else "cuda"
    with nullcontext() if gpu is None else pretend(gpu, calls.free_bytes(gpu, *sizes, dtype)):
        plans = plan_memory(*sizes, dtype, unrecorded=options.unrecorded, device=device, **shared)
    if gpu is None:
        return str(plans)
    ledger = calls.linear(*sizes, dtype, gpu, **shared)
    return f"{plans}\n\n{text_of(ledger, plans.chosen, gpu, dtype.itemsize)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastrl plan",
        description="Which plan a fused linear loss takes within a budget of temporary memory, and what the others"
        " cost: U = 2 x tokens x hidden x vocabulary floating-point operations (of tokens without a recorded support if"
        " others have one); estimated times are relative to the chosen plan's.",
    )
    add = parser.add_argument
    add("--tokens", type=int, required=True, help="unmasked tokens")
    add("--hidden", type=int, required=True, help="width of the hidden states")
    add("--vocab", type=int, required=True, help="entries of the vocabulary")
    add("--budget", help="such as 512MiB; default: half of the free memory")
    add("--dtype", choices=DTYPES, default="bfloat16")
    names = [*PRESETS, "logprobs"]
    add(
        "--objective",
        choices=names,
        default="GRPO",
        metavar="NAME",
        help=f"one of {', '.join(PRESETS)}; or logprobs, for log-probabilities alone; default: %(default)s",
    )
    add("--gradients", default="hidden,weight", help="some of hidden,weight,bias, or none; default: %(default)s")
    add("--on-policy", action="store_true", help="without old log-probabilities")
    add("--longest", type=int, help="tokens of the longest response; default: all")
    add("--kept", type=int, default=0, help="recorded ids of all tokens' sampling masks together; default: no masks")
    add(
        "--unrecorded",
        type=int,
        default=0,
        help="tokens without a recorded support (or with a very wide one) beside those that have one",
    )
    add("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    add(
        "--ledger",
        nargs="?",
        const=_GPUS[0],
        choices=_GPUS,
        help="also list the kernel launches of the chosen plan and its backward, with their bytes, operations and"
        f" modelled time on this GPU (default: {_GPUS[0]}), which need not be here; its memory is taken as free",
    )
    return parser
