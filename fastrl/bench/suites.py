"""The suites: their shapes, and the limits, measured in the same run, that their workloads are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fastrl.bench import ceilings, divergence, preference, step, workloads
from fastrl.bench.candidates import BOTH
from fastrl.bench.clock import time_issue
from fastrl.bench.contenders import Contender, Workload
from fastrl.bench.measure import Bench
from fastrl.bench.problems import Problem, linear_problem, logits_problem
from fastrl.bench.results import Limit, Row, Section

Shape = tuple[int, ...]
_COPY, _READ = "a copy of as many bytes", "a read of as many bytes"
_PRODUCTS = "the bare matrix products"
#: The number of times that a plan computes the logits, if more than once.
_FORWARDS = {"recompute": 2, "two-pass": 3}
#: The products of 2U to 5U, by their places in `ceilings.PRODUCTS`.
_IN_A_ROW = ((0, 1), (0, 1, 2), (0, 0, 1, 2), (0, 0, 0, 1, 2))
#: With fewer tokens, fixed costs hide what grows with the number of tokens.
_FEWEST_TOKENS = 256


@dataclass(frozen=True)
class Suite:
    """A group of workloads that share inputs: the names of the shape's axes, defaults per device, and how to run it."""

    axes: str
    defaults: dict[str, tuple[Shape, ...]]
    run: Callable[[Bench], Section]
    description: str
    needs: tuple[str, ...] = ()  # packages that only this suite needs


def run_logits(bench: Bench) -> Section:
    """The logits suite at N, V; its limit is the memory's speed: a copy, and on a GPU also a read."""
    problem = bench.problem(logits_problem)
    on_gpu = bench.device == "cuda"
    source = ceilings.stream(problem.inputs["logits"])
    speeds = {"copy_bytes_per_second": ceilings.copy_speed(bench, source)}
    if on_gpu:
        speeds["read_bytes_per_second"] = ceilings.read_speed(bench, source)
    del source

    def limit(workload: Workload) -> Limit | None:
        reads = on_gpu and not workload.gradients  # it writes no output of the logits' size
        speed = speeds["read_bytes_per_second" if reads else "copy_bytes_per_second"]
        assert workload.workload_bytes is not None
        return None if speed is None else Limit(workload.workload_bytes / speed, _READ if reads else _COPY)

    return replace(bench, hot=on_gpu).run([definition.on(problem) for definition in workloads.LOGITS], limit, speeds)


def run_overhead(bench: Bench) -> Section:
    """The overhead suite at N, H, V: the host's time for a loss and its backward; no limit."""
    from_logits = bench.problem(lambda n, _, vocab, *rest: logits_problem(n, vocab, *rest))
    from_head = bench.problem(linear_problem)
    works = [workloads.OVERHEAD.on(from_logits), *(x.on(from_head) for x in workloads.OVERHEAD_OF_HEAD)]
    return replace(bench, clock=time_issue).run(works)


def run_linear(bench: Bench) -> Section:
    """The linear suite at N, H, V; its limit is the matrix products alone; a copy measures the memory's speed."""
    problem, dtype = bench.problem(linear_problem), bench.dtype
    copied = min(problem.size.once, ceilings.STREAM_BYTES) // dtype.itemsize
    speed = ceilings.copy_speed(bench, torch.rand(copied, dtype=dtype, device=bench.device))
    section = bench.section({"copy_bytes_per_second": speed})
    bare_rows: dict[int, Row] = {}
    for definition in workloads.LINEAR:
        workload = definition.on(problem)
        count = 1 + len(workload.gradients)
        if count not in bare_rows:  # workloads with the same number of products share a measurement
            name = "the matrix product alone" if count == 1 else "the three matrix products alone"
            bare_rows[count] = bench.measure_contender(_products(problem, name, range(count)), workload, False)
        bare = replace(bare_rows[count], workload=workload.name, is_limit=True)
        bench.add(section, workload, [bare, *bench.measure_workload(workload)], _limit(_PRODUCTS, bare))
        section.limits[f"flops_per_second: {bare.contender}"] = bare.flops_per_second
    return section


