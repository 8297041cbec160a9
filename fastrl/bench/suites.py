"""The suites: the shapes they run at, and the limits, measured in the same run, that their works are held against."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from . import linear_work, logits_work, masks_work, memory_work, sets_work, step_work
from .measure import Outcome, Row, Run, Subject, finish, measure
from .problems import linear_problem, logits_problem
from .step_problem import step_problem
from .works import COMPILED, EAGER, Section, Work

Shape = tuple[int, ...]
Log = Callable[[str], None]
#: Bytes of the buffer whose copy tells the memory's speed where a suite has no logits at hand.
_COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class Setting:
    """What all suites of one call share."""

    dtype: torch.dtype
    device: str
    repeats: int
    log: Log
    seconds: float = math.inf  # after which a subject is not repeated again

    @property
    def dtype_name(self) -> str:
        """Without the module: "float32"."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Suite:
    """A group of works that share inputs: the names of a shape's numbers, defaults a device, and what to run."""

    axes: str
    defaults: dict[str, tuple[Shape, ...]]
    run: Callable[[Shape, Setting], Section]
    description: str
    needs: tuple[str, ...] = ()  # packages beyond those of every suite


def run_logits(shape: Shape, setting: Setting) -> Section:
    """The logits suite at N, V; its limit is a copy of the logits."""
    setting.log("inputs and float64 answers")
    n, vocab = shape
    problem = logits_problem(n, vocab, setting.dtype, setting.device)
    bandwidth = _copy_speed(problem.logits, "logits", shape, setting)
    works = logits_work.works(problem)
    rows: list[Row] = []
    for work in works:
        assert work.work_bytes is not None
        found = _measure_work("logits", shape, setting, work)
        finish(found, None if bandwidth is None else work.work_bytes / bandwidth, EAGER, COMPILED)
        rows += found
    return Section("logits", _named("logits", shape), {"copy_bytes_per_second": bandwidth}, _descriptions(works), rows)


