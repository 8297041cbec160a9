"""What a device can do: the only table of such numbers, by which plans are priced, and the ledgers of `benchmarks/`.

Prices are modelled, not measured. They are ceilings of one device, and these assumptions (`docs/performance.md` says
where they come from):

- A matrix product takes the larger of two times: of its operations, and of its bytes at the speed of a copy. What its
  result takes beyond one write in the operands' dtype (float32 sums, written or read and written) is exposed in part.
- Any other kernel takes the time of its bytes at the speed of a copy. The row kernels reach a share of that speed.
- The kernel that forms statistics and gradient in one visit takes a fixed time for each row between its two sweeps, and
  its second sweep finds in the L2 cache what fits of the rows in flight.
- Each launch takes a fixed time in addition.
"""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """The ceilings of a device, and how it is priced."""

    name: str
    kind: str  # the type of a torch.device
    bytes_a_second: float  # of a copy, read and written together
    flops: float  # operations per second of a large matrix product in 16 bits
    flops_float32: float  # the same in float32
    launch: float  # seconds from the end of a kernel to the work of the next
    memory: int  # bytes
    multiprocessors: int = 1
    l2: int = 0  # bytes of the cache that all multiprocessors share

    def seconds(self, size: float) -> float:
        """The time of moving this many bytes, read and written together."""
        return size / self.bytes_a_second

    def peak(self, itemsize: int) -> float:
        """Operations per second of a large matrix product of operands of `itemsize` bytes."""
        return self.flops_float32 if itemsize == 4 else self.flops

    def product(self, flops: float, size: float, beyond: float, itemsize: int) -> float:
        """The time of a matrix product of this many operations on operands of `itemsize` bytes.

        size: bytes of the operands, and of the result in the operands' dtype.
        beyond: bytes of the result beyond that.
        """
        return max(flops / self.peak(itemsize), self.seconds(size)) + self.exposed(beyond)

    def exposed(self, size: float) -> float:
        """The part of the time of moving these bytes of products' sums that operations do not hide."""
        return _EXPOSED * self.seconds(size)

    def row_kernel(self, size: float) -> float:
        """The time of a kernel that sweeps once over rows of logits, reading or reading and writing these bytes."""
        return self.seconds(size) / _ROW_KERNELS

    def visit(self, size: float, rows: float, row_bytes: int, programs: int) -> float:
        """The time of statistics, objective and gradient of rows in one kernel.

        size: bytes that it reads once or writes. row_bytes: of a row of logits. programs: that fit a multiprocessor.
        """
        in_flight = self.multiprocessors * programs
        missed = max(0.0, 1 - self.l2 / (in_flight * row_bytes))
        return self.row_kernel(size + missed * rows * row_bytes) + rows * _BETWEEN_SWEEPS / in_flight


#: The share of the copy's speed that row kernels reach with 64 KiB in flight: 1.03 to 1.08 times its time.
_ROW_KERNELS = 1 / 1.06
#: Seconds for a row between its sweeps: 10,600 instructions and 14 barriers, of which nothing else hides the time.
_BETWEEN_SWEEPS = 2.0e-6
#: The share of a product's traffic for float32 sums that its operations do not hide: 0.4 to 1.
_EXPOSED = 0.7

H100 = Device("H100", "cuda", 3.0e12, 730e12, 50e12, 3e-6, 80 << 30, 132, 50 << 20)
H200 = Device("H200", "cuda", 4.3e12, 790e12, 50e12, 3e-6, 141 << 30, 132, 50 << 20)
#: Two cores of a Xeon; a launch stands for the Python of one call.
CPU = Device("CPU", "cpu", 20e9, 400e9, 400e9, 6.25e-6, 16 << 30)
DEVICES = {device.name: device for device in (H100, H200, CPU)}
