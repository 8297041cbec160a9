"""benchmarks/ledger.py: its numbers are those of a real call, and by it no default exceeds its limit."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import BENCHMARKS, ROOT
from torch import Tensor

import fastrl
from fastrl.base.devices import H100, H200
from fastrl.objectives.presets import any_numbers
from fastrl.planning.plans import use_plan

pytest.importorskip("triton")

sys.path.insert(0, str(BENCHMARKS))

import ledger as calls
import ledger_record as record
import ledger_traffic as traffic
from triton.runtime.jit import KernelInterface

PPO = fastrl.PPO()
TARGET = (8192, 4096, 151936)
#: N, H, V -> the limits of default / floor: with both gradients, and with a frozen head.
SHAPES = {
    TARGET: (1.07, 1.08),
    (8192, 2048, 151936): (1.13, 1.15),
    (4096, 4096, 128256): (1.07, 1.08),
    (8192, 4096, 262144): (1.07, 1.08),
    (32768, 4096, 151936): (1.10, 1.08),
}
MIB = 1 << 20
BOTH, FROZEN = ("hidden", "weight"), ("hidden",)
PAGE = ROOT / "docs" / "performance.md"


def linear(shape: tuple[int, int, int], objective: Any = PPO, **options: Any) -> record.Ledger:
    return calls.linear(*shape, torch.bfloat16, H100, objective=objective, **options)


def chosen(shape: tuple[int, int, int], **options: Any) -> Any:
    return fastrl.plan_memory(*shape, budget="38GiB", device="cuda", objective=PPO, **options).chosen


def chunks(ledger: record.Ledger) -> int:
    return sum(launch.name == "row_forward_gradient_kernel" for launch in ledger.launches)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_defaults_are_near_their_floors(shape: tuple[int, int, int]) -> None:
    for gradients, limit in zip((BOTH, FROZEN), SHAPES[shape], strict=True):
        ledger, plan = linear(shape, gradients=gradients), chosen(shape, gradients=gradients)
        floor = calls.floor(plan, H100, 2)
        assert floor == (1 + len(gradients)) * 2 * shape[0] * shape[1] * shape[2] / H100.flops
        assert floor < ledger.seconds(H100) <= limit * floor, gradients
        assert sum(launch.traffic.flops for launch in ledger.launches) == plan.flops
        assert ledger.count <= 21 + 7 * chunks(ledger) and ledger.syncs == [], gradients


#: A token's gradient needs its whole response: the objective runs in torch.
BY_RESPONSE = ("GSPO", "GSPOToken", "GMPO", "LUSPO", "VESPO", "DeepSeekV32", "TOPR", "FIPO", "ClipCov", "KLCov")


@pytest.mark.parametrize("name", [name for name in fastrl.PRESETS if name not in BY_RESPONSE])
def test_launches_of_row_local_presets(name: str) -> None:
    objective, shape = any_numbers(name), (512, 64, 4096)
    ledger = linear(shape, objective, longest=64)
    assert ledger.count <= 24 + 7 * chunks(ledger) and chunks(ledger) == 1
    from_logits = calls.logits(shape[0], shape[2], torch.bfloat16, H100, objective=objective, longest=64)
    assert from_logits.count <= 22 and from_logits.syncs == []


def test_launches_of_prompts_and_a_correction() -> None:
    """Prompts take a sort and some sums; a correction its weights before any bound, of which the metrics tell."""
    plain, shape = fastrl.GRPO(kl_coef=0), (512, 64, 4096)
    without = linear(shape, plain, longest=64).count
    assert linear(shape, plain.replace(aggregate="prompt-mean"), longest=64).count <= without + 20
    corrected = linear(shape, plain.replace(rollout_correction=fastrl.RolloutCorrection()), longest=64)
    assert corrected.count <= without + 32 and corrected.syncs == linear(shape, plain, longest=64).syncs


#: How a row of docs/performance.md is called -> the gradients, and the options of the call.
ROWS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "default: forward-gradient, 3U": (BOTH, {}),
    "recompute, 4U": (BOTH, {"plan": "recompute"}),
    "recompute in 512 MiB, 4U": (BOTH, {"budget": "512MiB"}),
    "two-pass, 5U": (BOTH, {"plan": "two-pass"}),
    "whole-response (GSPO), 3U": (BOTH, {"objective": fastrl.GSPO(), "longest": 1024}),
    "frozen head, default: forward-gradient, 2U": (FROZEN, {}),
    "frozen head, frozen-head, 2U": (FROZEN, {"plan": "frozen-head"}),
    "forward, 1U": ((), {}),
}


def ends(start: str, floor: float, ledger: record.Ledger) -> bool:
    """Whether the line of docs/performance.md that begins so ends with the numbers of this ledger."""
    (line,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {start} | {floor * 1e3:.2f} |"))
    seconds = ledger.seconds(H100)
    return line.endswith(f"| {seconds * 1e3:.2f} | {seconds / floor:.3f} | {ledger.count} |")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_page_has_the_ledgers(shape: tuple[int, int, int]) -> None:
    n, h, v = shape
    for name, (gradients, options) in ROWS.items():
        if (n, options.get("budget")) != (32768, "512MiB"):  # does not fit
            floor = int(name[-2]) * 2 * n * h * v / H100.flops
            assert ends(f"{n} x {h} x {v} | {name}", floor, linear(shape, gradients=gradients, **options)), name
    if h == 4096:
        for name, sweeps, objective in (("PPO, in place or not", 2, PPO), ("GSPO", 3, fastrl.GSPO())):
            ledger = calls.logits(n, v, torch.bfloat16, H100, objective=objective, longest=1024)
            assert ends(f"{n} x {v} | {name}", H100.seconds(2 * sweeps * n * v), ledger), name
    sets, dense = linear(shape, kept=8 * n), linear(shape).seconds(H100)
    seconds = sets.seconds(H100)
    assert f"| {seconds * 1e3:.2f} | {seconds / dense:.1%} | {sets.count} |\n" in PAGE.read_text()


def test_the_page_has_the_ledgers_of_distillation() -> None:
    teacher = "divergence from a teacher of width 5120 | default: forward-gradient, 3U and the teacher's product"
    for name, flops, options in (
        (teacher, 3 * 4096 + 5120, {"teacher_hidden": 5120}),
        (
            "the same within 512 MiB | recompute, 4U and the teacher's twice",
            4 * 4096 + 2 * 5120,
            {"teacher_hidden": 5120, "budget": "512MiB"},
        ),
        (
            "the same, frozen head | forward-gradient, 2U and the teacher's",
            2 * 4096 + 5120,
            {"teacher_hidden": 5120, "gradients": FROZEN},
        ),
        ("one id | recompute, 4U", 4 * 4096, {"objective": None}),
        ("64 ids | recompute, 4U", 4 * 4096, {"gathered": 524288}),
        ("one id, frozen head | frozen-head, 2U", 2 * 4096, {"objective": None, "gradients": FROZEN}),
        ("64 ids, frozen head | frozen-head, 2U", 2 * 4096, {"gathered": 524288, "gradients": FROZEN}),
    ):
        assert ends(name, 2 * TARGET[0] * TARGET[2] * flops / H100.flops, linear(TARGET, **options)), name


def test_an_entropys_gradient_adds_no_more_launches() -> None:
    objective = fastrl.PPO(entropy_coef=0.1)
    assert linear(TARGET, objective, gradients=FROZEN, plan="frozen-head").count <= 212


@pytest.mark.parametrize("plan", ["forward-gradient", "recompute", "two-pass"])
def test_a_gradient_of_a_bias_is_a_product(plan: str) -> None:
    """torch's reduction over the rows of a tile would hold 140 MB of partial sums on a GPU."""
    ledger = linear((8192, 1024, 32768), gradients=("hidden", "weight", "bias"), budget="256MiB", plan=plan)
    assert not [x for x in ledger.launches if x.name == "sum" and x.traffic.read > MIB]
    assert [x for x in ledger.launches if x.name.startswith("product 1 x ")]


