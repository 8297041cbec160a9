"""What micro-batches of so many tokens gain over those of so many sequences, on responses of very different lengths.

    python benchmarks/micro_batches.py --out benchmarks/results/MACHINE/float32

A GRPO update (forward, loss, backward; no optimizer) of a small random model on one synthetic rollout, in float32 on
the CPU. The lengths of its responses are log-uniform. For each limit in tokens: the memory that a run states for it,
peak memory and time of micro-batches within it, and of the most sequences at a time, a power of two, whose peak is
within that statement too. Each way to cut is measured in
a process of its own, because what one has touched would count for the next. Its peak is the process's high-water mark
beyond that after an update on the shortest response.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import math
import random
import shlex
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from fastrl import GRPO, linear_policy_loss
from fastrl.base.system import field
from fastrl.bench.machine import describe
from fastrl.objectives.row_local import TOKEN
from fastrl.training.batches.loss_calls import LossCall, loss_plans
from fastrl.training.batches.memory import activation_bytes
from fastrl.training.batches.micro_batches import MicroBatches, Shape
from fastrl.training.batches.rollout import Rollout, hidden_states
from fastrl.training.config.sections import ModelConfig
from fastrl.training.config.stages import TokenTrainingConfig
from fastrl.training.models.policy import Policy

#: Tokens of a prompt, and of the shortest response.
PROMPT, SHORTEST = 20, 10
#: glibc's number of the size from which on memory is the system's own piece, and is returned when it is freed.
M_MMAP_THRESHOLD = -3


def lengths_of(count: int, longest: int) -> list[int]:
    """The lengths of the responses, log-uniform, in the order in which they were drawn; both ends are among them."""
    random.seed(0)
    inner = [round(SHORTEST * (longest / SHORTEST) ** random.random()) for _ in range(count - 2)]
    lengths = [SHORTEST, longest, *inner]
    random.shuffle(lengths)
    return lengths


def by_count(lengths: list[int], size: int) -> list[list[int]]:
    """Micro-batches of so many sequences, in the drawn order."""
    return [list(range(first, min(first + size, len(lengths)))) for first in range(0, len(lengths), size)]


def shapes_of(lengths: list[int]) -> list[Shape]:
    """What each response takes in a micro-batch."""
    return [Shape(1, PROMPT + length, PROMPT + length) for length in lengths]


def computed(lengths: list[int], part: list[int], packed: bool) -> int:
    """The tokens of a micro-batch, prompts and padding included."""
    shapes = shapes_of([lengths[row] for row in part])
    return functools.reduce(Shape.__add__, shapes).size(packed)


def make_policy(hidden: int, layers: int, vocab: int, longest: int) -> Policy:
    """A random Qwen2."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=PROMPT + longest,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0})))
    return Policy(model, tokenizer, vocab, [0], 0, torch.float32)


def make_rollout(lengths: list[int], vocab: int) -> Rollout:
    """Responses of random tokens, and their advantages."""
    g = torch.Generator().manual_seed(0)
    total, ends = PROMPT + max(lengths), PROMPT + torch.tensor(lengths)
    return Rollout(
        input_ids=torch.randint(vocab, (len(lengths), total), generator=g),
        attention_mask=torch.arange(total) < ends[:, None],
        prompt_length=PROMPT,
        response_advantages=torch.randn(len(lengths), generator=g),
    )


def update(policy: Policy, rollout: Rollout, parts: list[list[int]], packed: bool) -> None:
    """Add the gradient of the whole rollout, as `accumulate_gradients` of the trainer does, a micro-batch at a time."""
    tokens = int(rollout.mask.sum())
    for rows in parts:
        batch = rollout.select(torch.tensor(rows))
        states = hidden_states(policy, batch, packed)
        leaf = states.detach().requires_grad_()
        result = policy.apply_head(
            linear_policy_loss,
            leaf,
            objective=GRPO(kl_coef=0),
            denominator=tokens,
            num_tokens=int(batch.mask.sum()),
            **batch.loss_arguments(packed),
        )
        result.loss.backward()
        states.backward(leaf.grad)


def stated(policy: Policy, limit: int, longest: int, packed: bool) -> int:
    """What a run with this limit says that its micro-batches and losses take, modelled, in bytes."""
    settings = ModelConfig(path="random")
    held = activation_bytes(policy.model, settings, limit, PROMPT + longest, packed)
    call = LossCall("the loss", limit, limit, longest, packed, TOKEN, own_leaf=True)
    (plan,) = loss_plans(TokenTrainingConfig(), settings, policy.device, [call], policy)
    return held + plan.temporary_bytes