def run_plans(bench: Bench) -> Section:
    """The plans suite at N, H, V; each row's limit is the bare products of the plan that it should take.

    That is the cheapest plan at the shape, within the contender's budget if it has one: a dearer plan taken for want
    of memory is held against the same limit.

    U is one product of N x V x H: the logits (once; twice in recompute, three times in two-pass), and the gradients
    that are needed. Each is measured alone in the same run; and, where that takes little time, those of each floor in a
    row, during which a GPU may have to lower its clock.
    """
    problem = bench.problem(linear_problem, clipped=0.0)
    bare = Workload(
        "bare products",
        "each matrix product alone, into a buffer that is there already: what the floors are put together of",
        [_products(problem, name, [place]) for place, name in enumerate(ceilings.PRODUCTS)],
        None,
        workload_flops=problem.size.product_flops,
    )
    rows = [replace(row, is_limit=True) for row in bench.measure_workload(bare)]
    times = [row.seconds for row in rows]
    in_a_row = Workload(
        "bare products in a row",
        "those of each floor one after the other, as a call computes them",
        [_products(problem, f"{len(chosen)}U", chosen) for chosen in _IN_A_ROW],
        None,
    )
    section = bench.section(floors(times))
    bench.add(section, bare, rows)
    if bench.shape["N"] < workloads.MANY_TOKENS:
        bench.add(section, in_a_row, [replace(row, is_limit=True) for row in bench.measure_workload(in_a_row)])
    for definition in workloads.plans(bench.shape["N"]):
        workload = definition.on(problem)
        for contender in workload.contenders:
            row = bench.measure_contender(contender, workload)
            limit = None if row.cheapest_plan is None else floor(row.cheapest_plan, workload.gradients, times)
            bench.add(section, workload, [row], limit)
    return section


def floor(plan: str, gradients: Sequence[str], times: Sequence[float | None]) -> Limit | None:
    """The seconds of the products that a call with the plan computes, given each one's; None if one is missing."""
    counts = (_FORWARDS.get(plan, 1), "hidden" in gradients, "weight" in gradients)
    total = 0.0
    for count, seconds in zip(counts, times, strict=True):
        if count and seconds is None:
            return None
        total += count * (seconds or 0.0)
    return Limit(total, f"{sum(counts)}U")


def floors(times: Sequence[float | None]) -> dict[str, float | None]:
    """The floors in milliseconds, 1U to 5U, by the plans that compute as many products."""
    named = {
        "1U, forward": ("forward", ()),
        "2U, frozen head": ("frozen-head", ("hidden",)),
        "3U, forward-gradient and whole-response": ("whole-response", BOTH),
        "4U, recompute": ("recompute", BOTH),
        "5U, two-pass": ("two-pass", BOTH),
    }
    limits = {name: floor(plan, gradients, times) for name, (plan, gradients) in named.items()}
    return {f"milliseconds: {name}": limit and 1e3 * limit.seconds for name, limit in limits.items()}


def run_memory(bench: Bench) -> Section:
    """The memory suite: token counts up to N, at H, V; no limit, because it measures memory."""
    whole = bench.section({})
    for n in token_counts(bench.shape["N"]):
        part = replace(bench, shape={**bench.shape, "N": n})
        problem = part.problem(linear_problem, f"{n} tokens: inputs and float64 answers")
        section = part.run([replace(workloads.MEMORY, name=f"{n} tokens").on(problem)])
        del problem  # before the next one is made
        whole.workloads.update(section.workloads)
        whole.rows.extend(section.rows)
    return whole


