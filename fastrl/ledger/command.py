"""`fastrl plan`: the plans of a linear loss within a memory budget, the ledger of the one that it takes, its shares."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec

from fastrl.base.devices import DEVICES, H100
from fastrl.ledger import calls
from fastrl.ledger.plans import DTYPES, call_of, plan_memory
from fastrl.ledger.record import pretend
from fastrl.ledger.scaling import Layout, report, share_of
from fastrl.ledger.table import text_of
from fastrl.objectives.presets import PRESETS, any_numbers
from fastrl.planning.budget import parse_budget
from fastrl.planning.plans import Call

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
    sizes, dtype = (options.tokens, options.hidden, options.vocab), DTYPES[options.dtype]
    shared = {
        "objective": None if options.objective == "logprobs" else any_numbers(options.objective),
        "gradients": [x for x in options.gradients.split(",") if x not in ("", "none")],
        "on_policy": options.on_policy,
        "longest": options.longest,
        "kept": options.kept,
        "teacher_hidden": options.teacher_hidden,
        "gathered": options.gathered,
        "logits_dtype": None if options.logits_dtype is None else DTYPES[options.logits_dtype],
    }
    if (options.tp, options.cp, options.gpus) != (None, None, None):
        shared["over_ranks"] = (options.cp or 1) > 1
        return _over_gpus(options, call_of(*sizes, dtype, unrecorded=options.unrecorded, device="cuda", **shared))
    shared["budget"] = options.budget
    named = DEVICES.get((options.device or "").upper())
    gpu = named if named is not None and named.kind == "cuda" else None
    ledger = None if options.ledger is None else (gpu or H100) if options.ledger is True else DEVICES[options.ledger]
    if ledger is not None:
        if options.device == "cpu" or ledger is not (gpu or ledger):
            raise ValueError(f"--ledger prices the launches on a GPU, {ledger.name}, got --device {options.device}")
        if find_spec("triton") is None:
            raise ValueError("--ledger lists the launches of Triton kernels: triton is not installed")
        if options.unrecorded:
            raise ValueError(f"--ledger takes no --unrecorded tokens, got {options.unrecorded}")
        gpu = ledger
    device = options.device if gpu is None else gpu.kind
    with nullcontext() if gpu is None else pretend(gpu):
        plans = plan_memory(*sizes, dtype, unrecorded=options.unrecorded, device=device, **shared)
    if ledger is None:
        return str(plans)
    launches = calls.linear(*sizes, dtype, ledger, **shared)
    return f"{plans}\n\n{text_of(launches, plans.chosen, ledger, dtype.itemsize)}"


def _over_gpus(options: argparse.Namespace, call: Call) -> str:
    """What the command prints for a call over several GPUs. Raises ValueError for a wrong option."""
    if options.ledger is not None:
        raise ValueError("--ledger lists the launches on one GPU: it goes without --tp, --cp and --gpus")
    if options.kept:
        raise ValueError(f"--tp, --cp and --gpus go without --kept, got {options.kept}")
    if options.teacher_hidden is not None:
        raise ValueError(f"--tp, --cp and --gpus go without --teacher-hidden, got {options.teacher_hidden}")
    if options.gathered:
        raise ValueError(f"--tp, --cp and --gpus go without --gathered, got {options.gathered}")
    tp, cp = (1 if n is None else n for n in (options.tp, options.cp))
    device = H100 if options.device in (None, "cuda") else DEVICES[options.device.upper()]
    layout = Layout(tp, cp, tp * cp if options.gpus is None else options.gpus).checked(device)
    return report(share_of(call, layout, device, parse_budget(options.budget, "--budget")), layout, device)


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
    add("--budget", help="such as 512MiB; default: a sixteenth of the device's memory")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--logits-dtype", choices=("float32",), help="of the logits, unrounded sums; default: that of the head")
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
    add(
        "--teacher-hidden",
        type=int,
        help="width of a teacher's hidden states: plans linear_divergence, whatever --objective says; U counts the"
        " student's products, TFLOP the teacher's too",
    )
    add(
        "--gathered",
        type=int,
        default=0,
        help="ids whose log-probabilities are asked for, of all tokens together: plans linear_gathered_logprobs,"
        " whatever --objective says",
    )
    add(
        "--device",
        type=str.lower,
        choices=("cuda", *map(str.lower, DEVICES)),
        help="a GPU that is named need not be here; default: the GPU if there is one",
    )
    add("--tp", type=int, help="GPUs over which the vocabulary lies: prints what each does and exchanges, modelled")
    add("--cp", type=int, help="GPUs over which the tokens lie; the same")
    add("--gpus", type=int, help="all GPUs, over which the head's gradient is summed; default: tp x cp")
    add(
        "--ledger",
        nargs="?",
        const=True,  # the one of --device
        type=str.upper,
        choices=_GPUS,
        help="also list the kernel launches of the chosen plan and its backward, with their bytes, operations and"
        f" modelled time on this GPU (default: that of --device, or {H100.name}), which need not be here",
    )
    return parser
