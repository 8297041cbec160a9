"""The suites: their shapes, and the limits, measured in the same run, that their workloads are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fastrl.bench import (
    ceilings,
    linear_workloads,
    logits_workloads,
    masks_workloads,
    memory_workloads,
    overhead_workload,
    plans_workloads,
    sets_workloads,
    step_workloads,
)
from fastrl.bench.clock import time_issue
from fastrl.bench.measure import Limit, Row, finish
from fastrl.bench.problems import linear_problem, logits_problem
from fastrl.bench.running import Bench, Setting, Shape, seconds
from fastrl.bench.step_problem import step_problem
from fastrl.bench.workloads import COMPILED, EAGER, Section, Workload

_COPY, _READ = "a copy of as many bytes", "a read of as many bytes"
_PRODUCTS = "the bare matrix products"


@dataclass(frozen=True)
class Suite:
    """A group of workloads that share inputs: the names of the shape's axes, defaults per device, and how to run it."""

    axes: str
    defaults: dict[str, tuple[Shape, ...]]
    run: Callable[[Shape, Setting], Section]
    description: str
    needs: tuple[str, ...] = ()  # packages that only this suite needs


def run_logits(shape: Shape, setting: Setting) -> Section:
    """The logits suite at N, V; its limit is the memory's speed: a copy, and on a GPU also a read."""
    setting.log("inputs and float64 answers")
    n, vocab = shape
    on_gpu = setting.device == "cuda"
    bench = replace(_bench("logits", shape, setting), hot=on_gpu)
    problem = logits_problem(n, vocab, setting.dtype, setting.device)
    source = ceilings.stream(problem.logits)
    speeds = {"copy_bytes_per_second": ceilings.copy_speed(bench, source)}
    if on_gpu:
        speeds["read_bytes_per_second"] = ceilings.read_speed(bench, source)
    del source
    workloads = logits_workloads.workloads(problem)
    rows: list[Row] = []
    for workload in workloads:
        assert workload.workload_bytes is not None
        reads = on_gpu and workload.name == logits_workloads.FORWARD
        speed = speeds["read_bytes_per_second" if reads else "copy_bytes_per_second"]
        measured = bench.measure_workload(workload)
        limit = None if speed is None else Limit(workload.workload_bytes / speed, _READ if reads else _COPY)
        finish(measured, limit, EAGER, COMPILED)
        rows += measured
    return bench.section(speeds, workloads, rows)


def run_overhead(shape: Shape, setting: Setting) -> Section:
    """The overhead suite at N, V: the host's time for a loss and its backward; no limit."""
    n, vocab = shape
    problem = logits_problem(n, vocab, setting.dtype, setting.device)
    bench = replace(_bench("overhead", shape, setting), clock=time_issue)
    return _without_limit(bench, [overhead_workload.workload(problem)])


