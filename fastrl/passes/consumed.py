"""Marks logits whose memory was overwritten by their gradient, so that no later call reads the gradient as logits.

The mark is on the storage, which views and detached aliases share, with the version of the tensor after the
gradient was written: once an in-place operation writes new logits, the version differs and the mark no longer applies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_MARK = "_fastrl_consumed"


class _Region(NamedTuple):
    """The place of logits (A, B, V) in their storage, in bytes."""

    start: int
    sizes: tuple[int, int]
    strides: tuple[int, int]
    width: int

    @classmethod
    def of(cls, rows: Tensor) -> _Region:
        unit = rows.element_size()
        strides = (rows.stride(0) * unit, rows.stride(1) * unit)
        return cls(int(rows.storage_offset()) * unit, (rows.shape[0], rows.shape[1]), strides, rows.shape[2] * unit)

    @property
    def end(self) -> int:
        return self.start + sum((n - 1) * step for n, step in zip(self.sizes, self.strides, strict=True)) + self.width

    def starts(self) -> Tensor:
        """The offsets at which the rows begin, in rising order."""
        outer, inner = (torch.arange(n) * step for n, step in zip(self.sizes, self.strides, strict=True))
        return (self.start + outer[:, None] + inner).reshape(-1).sort().values

    def overlaps(self, other: _Region) -> bool:
        if self.end <= other.start or other.end <= self.start:
            return False
        mine, theirs = self.starts(), other.starts()  # slices of the time dimension interleave without overlapping
        before = torch.searchsorted(theirs, mine + self.width)  # how many of theirs begin before this row ends
        return bool(((before > 0) & (theirs[(before - 1).clamp_min(0)] + other.width > mine)).any())


def mark(rows: Tensor) -> _Region | None:
    """Record that the logits (A, B, V) now hold their gradient. Returns where they lie, None if they are empty."""
    if not rows.numel():
        return None
    storage = rows.untyped_storage()
    version, regions = getattr(storage, _MARK, (None, ()))
    earlier = regions if version == rows._version else ()
    region = _Region.of(rows)
    setattr(storage, _MARK, (rows._version, (*earlier, region)))
    return region


@dataclass(frozen=True)
class Written:
    """A gradient that was written over logits in a forward, to be handed over by the backward."""

    gradient: Tensor  # with a version of its own: a later call may consume other parts of the logits' memory
    rows: Tensor  # the same memory as logits (A, B, V)
    region: _Region | None  # that was marked

    def check(self) -> None:
        """Raises RuntimeError if something else was written there since."""
        version, regions = getattr(self.rows.untyped_storage(), _MARK, (None, ()))
        if self.region and (version != self.rows._version or all(region is not self.region for region in regions)):
            raise RuntimeError(
                "logits were modified by an inplace operation before the backward of a loss that had put its gradient"
                " there (inplace=True): call backward first, or leave inplace=True out"
            )


@contextmanager
def marks_stay(tensor: Tensor) -> Iterator[None]:
    """Keeps the marks on the tensor's storage although the tensor is written to inside the context."""
    before = tensor._version
    yield
    storage = tensor.untyped_storage()
    version, regions = getattr(storage, _MARK, (None, ()))
    if version == before:
        setattr(storage, _MARK, (tensor._version, regions))


def refuse(rows: Tensor) -> None:
    """Raises RuntimeError if the logits (A, B, V) hold a gradient instead."""
    if not rows.numel() or rows.is_inference():
        return
    version, regions = getattr(rows.untyped_storage(), _MARK, (None, ()))
    if version == rows._version and any(_Region.of(rows).overlaps(region) for region in regions):
        raise RuntimeError(
            "the logits were consumed by an earlier call (inplace=True): their memory holds its gradient. Compute them"
            " again, or write new ones into it where autograd sees it (with torch.no_grad(): logits.copy_(...)), or"
            " leave inplace=True out of the earlier call"
        )
