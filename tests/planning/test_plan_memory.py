"""The planner: plans within their bytes, which of them is chosen, and what it says."""

from __future__ import annotations

import re
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated import allocations
from hypothesis import example, given
from hypothesis import strategies as st
from refused import refused
from smallest_budget import smallest_budget

import fastrl
from fastrl.cli import main
from fastrl.objectives.row_local import ANY, BATCH, RESPONSE, TOKEN
from fastrl.planning import memory as plan_tables
from fastrl.planning import plans as memory
from fastrl.planning.budget import default_budget, parse_budget
from fastrl.planning.plans import use_plan
from fastrl.planning.tiling import PIECE_BYTES, Call, Needs, Pass, Teacher, Tile

MIB = 2**20
PLANS = Path(__file__).resolve().parents[2] / "docs" / "functions" / "plans.md"
calls = st.builds(
    lambda **given: Call(**given),  # whose other fields keep their defaults
    rows=st.integers(0, 200_000),
    hidden=st.integers(1, 8192),
    vocab=st.integers(1, 300_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    device=st.sampled_from(["cpu", "cuda"]),
    needs=st.builds(Needs, st.booleans(), st.booleans(), st.booleans()),
    scope=st.sampled_from([TOKEN, RESPONSE, BATCH, ANY]),
    longest=st.integers(0, 40_000),
    slopes=st.sampled_from([1, 2]),
    support_entries=st.sampled_from([0, 0, 1, 100_000]),
)


@example(Call(126, 62, 8720, torch.bfloat16, "cpu", Needs(False, False, True)), 4772880)  # by the needed products
@given(call=calls, budget=st.integers(2**20, 2**40))
def test_the_first_plan_with_useful_tiles_is_chosen_else_the_last_that_fits(call: Call, budget: int) -> None:
    """Any plan's bytes are within the budget, its tiles within the problem; those with fewer products come first."""
    least = {name: memory.least_budget(call, name) for name in memory.applicable(call)}
    if budget < min(least.values()):
        with pytest.raises(ValueError, match=f"the smallest possible is {min(least.values())} "):
            memory.choose(call, budget)
        return
    plans = [plan for name in least if (plan := memory.within(call, name, budget)[0]) is not None]
    assert [plan.name for plan in plans] == [name for name, size in least.items() if size <= budget]
    assert [plan.units for plan in plans] == sorted(plan.units for plan in plans)
    useful = []
    for plan in plans:
        assert plan.temporary_bytes <= budget
        for tile in plan.tiles.values():
            assert 1 <= tile.rows <= max(call.rows, 1) and 1 <= tile.columns <= call.vocab
        if all(one.useful(plan.tiles[one.kind]) for one in memory.passes(call, plan.name)):
            useful.append(plan)
    assert memory.choose(call, budget) == [*useful, plans[-1]][0]


@given(call=calls, fewer=st.integers(0, 200_000))
def test_fewer_rows_fit_where_more_did(call: Call, fewer: int) -> None:
    """A plan is chosen for a bound; the passes are cut when the number of rows is known."""
    size = 2 * max(memory.least_budget(call, name) for name in memory.applicable(call))
    for name in memory.applicable(call):
        plan, _ = memory.within(call, name, size)
        assert plan is not None
        rows = min(fewer, call.rows)
        for kind in plan.tiles:
            tile = Tile(max(rows, 1), call.vocab) if plan.one_chunk else plan.tile(kind, rows)
            summed = kind == "forward-gradient" and not plan.one_chunk
            assert Pass(kind, call._replace(rows=rows), summed=summed).bytes(tile) <= plan.total


def test_budgets_are_parsed() -> None:
    sizes = {1: 1, 268435456: 256 * MIB, "256MiB": 256 * MIB, "256 mib": 256 * MIB, "0.5GiB": 512 * MIB}
    sizes |= {"1.5GB": 1_500_000_000, "16M": 16_000_000, "1Ti": 2**40, "4096": 4096, "10 B": 10, None: None}
    assert {text: parse_budget(text) for text in sizes} == sizes


def test_the_smallest_possible_budget_works() -> None:
    hidden, weight = torch.randn(300, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    targets = torch.zeros(300, dtype=torch.int64)
    given = {"objective": fastrl.DAPO(), "advantages": torch.ones(1)}
    call = partial(fastrl.linear_policy_loss, hidden, weight, targets, **given)
    least, _ = smallest_budget(call, memory_budget=4096)
    torch.testing.assert_close(call(memory_budget=least).loss, call().loss)
    assert smallest_budget(call, memory_budget=least - 1)[0] == least


def test_the_published_example() -> None:
    """bfloat16, H = 4096, V = 151,936: the float32 sums of dL/dweight alone are 2.3 GiB."""

    def chosen(budget: str, **more: Any) -> str:
        plans = fastrl.plan_memory(8192, 4096, 151936, torch.bfloat16, budget, device="cuda", **more)
        assert plans.chosen.temporary_bytes <= (parse_budget(budget) or 0)
        return f"{plans.chosen.name} {plans.chosen.units}U"

    table = fastrl.plan_memory(8192, 4096, 151936, budget="512MiB", device="cuda")
    assert f"```text\n{table}\n```" in PLANS.read_text()
    assert chosen("8GiB") == "forward-gradient 3U"
    assert chosen("512MiB") == "recompute 4U"
    assert chosen("64MiB") == "two-pass 5U"
    assert chosen("8GiB", objective=fastrl.GSPO(), longest=2048) == "whole-response 3U"
    assert chosen("512MiB", objective=fastrl.GSPO(), longest=2048) == "recompute 4U"
    assert chosen("512MiB", objective=fastrl.GSPO(), gradients=("hidden",)) == "frozen-head 2U"
    assert chosen("512MiB", objective=fastrl.GSPO(), on_policy=True, gradients=("hidden",)) == "forward-gradient 2U"
    assert chosen("512MiB", objective=None, gradients=()) == "forward 1U"


def test_rows_of_a_chunk_are_whole_blocks() -> None:
    plan = fastrl.plan_memory(131072, 4096, 151936, budget="8GiB", device="cuda").chosen
    assert plan.name == "forward-gradient" and plan.tiles["forward-gradient"] == (4352, 151936) and not plan.one_chunk


def test_on_a_cpu_what_may_be_cut_has_tiles_of_all_rows_in_its_cache() -> None:
    call = Call(2048, 512, 32768, torch.float32, "cpu", Needs(True, True, False), ANY)
    plan = memory.choose(call, 1 << 30)
    assert plan.name == "recompute" and plan.tiles == {"statistics": (2048, 2048), "both": (2048, 2048)}


def test_one_chunk_needs_no_float32_sums_of_the_weights_gradient() -> None:
    sizes = (4096, 151936)
    one = fastrl.plan_memory(8192, *sizes, budget="4GiB", device="cuda").chosen
    assert one.one_chunk and one.tiles["forward-gradient"] == (8192, 151936)
    assert one.temporary_bytes < 8192 * 151936 * 2 + 8192 * 4096 * 2 * 2 + (8 << 20)
    # At half the width the tile is larger than the sums, but not than the sums and a tile of half the rows.
    assert fastrl.plan_memory(8192, 2048, 151936, budget="4GiB", device="cuda").chosen.one_chunk
    several = fastrl.plan_memory(16384, *sizes, budget="8GiB", device="cuda").chosen
    assert not several.one_chunk and several.temporary_bytes > 4 * 4096 * 151936


@pytest.mark.parametrize("plan", ["recompute", "two-pass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_pass_over_one_chunk_holds_no_more_than_was_planned(dtype: torch.dtype, plan: str) -> None:
    """In float16, whose scale is undone, dL/dweight is a float32 sum first: 16 MiB here."""
    hidden, weight = (torch.randn(n, 512).to(dtype).requires_grad_() for n in (8, 8192))
    targets = torch.zeros(8, dtype=torch.int64)

    def call() -> None:
        logprobs = fastrl.linear_token_logprobs(hidden, weight, targets, memory_budget="1GiB").logprobs
        logprobs.sum().backward()

    with fastrl.use_backend("torch"), use_plan(plan):
        held = max(accumulate(allocations(call)))
    gradients = hidden.nbytes + weight.nbytes
    known = Call(8, 512, 8192, dtype, "cpu", Needs(True, True, False), backend="torch")
    planned, _ = memory.within(known, plan, 1 << 30)
    assert planned is not None and planned.tiles["statistics"] == (8, 8192)
    # Planned for the worst: what is held beside the passes, and the pieces of sums that one chunk does not form.
    unused = memory.fixed_bytes(known, plan) + 2 * PIECE_BYTES
    assert held - gradients <= planned.temporary_bytes <= held - gradients + unused


def with_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(memory, "default_budget", lambda device, index=None: size // 16)
    monkeypatch.setattr(plan_tables, "default_budget", lambda device, index=None: size // 16)


def test_without_a_budget_a_call_takes_a_sixteenth_of_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(8192, 4096, 151936, torch.bfloat16, "cuda", Needs(True, True, False))
    with_memory(monkeypatch, 80 << 30)
    best = memory.choose(call, None)
    assert best.name == "forward-gradient" and best.one_chunk and best.temporary_bytes <= 5 << 30
    with_memory(monkeypatch, 16 * best.temporary_bytes)
    assert memory.choose(call, None).tiles == best.tiles
    with_memory(monkeypatch, 16 * best.temporary_bytes - 16)
    assert memory.choose(call, None).name == "recompute"
    assert memory.choose(call, None, best.temporary_bytes).name == "forward-gradient"  # a share of a group's ranks


def test_without_a_budget_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no plan fits, the one that needs least is taken."""
    with_memory(monkeypatch, 1 << 20)
    call = Call(8192, 4096, 151936, torch.bfloat16, "cuda", Needs(True, True, False))
    plan = memory.choose(call, None)
    assert (plan.name, plan.temporary_bytes) == ("two-pass", memory.least_budget(call, "two-pass"))
    table = fastrl.plan_memory(8192, 4096, 151936, device="cuda")
    assert table.chosen.name == "two-pass" and table.budget == table.chosen.temporary_bytes and "->  two" in str(table)


def test_a_gpu_that_is_not_here_is_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(plan_tables, "default_budget", default_budget.__wrapped__)  # which remembers no GPU
    assert fastrl.plan_memory(8192, 4096, 151936, device="cuda").budget == 5 << 30


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_names_plan_bytes_and_budget(kind: type[RuntimeError]) -> None:
    call = Call(8192, 4096, 151936, torch.bfloat16, "cuda", Needs(True, True, False))
    words = "CUDA out of memory." if kind is torch.OutOfMemoryError else "DefaultCPUAllocator: can't allocate memory"
    plan = memory.choose(call, 5 << 30)
    half = plan.temporary_bytes // 2
    told = rf"(?s){words}.*forward-gradient, which takes {plan.temporary_bytes} bytes.*memory_budget={half} .*recompute"
    with pytest.raises(kind, match=told) as caught, memory.run(plan):
        raise kind(words)
    assert type(caught.value) is kind and str(caught.value.__cause__) == words
    least = memory.least_budget(call, "two-pass")
    smallest = memory.choose(call, least)
    with pytest.raises(kind, match="the least that so many tokens can take"), memory.run(smallest):
        raise kind(words)
    other = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as caught, memory.run(plan):
        raise other
    assert caught.value is other


def test_rows_of_a_tile_begin_on_a_cache_line() -> None:
    """An odd vocabulary has tiles of the next multiple of 64 entries; kernels for pairs take contiguous ones."""
    sizes = Call(8192, 4096, 151669, torch.bfloat16, "cuda", Needs(True, True, False))
    even = sizes._replace(vocab=151680)
    tile, wide = Tile(1024, 151669), Tile(1024, 151680)
    frozen, padded = Pass("frozen", sizes), Pass("frozen", even)
    assert frozen.bytes(tile) == padded.bytes(wide)
    pair = Pass("frozen", sizes._replace(teacher=Teacher(8, 2)))
    assert pair.bytes(tile) == frozen.bytes(tile) - 1024 * 11 * 2 + 1024 * (151669 + 8) * 2


def test_fewer_rows_than_planned_keep_the_sums_and_the_budget() -> None:
    """The host may know only a bound on the rows. Then dL/dweight is float32, also where one tile holds all rows."""
    planned = Call(32768, 4096, 151936, torch.bfloat16, "cuda", Needs(True, True, False))
    plan = memory.choose(planned, 4 << 30)
    assert not plan.one_chunk
    for rows in (32768, 12514, 8192, 4096, 100):
        one = Pass("forward-gradient", planned._replace(rows=rows), summed=True)
        tile = plan.tile("forward-gradient", rows)
        assert tile.rows * tile.columns * 2 <= plan.cap
        assert 4 * 4096 * 151936 <= one.bytes(tile) <= plan.total


def test_without_a_budget_no_whole_logits_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 40 << 30)
    call = Call(4096, 512, 32768, torch.float32, "cpu", Needs(True, True, False), RESPONSE, longest=4096)
    # "whole-response" would hold 512 MiB of logits, which nobody asked for.
    assert memory.choose(call, None).name == "recompute"
    assert memory.choose(call, 1 << 30).name == "whole-response"


def test_a_forced_plan_must_apply() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    targets = torch.zeros(4, dtype=torch.int64)
    words = "'whole-response' cannot be followed here, only forward-gradient"
    with use_plan("whole-response"), pytest.raises(ValueError, match=words):
        fastrl.linear_policy_loss(hidden, weight, targets, objective=fastrl.DAPO(), advantages=torch.ones(1))
    with pytest.raises(ValueError, match=r"plan must be one of forward, .* got 'fastest'"), use_plan("fastest"):
        pass


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--tokens", "8192", "--hidden", "4096", "--vocab", "151936", "--device", "cuda"]
    assert main([*arguments, "--budget", "512MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["forward-gradient", "->", "two-pass"]
    assert lines[2].split()[1:3] == ["recompute", "4U"]
    assert re.fullmatch(r"budget 512 MiB of temporary memory; the smallest possible is .*\(two-pass\)", lines[-1])
    assert main([*arguments[:-1], "h200"]) == 0  # which need not be here
    assert "budget 8.813 GiB" in capsys.readouterr().out  # a sixteenth of 141 GiB
    told = {"1MiB": "too small for 8192 tokens x 4096 x 151936 in bfloat16", "lots": "such as '256MiB'"}
    for budget, words in told.items():
        assert main([*arguments, "--budget", budget]) == 2
        assert words in capsys.readouterr().err
    for name in fastrl.PRESETS:
        assert main([*arguments, "--objective", name, "--budget", "8GiB"]) == 0


@refused(
    ({"tokens": 0}, ValueError, "tokens must be at least 1, got 0"),
    ({"longest": 0}, ValueError, "longest must be at least 1, got 0"),
    ({"vocab": 1.0}, TypeError, "vocab must be an int, got float"),
    ({"dtype": torch.float64}, TypeError, "dtype must be one of .* got torch.float64"),
    ({"gradients": ("head",)}, ValueError, "gradients must be some of hidden, weight, bias, got"),
    ({"gradients": "hidden"}, ValueError, "gradients must be some of hidden, weight, bias, got 'hidden'"),
    ({"objective": "GRPO"}, TypeError, "objective must be an Objective, a callable or None, got str"),
    ({"budget": "x"}, ValueError, "budget must be a number of bytes"),
    ({"kept": 1, "unrecorded": 9}, ValueError, "unrecorded must be at most tokens, 8, and 0 without kept ids, got 9"),
    ({"kept": -1}, ValueError, "kept must be at least 0, got -1"),
)
def test_bad_input(changes: dict[str, Any]) -> None:
    fastrl.plan_memory(**({"tokens": 8, "hidden": 8, "vocab": 8} | changes))


def test_recorded_sets(capsys: pytest.CaptureFixture[str]) -> None:
    """Their plan where every token has one; recomputed logits for the others, whose products alone are counted."""
    plan = partial(fastrl.plan_memory, 8192, 4096, 151936, budget="1GiB", kept=65536, device="cuda")
    found = plan()
    assert found.chosen.name == "sparse" and list(found.least) == ["sparse"]
    assert found.chosen.flops == 3 * 2 * 65536 * 4096 and found.chosen.temporary_bytes < 16 * MIB
    mixed = plan(unrecorded=100)
    assert mixed.chosen.name == "recompute" and mixed.chosen.flops == 2 * 4096 * (4 * 100 * 151936 + 3 * 65536)
    assert set(mixed.least) == {"recompute", "two-pass"}
    frozen = plan(gradients=["hidden"])
    assert frozen.chosen.flops == 2 * 2 * 65536 * 4096
    assert main(["plan", "--tokens", "8192", "--hidden", "4096", "--vocab", "151936", "--kept", "65536"]) == 0
    assert "->  sparse" in capsys.readouterr().out


def facts(plan: memory.Plan) -> Any:
    """A plan without its call, of which a loss may know more than the plan depends on."""
    return plan._replace(call=None), plan.tiles, plan.temporary_bytes, plan.flops


def test_a_divergence_takes_the_plan_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, made = (300, 16, 999), []
    choose = memory.choose
    monkeypatch.setattr(memory, "choose", lambda *given: made.append(choose(*given)) or made[-1])
    hidden, weight = torch.randn(300, 16, requires_grad=True), torch.randn(999, 16, requires_grad=True)
    teacher = torch.randn(300, 40), torch.randn(999, 40)
    for budget in ("64MiB", "1.5MiB"):
        fastrl.linear_divergence(hidden, weight, *teacher, memory_budget=budget).loss.backward()
        named = fastrl.plan_memory(*sizes, torch.float32, budget, teacher_hidden=40, device="cpu")
        assert facts(named.chosen) == facts(made[-1])
    flops = {plan.name: plan.flops // (2 * 300 * 999) for plan in named.fitting}
    assert flops == {"forward-gradient": 3 * 16 + 40, "recompute": 4 * 16 + 2 * 40, "two-pass": 5 * 16 + 3 * 40}
    with pytest.raises(ValueError, match="teacher_hidden is of a divergence, which takes no kept"):
        fastrl.plan_memory(*sizes, teacher_hidden=40, kept=3)
    with pytest.raises(ValueError, match="teacher_hidden must be at least 1, got 0"):
        fastrl.plan_memory(*sizes, teacher_hidden=0)


def test_gathered_ids_take_the_plan_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, made = (300, 16, 999), []
    choose = memory.choose
    monkeypatch.setattr(memory, "choose", lambda *given: made.append(choose(*given)) or made[-1])
    hidden, weight = torch.randn(300, 16, requires_grad=True), torch.randn(999, 16, requires_grad=True)
    ids = torch.randint(999, (300, 40))
    for budget in ("64MiB", "4MiB"):
        fastrl.linear_gathered_logprobs(hidden, weight, ids, memory_budget=budget).sum().backward()
        named = fastrl.plan_memory(*sizes, torch.float32, budget, gathered=ids.numel(), device="cpu")
        assert facts(named.chosen) == facts(made[-1])
    alone = fastrl.plan_memory(*sizes, torch.float32, objective=None, device="cpu")
    assert named.smallest_budget > alone.smallest_budget and set(named.least) == set(alone.least)
    with pytest.raises(ValueError, match="gathered is of linear_gathered_logprobs, which takes no on_policy"):
        fastrl.plan_memory(*sizes, teacher_hidden=40, gathered=3)
    with pytest.raises(ValueError, match="gathered must be at least 0, got -1"):
        fastrl.plan_memory(*sizes, gathered=-1)


@pytest.mark.parametrize("plan", ["forward-gradient", "recompute"])
def test_out_of_memory_inside_a_call_and_inside_its_backward(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)

    def loss() -> torch.Tensor:
        with memory.use_plan(plan):
            return fastrl.linear_cross_entropy(hidden, weight, torch.arange(6))

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    later = loss()
    monkeypatch.setattr(torch, "mm", refused)
    told = rf"can't allocate memory.*\n.*the plan {plan}, which takes \d+ bytes"
    with pytest.raises(RuntimeError, match=told):
        loss()
    if plan == "recompute":
        with pytest.raises(RuntimeError, match=told) as caught:
            later.backward()
        assert str(caught.value).count("out of memory in the plan") == 1
    assert memory.running.get() is None