def run_linear(shape: Shape, setting: Setting) -> Section:
    """The linear suite at N, H, V; its limit is the matrix products alone; a copy measures the memory's speed."""
    setting.log("inputs and float64 answers")
    bench = _bench("linear", shape, setting)
    n, width, vocab = shape
    problem = linear_problem(n, width, vocab, setting.dtype, setting.device)
    copied = min(n * vocab, ceilings.STREAM_BYTES // setting.dtype.itemsize)
    speed = ceilings.copy_speed(bench, torch.rand(copied, dtype=setting.dtype, device=setting.device))
    limits: dict[str, float | None] = {"copy_bytes_per_second": speed}
    floors: dict[int | None, Row] = {}
    workloads = linear_workloads.workloads(problem)
    rows: list[Row] = []
    for workload in workloads:
        if workload.workload_flops not in floors:  # workloads with the same number of products share a measurement
            backward = workload.workload_flops != linear_workloads.product_flops(problem)
            floor = linear_workloads.products(problem.hidden, problem.weight, backward)
            floors[workload.workload_flops] = bench.measure_contender(floor, workload, with_expected=False)
        bare = replace(floors[workload.workload_flops], workload=workload.name, is_limit=True)
        measured = [bare, *bench.measure_workload(workload)]
        finish(measured, _limit(_PRODUCTS, bare), EAGER, COMPILED)
        limits[f"flops_per_second: {bare.contender}"] = bare.flops_per_second
        rows += measured
    return bench.section(limits, workloads, rows)


def run_plans(shape: Shape, setting: Setting) -> Section:
    """The plans suite at N, H, V; each row's limit is the bare products that its plan computes."""
    setting.log("inputs and float64 answers")
    bench = _bench("plans", shape, setting)
    n, width, vocab = shape
    problem = linear_problem(n, width, vocab, setting.dtype, setting.device, clipped=0.0)
    bare = plans_workloads.products(problem)
    rows = [replace(row, is_limit=True) for row in bench.measure_workload(bare)]
    times = [seconds(row) for row in rows]
    finish(rows, None, EAGER, COMPILED)
    workloads = [bare]
    for workload, ways in plans_workloads.workloads(problem):
        for contender, way in zip(workload.contenders, ways, strict=True):
            row = bench.measure_contender(contender, workload)
            if row.skipped is None:
                row.plan = way.taken(problem)
                finish([row], plans_workloads.floor(row.plan, way, times), EAGER, COMPILED)
            rows.append(row)
        workloads.append(workload)
    return bench.section(plans_workloads.limits(times), workloads, rows)


def run_memory(shape: Shape, setting: Setting) -> Section:
    """The memory suite: token counts up to N, at H, V; no limit, because it measures memory."""
    most, width, vocab = shape
    rows: list[Row] = []
    workloads: list[Workload] = []
    for n in memory_workloads.token_counts(most):
        setting.log(f"{n} tokens: inputs and float64 answers")
        problem = linear_problem(n, width, vocab, setting.dtype, setting.device)
        workload = memory_workloads.workload(problem)
        measured = _bench("memory", (n, width, vocab), setting).measure_workload(workload)
        finish(measured, None, EAGER, COMPILED)
        memory_workloads.add_plans(measured, problem)
        rows += measured
        workloads.append(replace(workload, contenders=[]))  # contenders would keep the problem alive
    return _bench("memory", shape, setting).section({}, workloads, rows)


def run_masks(shape: Shape, setting: Setting) -> Section:
    """The masks suite at N, H, V and a mean of K ids per token; no limit, the whole vocabulary is the comparison."""
    setting.log("inputs and float64 answers")
    n, width, vocab, mean = shape
    problem = masks_workloads.masked_problem(n, width, vocab, mean, setting.dtype, setting.device)
    dense = linear_problem(n, width, vocab, setting.dtype, setting.device)
    return _without_limit(_bench("masks", shape, setting), masks_workloads.workloads(problem, dense))


def run_sets(shape: Shape, setting: Setting) -> Section:
    """The sets suite at N, V; no limit: every peer needs a sort."""
    n, vocab = shape
    logits = logits_problem(n, vocab, setting.dtype, setting.device).logits
    return _without_limit(_bench("sets", shape, setting), sets_workloads.workloads(logits))


def _without_limit(bench: Bench, workloads: list[Workload]) -> Section:
    rows: list[Row] = []
    for workload in workloads:
        measured = bench.measure_workload(workload)
        finish(measured, None, EAGER, COMPILED)
        rows += measured
    return bench.section({}, workloads, rows)


def run_step(shape: Shape, setting: Setting) -> Section:
    """The step suite at B, T, L, H, V; its limit is the body's step and the head's bare matrix products."""
    setting.log("model, inputs and float64 answers")
    bench = _bench("step", shape, setting)
    responses, length, layers, width, vocab = shape
    problem = step_problem(responses, length, layers, width, vocab, setting.dtype, setting.device)
    workload = step_workloads.workload(problem)
    body, bare = (
        bench.measure_contender(floor, workload, with_expected=False)
        for floor in (step_workloads.body(problem), step_workloads.head_products(problem))
    )
    rows = bench.measure_workload(workload)
    limit = _limit("the body's step and the head's bare products", body, bare)
    finish([body], None, EAGER, COMPILED)  # not a way to compute the workload: no speed-ups
    finish(rows, limit, EAGER, COMPILED)
    step_workloads.add_shares(rows, body)
    limits: dict[str, float | None] = {
        "milliseconds: the body's step and the head's three matrix products": None
        if limit is None
        else 1e3 * limit.seconds
    }
    return bench.section(limits, [workload], [body, *rows])


SUITES = {
    "logits": Suite(
        "NV",
        {
            "cpu": ((2048, 32768),),
            "cuda": ((8192, 151936), (16384, 131072), (8192, 262144), (32768, 32768), (256, 151936)),
        },
        run_logits,
        "losses and statistics of N rows of V logits",
    ),
    "overhead": Suite(
        "NV",
        {"cpu": ((64, 1024),), "cuda": ((64, 1024),)},
        run_overhead,
        "the host's time to issue a loss of N rows of V logits and its backward",
    ),
    "linear": Suite(
        "NHV",
        {
            "cpu": ((2048, 512, 32768),),
            "cuda": (
                (8192, 4096, 151936),
                (8192, 2048, 151936),
                (4096, 4096, 128256),
                (8192, 4096, 262144),
                (32768, 4096, 151936),  # shows what fits in memory: plain torch holds several float32 logits of 20 GB
            ),
        },
        run_linear,
        "the same from N hidden states of H and a head of V x H, and cross-entropy",
    ),
    "plans": Suite(
        "NHV",
        {"cpu": ((512, 128, 16384),), "cuda": ((8192, 4096, 151936), (8192, 2048, 151936), (131072, 4096, 151936))},
        run_plans,
        "the loss from hidden states by every plan, each beside the bare products that it forms",
    ),
    "memory": Suite(
        "NHV",
        {"cpu": ((2048, 64, 32768),), "cuda": ((32768, 4096, 151936),)},
        run_memory,
        "temporary memory of the loss from hidden states, at N/8 to N tokens and within budgets",
    ),
    "masks": Suite(
        "NHVK",
        {"cpu": ((4096, 512, 151936, 8),), "cuda": ((8192, 4096, 151936, 8),)},
        run_masks,
        "the loss from hidden states over recorded sets of K ids in the mean, beside the whole vocabulary",
    ),
    "sets": Suite(
        "NV",
        {"cpu": ((512, 151936),), "cuda": ((8192, 151936),)},
        run_sets,
        "which entries of N rows of V logits a truncating sampler keeps",
    ),
    "step": Suite(
        "BTLHV",
        {
            "cpu": ((4, 128, 2, 128, 32768),),
            "cuda": (  # the shapes of Qwen3-0.6B and 8B, 8 to 128 thousand tokens
                (4, 2048, 28, 1024, 151936),
                (16, 2048, 28, 1024, 151936),
                (64, 2048, 28, 1024, 151936),
                (4, 2048, 36, 4096, 151936),
                (16, 2048, 36, 4096, 151936),
            ),
        },
        run_step,
        "a training step of a language model: B responses of T tokens, L layers of width H",
        needs=("transformers",),
    ),
}


def _bench(suite: str, shape: Shape, setting: Setting) -> Bench:
    return Bench(suite, dict(zip(SUITES[suite].axes, shape, strict=True)), setting)


def _limit(of: str, *rows: Row) -> Limit | None:
    """The sum of the rows' times as a limit; None if a row has no time."""
    times = [seconds(row) for row in rows]
    measured = [time for time in times if time is not None]
    return Limit(sum(measured), of) if len(measured) == len(times) else None
