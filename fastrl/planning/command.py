"""`fastrl plan`: the plans of a linear loss within a memory budget."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from fastrl.base.devices import DEVICES
from fastrl.objectives.presets import PRESETS, any_numbers
from fastrl.planning.budget import parse_budget
from fastrl.planning.memory import DTYPES, call_of, plans_of

#: Those that a table of devices has, as the command line names them.
NAMED_GPUS = {name.lower(): device for name, device in DEVICES.items() if device.kind == "cuda"}


def main(argv: Sequence[str]) -> int:
    """Runs `fastrl plan` with these arguments and returns the exit status."""
    parser = call_parser(
        "fastrl plan",
        "Which plan a fused linear loss takes within a budget of temporary memory, and what the others"
        " cost: U = 2 x tokens x hidden x vocabulary floating-point operations (of tokens without a recorded support if"
        " others have one); estimated times are relative to the chosen plan's.",
    )
    add = parser.add_argument
    told = "tokens without a recorded support (or with a very wide one) beside those that have one"
    add("--unrecorded", type=int, default=0, help=told)
    told = "a GPU that is named need not be here; default: the GPU if there is one"
    add("--device", type=str.lower, choices=("cuda", *NAMED_GPUS, "cpu"), help=told)
    options = parser.parse_args(argv)
    named = NAMED_GPUS.get(options.device)
    device = options.device if named is None else named.kind
    try:
        call = call_of(**call_arguments(options), unrecorded=options.unrecorded, device=device)
        share = None if named is None else named.memory // 16
        print(plans_of(call, parse_budget(options.budget, "budget"), share))
    except ValueError as error:
        print(f"fastrl plan: {error}", file=sys.stderr)
        return 2
    return 0


def call_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `plan_memory` that say what the call is, from the options of `call_parser`."""
    same = ("tokens", "hidden", "vocab", "on_policy", "longest", "kept", "teacher_hidden", "gathered")
    return {
        **{name: getattr(options, name) for name in same},
        "dtype": DTYPES[options.dtype],
        "objective": None if options.objective == "logprobs" else any_numbers(options.objective),
        "gradients": [x for x in options.gradients.split(",") if x not in ("", "none")],
        "logits_dtype": DTYPES.get(options.logits_dtype),
        "batch_invariant": options.batch_invariant,
    }


def call_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser of what a call is and of its budget; a program adds what it plans or models beside that."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add = parser.add_argument
    add("--tokens", type=int, required=True, help="unmasked tokens")
    add("--hidden", type=int, required=True, help="width of the hidden states")
    add("--vocab", type=int, required=True, help="entries of the vocabulary")
    add("--budget", help="such as 512MiB; default: a sixteenth of the device's memory")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--logits-dtype", choices=("float32",), help="of the logits, unrounded sums; default: that of the head")
    add("--batch-invariant", action="store_true", help="each row with the same bits whatever else is computed")
    told = f"one of {', '.join(PRESETS)}; or logprobs, for log-probabilities alone; default: %(default)s"
    add("--objective", choices=[*PRESETS, "logprobs"], default="GRPO", metavar="NAME", help=told)
    add("--gradients", default="hidden,weight", help="some of hidden,weight,bias, or none; default: %(default)s")
    add("--on-policy", action="store_true", help="without old log-probabilities")
    add("--longest", type=int, help="tokens of the longest response; default: all")
    add("--kept", type=int, default=0, help="recorded ids of all tokens' sampling masks together; default: no masks")
    told = "width of a teacher's hidden states: plans linear_divergence, whatever --objective says; U counts the"
    add("--teacher-hidden", type=int, help=f"{told} student's products, TFLOP the teacher's too")
    told = "ids whose log-probabilities are asked for, of all tokens together: plans linear_gathered_logprobs,"
    add("--gathered", type=int, default=0, help=f"{told} whatever --objective says")
    return parser
