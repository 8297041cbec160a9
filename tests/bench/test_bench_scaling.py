"""benchmarks/scaling.py: its formulas at points computed by hand, its page, and its command."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from places import BENCHMARKS, ROOT
from refused import refused

from fastrl.backend.contract import Statistics
from fastrl.backend.torch.rows import row_terms
from fastrl.base.devices import H100, H200
from fastrl.distributed import sums
from fastrl.objectives.batch import SpreadResponses
from fastrl.objectives.row_local import ANY, RESPONSE, SPREAD
from fastrl.objectives.rows import Numbers, RowInputs, RowObjective
from fastrl.passes.combined import Combined
from fastrl.planning.budget import BudgetTooSmall
from fastrl.planning.plans import use_plan
from fastrl.planning.prices import plan_seconds, times
from fastrl.planning.tiling import Call, Needs, Pass, Tile, combined_rows

sys.path.insert(0, str(BENCHMARKS))

import scaling
from ledger_record import GPU, record
from scaling import GPUS, TOKENS, TP, Layout, Share, collective, share_of

PAGE = ROOT / "docs" / "scaling.md"
GRPO = Call(1, 4096, 151936, torch.bfloat16, "cuda", Needs(True, True, False))
WIDE = GRPO._replace(hidden=8192)
CHUNKED = GRPO._replace(rows=1 << 20, all_rows=1 << 20, longest=1 << 20)


def made(tokens: int, layout: Layout, call: Call = GRPO) -> Share:
    share = scaling.of_sequence(call, tokens, layout, H100)
    assert share is not None
    return share


@pytest.mark.parametrize("call", [GRPO, WIDE], ids=lambda call: f"H={call.hidden}")
def test_the_page_has_what_is_modelled(call: Call) -> None:
    text = PAGE.read_text()
    assert scaling.fastest_layouts(call, H100) in text
    if call is GRPO:
        assert scaling.every_layout(call, H100) in text


def test_what_the_page_says_limits() -> None:
    """Its sentences, against the shares."""
    layouts = [(tokens, Layout(tp, gpus // tp, gpus)) for gpus in GPUS for tokens in TOKENS for tp in TP]
    shares = {(tokens, layout): made(tokens, layout) for tokens, layout in layouts}
    few = {(tokens, layout.tp): x for (tokens, layout), x in shares.items() if layout.gpus == 8}
    assert all(x.plan.name == "forward-gradient" for (_, layout), x in shares.items() if layout.gpus > 8)
    other = {(tokens >> 10, tp): x.plan.name for (tokens, tp), x in few.items() if x.plan.name != "forward-gradient"}
    assert other == {(512, 8): "two-pass", (1024, 2): "recompute", (1024, 4): "two-pass", (1024, 8): "two-pass"}
    arithmetic = sorted(x.operations / x.seconds for (_, layout), x in shares.items() if layout.gpus <= 64)
    short = few[256 << 10, 8], few[512 << 10, 4]
    assert arithmetic[:2] == sorted(x.operations / x.seconds for x in short) and arithmetic[2] >= 0.84
    assert [round(100 * x.parts["launches"] / x.seconds) for x in short] == [11, 18]
    late: dict[int, list[float]] = {gpus: [] for gpus in GPUS}
    second: dict[int, list[str]] = {gpus: [] for gpus in GPUS}
    for gpus in GPUS:
        for tokens in TOKENS:
            best = scaling.fastest(GRPO, tokens, gpus, H100)
            assert best.tp == (8 if gpus > 256 else 1)
            share = shares[tokens, best]
            second[gpus].append(next(name for name in share.parts if name != "arithmetic"))
            late[gpus].append(round(share.parts["latency"] / share.seconds, 2))
            if gpus <= 64:
                assert share.exposed / share.seconds < 0.015
    assert {*second[8], *second[64]} == {"memory traffic"}
    assert second[256] == ["latency", "latency", "memory traffic", "memory traffic"]
    assert (late[256][0], late[256][-1]) == (0.14, 0.02) and set(second[1024]) == {"latency"}
    alone, eight = (shares[TOKENS[0], Layout(tp, 256 // tp, 256)] for tp in (1, 8))
    assert (round(eight.exposed * 1e3, 2), round(alone.exposed * 1e3, 2)) == (0.2, 0.45)
    assert round((eight.launches - alone.launches) * 1e3, 3) == 0.615
    eights = [shares[tokens, Layout(8, 128, 1024)] for tokens in (TOKENS[0], TOKENS[-1])]
    names = ("latency", "arithmetic", "launches")
    parts = [[round(100 * x.parts[name] / x.seconds) for name in names] for x in eights]
    assert parts == [[34, 31, 32], [10, 74, 10]]
    alone, eight = shares[TOKENS[0], Layout(1, 1024, 1024)], eights[0]
    assert [round(x.launches * 1e3, 2) for x in (alone, eight)] == [0.06, 0.67]
    assert [round(x.parts["latency"] * 1e3, 1) for x in (alone, eight)] == [1.8, 0.7]
    assert round(max(x.head_gradient.seconds / x.seconds for x in shares.values()), 1) == 4.1
    for tokens, layout in layouts:
        share = shares[tokens, layout]
        assert share.sent.network < 7e3
        if layout.gpus > 8:
            assert 6e-3 < share.head_gradient.seconds < 12e-3
    lost = [100 * few[tokens, 8].exposed / few[tokens, 8].seconds for tokens in TOKENS]
    assert [round(x, 1) for x in lost] == [4.8, 8.6, 6.4, 6.4]
    for tokens, tp, budget, ms in ((1 << 20, 8, 20, (827, 1295)), (1 << 19, 4, 8, (383, 499))):
        call = GRPO._replace(rows=tokens, all_rows=tokens, longest=tokens)
        more = share_of(call, Layout(tp, 8 // tp, 8), H100, budget << 30)
        assert more.fits(H100) and (round(more.seconds * 1e3), round(few[tokens, tp].seconds * 1e3)) == ms
    wide = made(TOKENS[0], Layout(1, 8, 8), WIDE)
    assert round(100 * wide.traffic / wide.seconds) == 16 and wide.plan.tiles["forward-gradient"].rows == 1024
    assert [scaling.fastest(WIDE, tokens, 8, H100).tp for tokens in TOKENS] == [4, 1, 1, 1]


@pytest.mark.parametrize(("tp", "most"), [(2, 19), (4, 6), (8, 2)])
def test_when_the_sum_of_dl_dhidden_is_hidden(tp: int, most: int) -> None:
    """By operations and bytes alone, up to so many chunks of equal size."""
    assert int(GRPO.vocab / (4 * (tp - 1) * H100.flops / scaling.NVLINK)) == most
    rows = 8192
    product = 2 * rows * (GRPO.vocab / tp) * GRPO.hidden / H100.flops
    for chunks in (most, most + 1):
        wire = collective(4 * rows * GRPO.hidden, tp, rounds=2).wire
        assert (wire <= product / chunks) == (chunks == most)


def test_a_collective_by_hand() -> None:
    """8 ranks in a node; 16 in two; 12 in two; 4 with one in each node. 1 GB each."""
    size = 1e9
    inside = collective(size, 8)
    assert inside.nvlink == pytest.approx(7 / 8 * size) and inside.network == 0
    assert inside.seconds == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 7 / 8 * size / 370e9)
    both = collective(size, 16, rounds=2)
    assert both.network == pytest.approx(2 * 15 / 16 * size / 8) and both.nvlink == pytest.approx(7 * both.network)
    assert both.wire == pytest.approx(both.network / 46e9)  # 8 adapters at 46 GB/s are slower than 370
    assert both.latency == pytest.approx(8.4e-6 + 28 * 3.4e-6 + 2 * 14e-6)
    assert collective(size, 12).network == pytest.approx(11 / 12 * size / 8)
    apart = collective(size, 4, stride=8)
    assert apart.nvlink == 0 and apart.wire == pytest.approx(3 / 4 * size / 46e9)
    assert collective(8, 4, stride=8).latency == pytest.approx(6.6e-6 + 3 * 2.7e-6)  # LL, for few bytes
    assert collective(size, 1).seconds == 0


def test_the_rank_that_has_most_is_modelled() -> None:
    call = GRPO._replace(rows=100, all_rows=101, longest=10, vocab=1000)
    part = Layout(3, 3, 9).part(call)
    assert (part.rows, part.all_rows, part.longest, part.vocab) == (34, 34, 4, 334)
    assert (part.shards, part.partial) == (3, True)
    alone = Layout(1, 1, 1).part(call)
    assert (alone.rows, alone.vocab, alone.shards, alone.partial) == (100, 1000, 1, False)


def test_a_share_by_hand() -> None:
    """128k tokens over tp = 8 x cp = 4: one chunk of 32,768 rows x 18,992 entries."""
    share = made(1 << 17, Layout(8, 4, 32))
    rows, vocab, hidden = 32768, 18992, 4096
    assert (share.call.rows, share.call.vocab, share.plan.units) == (rows, vocab, 3)
    assert share.operations == pytest.approx(3 * 2 * rows * vocab * hidden / 730e12)
    gather, d_hidden, counts, loss = share.exchanges
    assert gather.count == 1 and gather.each.nvlink == 16 * rows * 7 and gather.exposed == gather.each.seconds
    assert d_hidden.each.nvlink == 2 * 7 / 8 * 4 * rows * hidden and d_hidden.exposed == 0
    assert d_hidden.each.seconds == pytest.approx(8.4e-6 + 14 * 3.4e-6 + d_hidden.each.nvlink / 370e9)
    assert counts.count == loss.count == 1 and counts.each.network == 4 * 3 and loss.each.network == 4 * 12 * 3
    assert share.head_gradient.network == pytest.approx(3 / 4 * 4 * vocab * hidden)
    assert share.exposed == gather.exposed + counts.each.seconds + loss.each.seconds
    assert sum(share.parts.values()) == pytest.approx(share.seconds)
    assert share.sent.seconds == pytest.approx(sum(x.count * x.each.seconds for x in share.exchanges))


def test_products_around_a_gather_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the gradients before and of the logits after it; dL/dhidden is summed behind the last chunk only."""
    share = share_of(CHUNKED, Layout(8, 1, 8), H100, 20 << 30)
    gather, d_hidden = share.exchanges
    tile = share.plan.tiles["forward-gradient"]
    last = CHUNKED.rows - (gather.count - 1) * tile.rows
    assert gather.count == -(-CHUNKED.rows // tile.rows) > 1 and gather.exposed == 0
    product = 2 * last * 18992 * 4096 / 730e12
    assert d_hidden.exposed == pytest.approx(d_hidden.each.seconds - product, rel=0.01)
    monkeypatch.setattr(scaling, "NVLINK", scaling.NVLINK / 1e5)
    gather = share_of(CHUNKED, Layout(8, 1, 8), H100, 20 << 30).exchanges[0]
    one, ends = 2 * tile.rows * 18992 * 4096 / 730e12, collective(16 * last * 8, 8).seconds
    middle = collective(16 * tile.rows * 8, 8).seconds
    hidden = one + 3 * (gather.count - 3) * one + (2 * one + product) + 2 * one  # the first, the next, two at the end
    assert gather.exposed == pytest.approx((gather.count - 1) * middle + ends - hidden, rel=1e-3)


@pytest.mark.parametrize(
    ("plan", "changes", "counts"),
    [
        ("recompute", {}, [1, 1]),
        ("recompute", {"dtype": torch.float32}, [1, 1]),
        ("two-pass", {"dtype": torch.float32}, [1, 1]),
        ("forward-gradient", {"needs": Needs(False, True, False)}, [30]),
        ("forward", {"needs": Needs(False, False, False)}, [1]),
    ],
)
def test_collectives_of_each_plan(plan: str, changes: dict[str, Any], counts: list[int]) -> None:
    with use_plan(plan):
        share = share_of(CHUNKED._replace(**changes), Layout(8, 1, 8), H100)
    assert [x.count for x in share.exchanges] == counts
    if counts == [1, 1]:  # nothing is left to compute when dL/dhidden is
        assert share.exchanges[1].exposed == share.exchanges[1].each.seconds
    if "needs" in changes and not changes["needs"].weight:
        assert share.head_gradient.seconds == 0


def test_collectives_of_a_chunk_or_a_slope() -> None:
    """Two-pass in 16 bits sums each chunk of dL/dhidden; a frozen head sums each slope and hides no gather."""
    with use_plan("two-pass"):
        share = share_of(CHUNKED, Layout(8, 1, 8), H100)
    d_hidden = share.exchanges[1]
    assert d_hidden.count == -(-CHUNKED.rows // share.plan.tiles["hidden"].rows) > 1
    assert d_hidden.total.nvlink == pytest.approx(2 * 7 / 8 * 4 * CHUNKED.rows * 4096)
    assert d_hidden.exposed == pytest.approx(d_hidden.total.seconds)
    frozen = CHUNKED._replace(needs=Needs(True, False, False), scope=RESPONSE, slopes=2, rows=1 << 18)
    with use_plan("frozen-head"):
        share = share_of(frozen, Layout(8, 1, 8), H100)
    gather, d_hidden = share.exchanges
    assert gather.count > 1 and gather.exposed == pytest.approx(gather.total.seconds)
    assert d_hidden.count == 2 and d_hidden.each.nvlink == 2 * 7 / 8 * 4 * frozen.rows * 4096


def test_the_costs_of_shards() -> None:
    """Three sweeps of the row kernels, and dL/dhidden in float32, which is cast once."""
    sizes = Layout(8, 1, 8).part(CHUNKED._replace(rows=16384))
    tile = Tile(16384, 18992)
    shared = times(Pass("forward-gradient", sizes), tile, H100)
    alone = times(Pass("forward-gradient", sizes._replace(shards=1, partial=False)), tile, H100)
    logits, hidden = 2 * 16384 * 18992, 16384 * 4096
    assert shared.kernels == pytest.approx(H100.row_kernel(3 * logits))
    assert alone.kernels == pytest.approx(H100.visit(2 * logits, 16384, 2 * 18992, 1)) and alone.sums == 0
    assert shared.sums == pytest.approx(H100.exposed(2 * hidden) + H100.seconds(6 * hidden))
    assert shared.products == alone.products


def test_sums_over_responses() -> None:
    """128 responses over 2 ranks: a count, a sum and its gradient of each in float32, and 12 numbers."""
    call = CHUNKED._replace(scope=SPREAD, longest=8192)
    share = share_of(call, Layout(4, 2, 8), H100, 20 << 30)
    assert share.plan.name == "recompute"
    assert [(x.count, x.each.nvlink) for x in share.exchanges[2:]] == [(1, 512), (2, 512), (1, 48)]
    assert all(x.exposed == x.count * x.each.seconds > 0 for x in share.exchanges[2:])
    share = share_of(call._replace(needs=Needs(False, False, False)), Layout(1, 2, 2), H100)
    assert [(x.count, x.each.nvlink) for x in share.exchanges] == [(1, 512), (1, 512), (1, 48)]
    assert share_of(call._replace(scope=ANY), Layout(1, 2, 2), H100).exchanges == ()
    with pytest.raises(AssertionError, match="response"):
        share_of(call._replace(scope=RESPONSE), Layout(1, 2, 2), H100)


def test_launches_of_sums_over_ranks() -> None:
    """3 for each of two sums and 3 to pack the loss, for any number of ranks; a gather of statistics has none."""

    def launches(layout: Layout) -> float:
        rows = layout.cp << 10
        return share_of(CHUNKED._replace(rows=rows, all_rows=rows), layout, H100).launches / H100.launch

    alone = launches(Layout())
    assert [round(launches(Layout(1, cp, cp)) - alone) for cp in (2, 8, 1024)] == [9, 9, 9]
    assert round(launches(Layout(8, 1, 8)) - launches(Layout(2, 1, 2))) == 6 * scaling._COMBINE_RANK


def launched(made: Callable[[], Callable[[], object]]) -> int:
    """The launches of a function on stand-ins for a GPU's tensors; `made` makes these, and returns it."""
    pytest.importorskip("triton")
    return record(made, H100, int).count


def empty(*shape: int, needs: bool = False) -> torch.Tensor:
    return torch.empty(shape, device=GPU, requires_grad=needs)


@pytest.mark.parametrize("ranks", [2, 64])
def test_launches_of_the_functions_that_sum(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the gather, which makes no launch but NCCL's."""
    monkeypatch.setattr(sums, "gather", lambda x, group: x.expand(ranks, *x.shape))
    responses = SpreadResponses(SimpleNamespace(), object(), [])  # type: ignore[arg-type]

    def summing() -> Callable[[], object]:
        x = empty(10, needs=True)
        return lambda: responses.ranks_sum(x)

    def back() -> Callable[[], object]:
        total, upstream = responses.ranks_sum(empty(10, needs=True)), empty(10)
        return lambda: total.backward(upstream)

    def packing() -> Callable[[], object]:
        loss, terms, largest = empty(needs=True), empty(10), empty(1)
        return lambda: responses.totals(loss, terms, largest)

    assert launched(summing) == launched(back) == scaling._SUM
    assert launched(packing) == scaling._SUM + scaling._PACK


def test_more_gpus_tokens_and_speed() -> None:
    """More ranks take no longer to compute, more tokens longer; an H200 is faster."""
    for tp in TP:
        compute = [made(TOKENS[0], Layout(tp, gpus // tp, gpus)).operations for gpus in GPUS]
        assert compute == sorted(compute, reverse=True)
        seconds = [made(tokens, Layout(tp, 8 // tp, 8)).seconds for tokens in TOKENS]
        assert seconds == sorted(seconds)
    layout = Layout(8, 1, 8)
    slow, fast = (share_of(CHUNKED, layout, device, 20 << 30) for device in (H100, H200))
    assert fast.seconds < slow.seconds and fast.sent == slow.sent


def test_launches_to_combine_and_of_the_objective() -> None:
    """What the model takes for each gather is what the functions launch; of the objective, to a tenth."""
    for count in (2, 8):

        def combining(count: int = count) -> Callable[[], object]:
            ranks = Statistics(*empty(4, count, 10).unbind())

            def run() -> object:
                # The targets, and which rank has them: two launches stand for what a call does for these.
                targets = torch.zeros(10, dtype=torch.int64, device=GPU)
                whole = Combined(targets)
                whole.add(ranks, torch.ones(count, 10, dtype=torch.bool, device=GPU))
                return torch.stack(whole.finish())

            return run

        assert launched(combining) == scaling._COMBINE + count * scaling._COMBINE_RANK

    def evaluating() -> Callable[[], object]:
        logprobs, entropy, advantages, weights, old = (empty(10) for _ in range(5))
        rows, objective = RowInputs(advantages, weights, old=old), RowObjective("clip", numbers=Numbers(0.2, 0.2))
        return lambda: row_terms(logprobs, entropy, None, objective, rows)

    assert launched(evaluating) == pytest.approx(scaling._OBJECTIVE, rel=0.1)
    assert combined_rows(8, "cuda") == 34952
    with use_plan("recompute"):
        one, two = (share_of(CHUNKED._replace(rows=rows), Layout(8, 1, 8), H100) for rows in (34952, 2 * 34952))
    assert one.launches > (74 + 130) * H100.launch
    assert two.launches - one.launches >= 74 * H100.launch


def test_one_rank_is_the_plan_alone() -> None:
    share = share_of(CHUNKED, Layout(), H100)
    assert share.exchanges == ()
    assert share.seconds == pytest.approx(plan_seconds(CHUNKED, share.plan, H100))


def test_what_does_not_fit() -> None:
    call, layout = CHUNKED._replace(rows=1 << 17), Layout(8, 1, 8)
    assert share_of(call, layout, H100, 3 << 30).plan.temporary_bytes <= 3 << 30
    with pytest.raises(BudgetTooSmall, match="too small for 131072 tokens x 4096 x 18992 in bfloat16: got 1048576"):
        share_of(call, layout, H100, 1 << 20)
    assert scaling.of_sequence(GRPO._replace(hidden=32768), 1 << 20, layout, H100) is None


@refused(
    ({"tp": 0}, ValueError, "--tp must be at least 1, got 0"),
    ({"cp": -1}, ValueError, "--cp must be at least 1, got -1"),
    ({"tp": 3, "gpus": 3}, ValueError, "--tp must divide the 8 GPUs of a node or be a multiple, got 3"),
    ({"tp": 2, "cp": 2, "gpus": 6}, ValueError, "--gpus must be a multiple of --tp x --cp, 4, got 6"),
)
def test_bad_layouts(changes: dict[str, Any]) -> None:
    Layout(**changes).checked()


def printed(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    scaling.main(shlex.split(line))
    return capsys.readouterr().out


CALL = "--tokens 131072 --hidden 4096 --vocab 151936"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page, layout = PAGE.read_text(), Layout(8, 4, 32)
    ((line, quoted),) = re.findall(r"(?ms)^```sh\npython benchmarks/scaling.py (.*?)\n```\n+```text\n(.*?)^```$", page)
    assert printed(line, capsys) == quoted == scaling.report(made(1 << 17, layout), layout, H100) + "\n"
    text = printed(f"{CALL} --cp 2 --gpus 64 --device H200 --objective logprobs", capsys)
    assert "modelled on 64 H200" in text and "head gradient" in text and "metrics" not in text
    for objective in ("GSPO", "GSPO --on-policy"):
        text = printed(f"{line} --objective {objective}", capsys)
        assert "recompute, 4U" in text and text.split("sums over each response")[1].split()[0] == "2"
        assert text.split("\n")[2].startswith("33 ms") and "(8.2%)" in text
    assert "33.0 ms in place of 23.4" in page
    assert "whole-response, 3U" in printed(f"{CALL} --tp 8 --objective GSPO --longest 8192", capsys)
    assert printed(f"{CALL} --gradients none --objective logprobs", capsys).endswith("no collectives\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tp 3", "--tp must divide"),
        ("--cp 4 --device cpu", "invalid choice: 'cpu'"),
        ("--tp 8 --budget 1MiB", "too small for 131072 tokens x 4096 x 18992"),
        ("--tp 8 --budget much", "--budget must be a number of bytes"),
        ("--tp 2 --kept 3", "calls with --kept, --gathered or --teacher-hidden are not modelled"),
    ],
)
def test_bad_options(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        scaling.main(shlex.split(f"{CALL} {options}"))
    assert words in capsys.readouterr().err