def high_water() -> int:
    """The most memory that this process has had, in bytes."""
    value = field("/proc/self/status", "VmHWM")
    assert value is not None, "peak memory is read from /proc/self/status, which is Linux's"
    return int(value.split()[0]) << 10


def measure(
    lengths: list[int],
    parts: list[list[int]],
    packed: bool,
    shape: tuple[int, int, int],
    repeats: int,
    most: float,
    limit: int | None,
) -> dict[str, float | None]:
    """Peak bytes of an update beyond the model and its gradients; its median seconds, if the peak is at most `most`.

    With a limit in tokens also the peak that a run states.
    """
    hidden, layers, vocab = shape
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)  # a freed tensor goes back at once, so gaps between others do not count
    policy, rollout = make_policy(hidden, layers, vocab, max(lengths)), make_rollout(lengths, vocab)
    update(policy, rollout, [[lengths.index(min(lengths))]], packed)
    before = high_water()
    update(policy, rollout, parts, packed)
    peak = high_water() - before
    found = {"peak_bytes": peak, "stated_bytes": limit and stated(policy, limit, max(lengths), packed)}
    if peak > most:
        return {**found, "seconds": None}
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # that costs time: every page is new each time
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        update(policy, rollout, parts, packed)
        times.append(time.perf_counter() - start)
    return {**found, "seconds": statistics.median(times)}


def run(
    lengths: list[int], limits: list[int], layouts: list[str], shape: tuple[int, int, int], repeats: int
) -> list[dict[str, Any]]:
    """A row for each limit, and for 1, 2, 4, ... sequences up to the first that takes more memory than any limit."""
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:

        def add(layout: str, cut: str, value: int, most: float = math.inf) -> dict[str, Any]:
            """Measure it. Returns what was found."""
            packed = layout == "packed"
            limit, parts = None, by_count(lengths, value)
            if cut == "tokens":
                limit = value
                parts = MicroBatches(value, packed).cut(shapes_of(lengths))
            found = pool.submit(measure, lengths, parts, packed, shape, repeats, most, limit).result()
            sizes = [computed(lengths, part, packed) for part in parts]
            of_parts = {"micro_batches": len(parts), "tokens": sum(sizes), "largest": max(sizes)}
            rows.append({"layout": layout, "cut": cut, "value": value, **of_parts, **found})
            print(rows[-1], file=sys.stderr)
            return dict(found)

        for layout in layouts:
            most = max([add(layout, "tokens", limit)["stated_bytes"] for limit in limits])
            size = 1
            while add(layout, "sequences", size, most)["peak_bytes"] <= most and size < len(lengths):
                size *= 2
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: each limit beside the largest number of sequences whose peak is within what a run states for it."""
    names = ["tokens", "micro-batches", "peak, MiB", "s", "stated, MiB", "sequences", "micro-batches", "peak, MiB", "s"]
    names = ["batch", *names, "faster", "than the fastest number"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]

    def cells(x: dict[str, Any]) -> str:
        return f"{x['value']} | {x['micro_batches']} | {x['peak_bytes'] / 2**20:.0f} | {x['seconds']:.2f}"

    for ours in (x for x in rows if x["cut"] == "tokens"):
        counted = [x for x in rows if x["cut"] == "sequences" and x["layout"] == ours["layout"]]
        fit = [x for x in counted if x["peak_bytes"] <= ours["stated_bytes"]]
        first = f"{cells(ours)} | {ours['stated_bytes'] / 2**20:.0f}"
        if not fit:
            lines.append(f"| {ours['layout']} | {first} | none fits | | | | | |")
            continue
        largest, fastest = max(fit, key=lambda x: x["value"]), min(x["seconds"] for x in fit)
        lines.append(
            f"| {ours['layout']} | {first} | {cells(largest)} | {largest['seconds'] / ours['seconds']:.2f} |"
            f" {fastest / ours['seconds']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=32)
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest response")
    parser.add_argument("--limits", type=int, nargs="+", default=[2, 4], help="in longest sequences")
    parser.add_argument("--layouts", nargs="+", default=["padded"], choices=["padded", "packed"])
    parser.add_argument("--shape", type=int, nargs=3, default=[128, 2, 4096], metavar=("H", "LAYERS", "V"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a folder for micro_batches.json")
    args = parser.parse_args()
    lengths = lengths_of(args.responses, args.longest)
    limits = [x * (PROMPT + args.longest) for x in args.limits]
    rows = run(lengths, limits, args.layouts, tuple(args.shape), args.repeats)
    print(table(rows))
    if args.out is not None:
        named = {**describe([]), "command": shlex.join(["python", *sys.argv])}
        asked = {"shape": args.shape, "lengths": lengths, "prompt": PROMPT, "repeats": args.repeats}
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "micro_batches.json").write_text(json.dumps({**named, **asked, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