def token_counts(most: int) -> list[int]:
    """An eighth, a quarter, a half and all of `most` tokens, ascending; none below 256 except `most` itself."""
    fewest = min(most, _FEWEST_TOKENS)
    return sorted({max(most // part, fewest) for part in (8, 4, 2, 1)})


def run_masks(bench: Bench) -> Section:
    """The masks suite at N, H, V and a mean of K ids per token; no limit, the whole vocabulary is the comparison."""
    n, width, vocab, mean = bench.shape.values()
    make = partial(linear_problem, n, width, vocab, bench.dtype, bench.device)
    bench.log("inputs and float64 answers")
    return bench.run([workloads.OVER_SETS.on(make(mean_set=mean)), workloads.WITHOUT_SETS.on(make())])


def run_sets(bench: Bench) -> Section:
    """The sets suite at N, V; no limit: every peer needs a sort."""
    return bench.run(workloads.sampler_sets(bench.problem(logits_problem).inputs["logits"]))


def run_divergence(bench: Bench) -> Section:
    """The divergence suite at N, H, V and a teacher of width W; its limit is the four matrix products alone."""
    problem = bench.problem(divergence.divergence_problem, "inputs")
    section = bench.section({})
    bench.log("float64 answers")
    for workload in divergence.workloads(problem):
        bare = replace(bench.measure_contender(divergence.head_products(problem), workload, False), is_limit=True)
        bench.add(section, workload, [bare, *bench.measure_workload(workload)], _limit(_PRODUCTS, bare))
    return section


def run_preference(bench: Bench) -> Section:
    """The preference suite at N, H, V and responses of T tokens; its limit is the bare matrix products."""
    problem = bench.problem(preference.preference_problem)
    section = bench.section({})

    def bare(workload: Workload, reference: bool) -> Row:
        products = preference.head_products(problem, reference)
        return replace(bench.measure_contender(products, workload, False), is_limit=True)

    for loss in preference.LOSSES:
        workload = preference.workload(problem, loss)
        limit = bare(workload, loss.reference)
        bench.add(section, workload, [limit, *bench.measure_workload(workload)], _limit(_PRODUCTS, limit))
    variants = preference.variants(problem)
    rows = [bare(variants[0], True)]
    for workload in variants:
        rows += bench.measure_workload(workload)
    bench.add(section, variants[0], rows, _limit(_PRODUCTS, rows[0]))
    return section


def run_step(bench: Bench) -> Section:
    """The step suite at B, T, L, H, V; its limit is the body's step and the head's bare matrix products."""
    problem = bench.problem(step.step_problem, "model, inputs and float64 answers")
    workload = step.workload(problem)
    body, bare = (
        bench.measure_contender(part, workload, with_expected=False)
        for part in (step.body(problem), step.head_products(problem))
    )
    rows = bench.measure_workload(workload)
    limit = _limit("the body's step and the head's bare products", body, bare)
    milliseconds = None if limit is None else 1e3 * limit.seconds
    section = bench.section({"milliseconds: the body's step and the head's three matrix products": milliseconds})
    bench.add(section, workload, [body])  # not a way to compute the workload: no speed-ups
    bench.add(section, workload, rows, limit)
    step.add_shares(rows, body)
    return section


def _products(problem: Problem, name: str, chosen: Sequence[int]) -> Contender:
    size, inputs = problem.size, problem.inputs
    make = partial(ceilings.products, inputs["hidden"], inputs["weight"], chosen)
    return Contender(name, make, size.once + size.gradients)


def _limit(of: str, *rows: Row) -> Limit | None:
    """The sum of the rows' times as a limit; None if a row has no time."""
    times = [time for row in rows if (time := row.seconds) is not None]
    return Limit(sum(times), of) if len(times) == len(rows) else None


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
        "NHV",
        {"cpu": ((64, 64, 1024),), "cuda": ((64, 64, 1024),)},
        run_overhead,
        "the host's time to issue losses of N rows of V logits, and of H hidden states, with their backward",
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
    "divergence": Suite(
        "NHVW",
        {"cpu": ((1024, 256, 32768, 384),), "cuda": ((8192, 2048, 151936, 4096),)},
        run_divergence,
        "the divergence of N tokens' distributions from a teacher's, whose hidden states are W wide",
    ),
    "preference": Suite(
        "NHVT",
        {"cpu": ((2048, 512, 32768, 128),), "cuda": ((8192, 2048, 151936, 512),)},
        run_preference,
        "preference losses of N tokens in pairs of responses of T tokens",
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


def bench(suite: str, shape: Shape, *given: Any, **more: Any) -> Bench:
    """The named suite at a shape, with further fields of a `Bench`."""
    return Bench(suite, dict(zip(SUITES[suite].axes, shape, strict=True)), *given, **more)