def run_linear(shape: Shape, setting: Setting) -> Section:
    """The linear suite at N, H, V; its limit is the matrix products alone, and a copy tells the memory's speed."""
    setting.log("inputs and float64 answers")
    n, width, vocab = shape
    problem = linear_problem(n, width, vocab, setting.dtype, setting.device)
    copied = min(n * vocab, _COPIED_BYTES // setting.dtype.itemsize)
    speed = _copy_speed(torch.rand(copied, dtype=setting.dtype, device=setting.device), "linear", shape, setting)
    limits: dict[str, float | None] = {"copy_bytes_per_second": speed}
    floors: dict[int | None, Row] = {}
    works = linear_work.works(problem)
    rows: list[Row] = []
    for work in works:
        if work.work_flops not in floors:  # works of as many products share their measurement
            backward = work.work_flops != linear_work.product_flops(problem)
            floor = linear_work.products(problem.hidden, problem.weight, backward)
            floors[work.work_flops] = _measure_subject(floor, "linear", shape, setting, work, with_truth=False)
        bare = replace(floors[work.work_flops], work=work.name, is_limit=True)
        found = [bare, *_measure_work("linear", shape, setting, work)]
        finish(found, _seconds(bare), EAGER, COMPILED)
        limits[f"flops_per_second: {bare.subject}"] = bare.flops_per_second
        rows += found
    return Section("linear", _named("linear", shape), limits, _descriptions(works), rows)


def run_memory(shape: Shape, setting: Setting) -> Section:
    """The memory suite: token counts up to N, at H, V; no limit, for what is asked is memory."""
    most, width, vocab = shape
    rows: list[Row] = []
    descriptions = {}
    for n in memory_work.token_counts(most):
        setting.log(f"{n} tokens: inputs and float64 answers")
        problem = linear_problem(n, width, vocab, setting.dtype, setting.device)
        work = memory_work.work(problem)
        found = _measure_work("memory", (n, width, vocab), setting, work)
        finish(found, None, EAGER, COMPILED)
        memory_work.add_plans(found, problem)
        rows += found
        descriptions[work.name] = work.description
    return Section("memory", _named("memory", shape), {}, descriptions, rows)


def run_masks(shape: Shape, setting: Setting) -> Section:
    """The masks suite at N, H, V and K ids a token in the mean; no limit: what is spared is told beside it."""
    setting.log("inputs and float64 answers")
    n, width, vocab, mean = shape
    problem = masks_work.masked_problem(n, width, vocab, mean, setting.dtype, setting.device)
    dense = linear_problem(n, width, vocab, setting.dtype, setting.device)
    return _without_limit("masks", shape, setting, masks_work.works(problem, dense))


def run_sets(shape: Shape, setting: Setting) -> Section:
    """The sets suite at N, V; no limit: nobody else finds them without a sort."""
    n, vocab = shape
    logits = logits_problem(n, vocab, setting.dtype, setting.device).logits
    return _without_limit("sets", shape, setting, sets_work.works(logits))


def _without_limit(suite: str, shape: Shape, setting: Setting, works: list[Work]) -> Section:
    rows: list[Row] = []
    for work in works:
        found = _measure_work(suite, shape, setting, work)
        finish(found, None, EAGER, COMPILED)
        rows += found
    return Section(suite, _named(suite, shape), {}, _descriptions(works), rows)


def run_step(shape: Shape, setting: Setting) -> Section:
    """The step suite at B, T, L, H, V; its limit is the body's step and the head's bare matrix products."""
    setting.log("model, inputs and float64 answers")
    responses, length, layers, width, vocab = shape
    problem = step_problem(responses, length, layers, width, vocab, setting.dtype, setting.device)
    work = step_work.work(problem)
    body, bare = (
        _measure_subject(floor, "step", shape, setting, work, with_truth=False)
        for floor in (step_work.body(problem), step_work.head_products(problem))
    )
    rows = _measure_work("step", shape, setting, work)
    seconds = _seconds(body), _seconds(bare)
    limit = None if None in seconds else sum(s for s in seconds if s is not None)
    finish([body], None, EAGER, COMPILED)  # no way to do the work: it is no faster than any
    finish(rows, limit, EAGER, COMPILED)
    step_work.add_shares(rows, body)
    limits: dict[str, float | None] = {
        "milliseconds: the body's step and the head's three matrix products": None if limit is None else 1e3 * limit
    }
    return Section("step", _named("step", shape), limits, _descriptions([work]), [body, *rows])


SUITES = {
    "logits": Suite(
        "NV",
        {
            "cpu": ((2048, 32768),),
            "cuda": ((8192, 151936), (16384, 131072), (8192, 262144), (32768, 32768)),
        },
        run_logits,
        "losses and statistics of N rows of V logits",
    ),
    "linear": Suite(
        "NHV",
        {
            "cpu": ((2048, 512, 32768),),
            "cuda": (
                (8192, 4096, 151936), (8192, 2048, 151936), (4096, 4096, 128256), (8192, 4096, 262144),
                (32768, 4096, 151936),  # what fits where: the plain way's logits are 20 GB in float32, several times
            ),
        },
        run_linear,
        "the same from N hidden states of H and a head of V x H, and cross-entropy",
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
        # on a GPU the shape of Qwen3-0.6B
        {"cpu": ((4, 128, 2, 128, 32768),), "cuda": ((4, 2048, 28, 1024, 151936),)},
        run_step,
        "a training step of a language model: B responses of T tokens, L layers of width H",
        needs=("transformers",),
    ),
}  # fmt: skip


def _copy_speed(source: torch.Tensor, suite: str, shape: Shape, setting: Setting) -> float | None:
    """Bytes a second, read and written together, of a copy of the tensor."""
    setting.log("copy")
    row = _row(suite, shape, setting, "copy", "copy")
    subject = Subject("copy", lambda: _copy(source), source.numel() * source.element_size())
    measure(subject, row, None, setting.device, setting.repeats, setting.seconds)
    seconds = _seconds(row)
    return None if seconds is None else 2 * source.numel() * source.element_size() / seconds


def _copy(source: torch.Tensor) -> Run:
    target = torch.empty_like(source)

    def call() -> Outcome:
        target.copy_(source)
        return Outcome(None, None, None, {})

    return Run(call)


def _seconds(row: Row) -> float | None:
    return None if row.milliseconds_median is None else row.milliseconds_median / 1e3


def _named(suite: str, shape: Shape) -> dict[str, int]:
    return dict(zip(SUITES[suite].axes, shape, strict=True))


def _descriptions(works: list[Work]) -> dict[str, str]:
    return {work.name: work.description for work in works}


def _row(suite: str, shape: Shape, setting: Setting, work_name: str, subject: str, work: Work | None = None) -> Row:
    return Row(
        suite, _named(suite, shape), setting.dtype_name, work_name, subject,
        work_bytes=None if work is None else work.work_bytes,
        work_flops=None if work is None else work.work_flops,
    )  # fmt: skip


def _measure_work(suite: str, shape: Shape, setting: Setting, work: Work) -> list[Row]:
    return [_measure_subject(subject, suite, shape, setting, work) for subject in work.subjects]


def _measure_subject(
    subject: Subject, suite: str, shape: Shape, setting: Setting, work: Work, with_truth: bool = True
) -> Row:
    """The subject's row. A mistake of ours is told and marks the row; the others are still worth measuring."""
    setting.log(f"{work.name}: {subject.name}")
    row = _row(suite, shape, setting, work.name, subject.name, work)
    try:
        measure(subject, row, work.truth if with_truth else None, setting.device, setting.repeats, setting.seconds)
    except Exception:
        if not row.failed:
            raise
        setting.log(traceback.format_exc())
    return row
