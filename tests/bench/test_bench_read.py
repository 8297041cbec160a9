"""The kernel behind the read ceiling: it reads everything, and by 16-byte loads alone.

Run as a program it compiles the kernel for sm_90 and writes what the machine code is like; it must not see
TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import machine_code
import pytest
import torch

from fastrl.bench import ceilings
from fastrl.bench.contenders import Contender
from fastrl.bench.measure import Bench


def compiled() -> dict[str, object]:
    """Registers, bytes of spills, and the instructions of each loop."""
    from fastrl.bench.read_ceiling import BLOCK, WARPS, fold_kernel

    types = {"words_ptr": "i32", "folded_ptr": "i32"}
    code = machine_code.compile_kernel(
        fold_kernel, "sm_90", {"BLOCK": BLOCK}, types, {"words_ptr"}, {"num_warps": WARPS}
    )
    registers, spills, sass = machine_code.disassemble(code.asm["cubin"])
    found = machine_code.Code(sass)
    loops = [[text.split()[0] for _, text in found.body(*span)] for span in found.loops]
    return {"registers": registers, "spills": spills, "loops": loops}


if __name__ == "__main__":
    json.dump(compiled(), sys.stdout)
    sys.exit()

read_ceiling = pytest.importorskip("fastrl.bench.read_ceiling")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux only")
def test_its_loop_reads_by_16_byte_loads_and_does_little_else() -> None:
    found = machine_code.run_program(sys.modules[__name__])
    assert found["spills"] == 0
    assert found["registers"] <= 64  # 4 programs of 256 threads are on a multiprocessor at once
    (loop,) = (opcodes for opcodes in found["loops"] if any(code.startswith("LDG") for code in opcodes))
    loads = [code for code in loop if code.startswith("LDG")]
    assert len(loads) == read_ceiling.BLOCK // (4 * 32 * read_ceiling.WARPS)
    assert all(".128" in code for code in loads), loads
    assert len(loop) < 10 * len(loads)  # four of them fold the 16 bytes


@pytest.mark.parametrize("count", [1, 4096, 5 * 4096 + 3])
@pytest.mark.parametrize("programs", [1, 3])
def test_it_reads_every_word(count: int, programs: int, device: str) -> None:
    words = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32)
    expected = 0
    for word in words.tolist():
        expected ^= word
    folded = torch.empty(programs, dtype=torch.int32, device=device)
    read_ceiling.fold(words.to(device), folded)
    found = 0
    for word in folded.tolist():
        found ^= word
    assert found == expected


def test_the_fastest_read_is_the_ceiling(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("logits", {"N": 4, "V": 8192}, torch.bfloat16, device, 1)
    source = torch.randn(4, 8192).to(torch.bfloat16).to(device)
    if device == "cpu":  # where the interpreter takes a tenth of a second a program
        monkeypatch.setattr(ceilings, "_PROGRAMS", (1, 2, 3))
        found = SimpleNamespace(multi_processor_count=1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    taken = []
    seconds_of = Bench.seconds_of

    def spy(self: Bench, contender: Contender) -> float | None:
        taken.append(seconds_of(self, contender))
        return taken[-1]

    monkeypatch.setattr(Bench, "seconds_of", spy)
    speed = ceilings.read_speed(bench, source)
    assert len(taken) == 3 and None not in taken
    assert speed == pytest.approx(2 * 4 * 8192 / min(taken))
    monkeypatch.setattr(Bench, "seconds_of", lambda *_: None)
    assert ceilings.read_speed(bench, source) is None


def test_the_words_are_the_tensors_memory() -> None:
    for dtype, entries in ((torch.bfloat16, 10), (torch.float32, 15), (torch.bfloat16, 15)):
        tensor = torch.randn(1, entries).to(dtype)
        words = read_ceiling.words_of(tensor)
        whole = words.numel() * 4 // tensor.element_size()
        assert entries - whole < 2 and words.data_ptr() == tensor.data_ptr()
        assert torch.equal(words.view(dtype), tensor[0, :whole])