def test_recorded_sets() -> None:
    sets, dense = linear(TARGET, kept=8 * TARGET[0]), linear(TARGET)
    assert sets.seconds(H100) <= SETS[0] * dense.seconds(H100)
    assert sets.count <= SETS[1] and sets.syncs == []


#: The share of the dense time, and launches.
SETS = (0.029, 40)


@pytest.mark.parametrize("gradients", [BOTH, FROZEN, ()], ids=str)
def test_the_planner_has_the_ledgers_prices(gradients: tuple[str, ...]) -> None:
    seconds = fastrl.plan_memory(*TARGET, budget="2GiB", device="cuda", objective=PPO, gradients=gradients).seconds
    assert len(seconds) >= 1
    for plan, cost in seconds.items():
        ledger = linear(TARGET, gradients=gradients, budget="2GiB", plan=plan)
        # The planner leaves out what all plans launch: preparing the batch, the objective in torch, the metrics.
        rest = ledger.seconds(H100) - cost
        assert 0 <= rest <= 150 * H100.launch + 0.01 * cost, (plan, cost, rest)


def test_the_kernels_are_those_of_a_real_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (tokens, width, vocab) = (24, 32, 512)
    launched: list[tuple[str, tuple[int, ...]]] = []
    original = KernelInterface.__getitem__

    def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
        launched.append((kernel.fn.__name__, grid))
        return original(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", launcher)
    hidden = torch.randn(1, tokens, width, device=device, requires_grad=True)
    weight = torch.randn(vocab, width, device=device, requires_grad=True)
    targets = torch.randint(vocab, (1, tokens), device=device)
    rest = {"objective": PPO, "advantages": torch.ones(1, device=device), "old_logprobs": torch.zeros(1, tokens)}
    rest["old_logprobs"] = rest["old_logprobs"].to(device)
    for plan in ("forward-gradient", "recompute"):
        launched.clear()
        with fastrl.use_backend("triton"), use_plan(plan):
            fastrl.linear_policy_loss(hidden, weight, targets, memory_budget="1GiB", **rest).loss.backward()
        real = [name for name, _ in launched]
        ledger = calls.linear(*shape, torch.float32, H100, objective=PPO, plan=plan, budget="1GiB")
        assert [x.name for x in ledger.launches if x.name.endswith("_kernel")] == real, plan


def test_a_divergence_forms_three_products_of_the_student_and_one_of_the_teacher() -> None:
    (n, h, v), width = TARGET, 5120
    ledger = linear(TARGET, teacher_hidden=width)
    plan = fastrl.plan_memory(*TARGET, budget="38GiB", device="cuda", teacher_hidden=width).chosen
    assert plan.name == "forward-gradient" and plan.flops == 2 * n * v * (3 * h + width)
    assert sum(launch.traffic.flops for launch in ledger.launches) == plan.flops
    assert ledger.count <= 18 and ledger.syncs == []
    assert calls.floor(plan, H100, 2) < ledger.seconds(H100) <= 1.08 * calls.floor(plan, H100, 2)
    (visit,) = [x.traffic for x in ledger.launches if x.name == "row_divergence_kernel"]
    # A weight is read and six statistics are written for each row; the second sweep finds the rows in the L2 cache.
    assert (visit.read, visit.written) == (n * (2 * 2 * v + 4), n * (2 * v + 6 * 4))


#: A frozen head's backward gathers a row of the head for each id.
@pytest.mark.parametrize(
    ("gradients", "units", "most", "more"), [(BOTH, 4, 124, 1.02), (FROZEN, 2, 159, 1.08)], ids=str
)
def test_many_gathered_ids_cost_little_beside_one(
    gradients: tuple[str, ...], units: int, most: int, more: float
) -> None:
    n, h, v = TARGET
    ledger = linear(TARGET, None, gradients=gradients, gathered=64 * n)
    assert sum(launch.traffic.flops for launch in ledger.launches) == units * 2 * n * h * v
    assert ledger.count <= most and ledger.syncs == []
    assert ledger.seconds(H100) <= more * linear(TARGET, None, gradients=gradients).seconds(H100)
    uneven = linear(TARGET, None, gradients=gradients, gathered=64 * n + 1)
    assert "gather_entries_kernel" in {x.name for x in uneven.launches}


def test_bytes_and_operations_of_launches() -> None:
    (n, h, v), by_name = TARGET, {}
    for launch in linear(TARGET).launches:
        by_name.setdefault(launch.name, launch.traffic)
    visit = by_name["row_forward_gradient_kernel"]
    per_row = 8 + 3 * 4  # the target; advantage, weight and old log-probability
    assert (visit.read, visit.written) == (n * (2 * v + per_row), n * (2 * v + 40))
    product = by_name[f"product {n} x {h} x {v}, bfloat16"]
    assert (product.read, product.written, product.flops) == (2 * (n + v) * h, 2 * n * v, 2 * n * h * v)
    assert product.beyond == 0
    several = {x.name: x.traffic for x in linear((32768, 4096, 151936)).launches}
    summed = several["product 151936 x 4096 x 4096, bfloat16 -> float32"]  # the last of them
    assert summed.beyond == (4 + 2) * v * h and summed.read == 2 * 4096 * (v + h) + 4 * v * h
    assert several["scale_kernel"].read == 4 * v * h + 4, "one pass casts the sums"


def test_a_faster_device_takes_less_time() -> None:
    ledger = linear((512, 64, 4096))
    assert ledger.seconds(H200) < ledger.seconds(H100)


def test_nothing_pretends_afterwards() -> None:
    meta = torch.empty(3, device="meta")

    def call() -> Any:
        inside = torch.empty(3, device=record.GPU)
        assert inside.is_cuda and inside.device == record.GPU and inside.data_ptr() % 16 == 0
        assert not torch.zeros(3, device="cpu").is_cuda
        return lambda: bool(inside.isnan().any())

    with pytest.raises(NotImplementedError, match="value of a condition"):
        record.record(call, H100, int)
    assert not {"device", "is_cuda", "is_meta", "data_ptr"} & set(vars(Tensor))
    assert meta.is_meta and not meta.is_cuda and meta.device.type == "meta"
    assert torch.zeros(2).sum().item() == 0


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """That of the page, and others."""
    (line,) = re.findall(r"(?m)^python benchmarks/ledger.py (.*?)(?:  #.*)?$", PAGE.read_text())[:1]
    arguments = shlex.split(line)
    calls.main([*arguments, "--device", "h200"])
    table, ledger, waits = capsys.readouterr().out.strip().split("\n\n")[-3:]
    assert table.startswith("budget") and "modelled on an H200: 4.3 TB/s copy, 790 TFLOP/s" in ledger
    assert "row_forward_gradient_kernel" in ledger and "the host waits: none" in waits
    assert " x its floor of 38.7" in waits
    for option, kernel in (
        (("--teacher-hidden", "5120"), "row_divergence_kernel"),
        (("--gathered", "524288", "--gradients", "hidden"), "segment_sums_kernel"),
    ):
        calls.main([*arguments, *option])
        assert kernel in capsys.readouterr().out
    for option, words in ((("--budget", "1MiB"), "too small for 8192 tokens"), (("--device", "cpu"), "invalid choice")):
        with pytest.raises(SystemExit, match="2"):
            calls.main([*arguments, *option])
        assert words in capsys.readouterr().err


def stored(kernel: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """The pointer parameters that a kernel may store to, through its local names and the `out...` of functions."""
    sources: dict[str, set[str]] = {}

    def names(node: ast.AST) -> set[str]:
        return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}

    targets: set[str] = set()
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign):
            for name in names(node.targets[0]):
                sources.setdefault(name, set()).update(names(node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.store":
            targets |= names(node.args[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in functions:
            given = zip(functions[ast.unparse(node.func)].args.args, node.args, strict=False)
            targets |= {name for parameter, x in given if parameter.arg.startswith("out_") for name in names(x)}
    while (more := targets.union(*(sources.get(name, set()) for name in targets))) != targets:
        targets = more
    return {x.arg for x in kernel.args.args if x.arg.endswith("_ptr")} & targets


def test_every_result_of_every_kernel_is_known() -> None:
    paths = Path(fastrl.__file__).parent.glob("kernels/*.py")
    nodes = [node for path in paths for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    functions = {node.name: node for node in nodes}
    kernels = [node for node in nodes if node.name.endswith("_kernel")]
    assert len(kernels) > 10
    for kernel in kernels:
        if kernel.name in ("choose_kernel", "write_kernel", "read_kernel"):
            continue  # they are in no loss
        # These write over an argument if they are given no other, and read what tells them where to write.
        known = {
            "row_forward_gradient_kernel": {"logits_ptr"},
            "scale_kernel": {"tensor_ptr"},
            "support_restrict_kernel": {"logits_ptr", "rows_ptr"},
            "gather_entries_kernel": {"rows_ptr"},
            "scatter_entries_kernel": {"rows_ptr", "token_ids_ptr"},
        }
        places = {"heads_ptr", "ids_ptr", "offsets_ptr"}  # read, to know where to write
        written = {x.arg for x in kernel.args.args if x.arg.startswith("out")} | set(
            traffic.RESULTS.get(kernel.name, ())
        )
        assert stored(kernel, functions) - places <= written | known.get(kernel.name, set()), kernel.name


@pytest.mark.parametrize(
    ("mask", "num_tokens", "waits"), [(False, None, []), (True, 4096, []), (True, None, ["2 numbers"])], ids=str
)
def test_a_mask_whose_tokens_are_not_known_makes_the_host_wait_once(
    mask: bool, num_tokens: int | None, waits: list[str]
) -> None:
    """Before the plan: half of 16,384 rows fit one chunk, whose products need no float32 sums."""

    def call() -> Any:
        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, needs: bool = False) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=record.GPU, requires_grad=needs)

        hidden, weight = empty(16, 1024, 1024, needs=True), empty(151936, 1024, needs=True)
        old, tokens = empty(16, 1024, dtype=torch.float32), empty(16, 1024, dtype=torch.int64)
        given: dict[str, Any] = {"old_logprobs": old, "advantages": empty(16, dtype=torch.float32)}
        given |= {"mask": empty(16, 1024, dtype=torch.bool)} if mask else {}

        def run() -> Any:
            loss = fastrl.linear_policy_loss(hidden, weight, tokens, objective=PPO, num_tokens=num_tokens, **given).loss
            return torch.autograd.grad(loss, (hidden, weight))

        return run

    ledger = record.record(call, H100, lambda numbers: 4096)
    assert ledger.syncs == waits
    assert chunks(ledger) == (1 if mask else 4)


def test_a_backward_that_computes_the_logits_again_waits_only_beside_a_mask() -> None:
    def call() -> Any:
        hidden = torch.empty(64, 32, device=record.GPU, requires_grad=True)
        weight = torch.empty(256, 32, device=record.GPU, requires_grad=True)
        mask = torch.empty(64, device=record.GPU, dtype=torch.bool)
        tokens = torch.empty(64, device=record.GPU, dtype=torch.int64)

        def run() -> Any:
            logp = fastrl.linear_token_logprobs(hidden, weight, tokens, mask=mask).logprobs
            return torch.autograd.grad(logp.sum(), (hidden, weight))

        return run

    assert record.record(call, H100, lambda numbers: 64).syncs == ["1 number", "nonzero"]
    assert linear((64, 32, 256), None).syncs == []
