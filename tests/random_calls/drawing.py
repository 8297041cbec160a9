"""Random inputs: shapes, layouts, dtypes, values and ways to lie in memory, all from one integer seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
VOCABULARIES = (1, 2, 3, 5, 7, 8, 16, 31, 33, 64, 100, 257, 1000, 1003, 2050)


class Draw(random.Random):
    """`random.Random` with tensors; everything that it decided worth telling is in `told`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.told: dict[str, Any] = {}

    def tell(self, **facts: Any) -> None:
        self.told |= facts

    def often(self, chance: float) -> bool:
        return self.random() < chance

    def normal(self, *shape: int) -> Tensor:
        """Float64 numbers that float32 holds."""
        return torch.randn(*shape, generator=self.generator).double()

    def floats(self, *shape: int) -> Tensor:
        """Uniform in [0, 1), the same."""
        return torch.rand(*shape, generator=self.generator).double()

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def scale(self, low: float, high: float) -> float:
        """A number between the two, its logarithm uniform, rounded to what float32 holds."""
        return float(torch.tensor(math.exp(self.uniform(math.log(low), math.log(high))), dtype=torch.float32))

    def dtype(self) -> torch.dtype:
        return self.choices(FLOATS, (6, 2, 1))[0]


@dataclass
class Layout:
    """How N tokens lie as responses: the shape of per-token tensors, cu_seqlens for packed ones, and indices."""

    shape: tuple[int, ...]
    cu_seqlens: Tensor | None
    responses: list[list[int]]

    @property
    def tokens(self) -> int:
        return math.prod(self.shape)

    @property
    def options(self) -> dict[str, Any]:
        """What tells a function how the responses lie."""
        return {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens}


def draw_layout(draw: Draw, most: int, count: int | None = None) -> Layout:
    """Padded, packed (empty responses too) or one response of at most `most` tokens; count: so many responses."""
    kind = draw.choice(("padded", "packed", "single" if count is None else "packed"))
    responses = draw.choices((0, 1, 2, 3, 4, 5), (1, 3, 4, 4, 3, 2))[0] if count is None else count
    if kind == "single":
        n = draw.randint(0, most) if draw.often(0.9) else draw.randint(0, 1)
        return Layout((n,), None, [list(range(n))])
    per_response = most // max(responses, 1)
    if kind == "padded":
        length = draw.randint(1, max(per_response, 1)) if draw.often(0.95) else 0
        rows = torch.arange(responses * length).view(responses, length).tolist()
        return Layout((responses, length), None, rows)
    lengths = [0 if draw.often(0.15) else draw.randint(1, max(per_response, 1)) for _ in range(responses)]
    ends = [sum(lengths[:i]) for i in range(responses + 1)]
    rows = [list(range(ends[i], ends[i + 1])) for i in range(responses)]
    return Layout((ends[-1],), torch.tensor(ends, dtype=torch.int32), rows)


def draw_mask(draw: Draw, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """bool (N,), and the argument: None, bool or 0/1 in some dtype."""
    n = math.prod(shape)
    kind = draw.choices(("none", "some", "all", "one", "nothing"), (4, 8, 1, 1, 1))[0]
    draw.tell(mask=kind)
    if kind == "none":
        return torch.ones(n, dtype=torch.bool), None
    share = {"some": draw.choice((0.3, 0.7, 0.9)), "all": 2.0, "one": 0.0, "nothing": 0.0}[kind]
    mask = draw.floats(n) < share
    if kind == "one" and n:
        mask[draw.randrange(n)] = True
    dtype = draw.choice((torch.bool, torch.bool, torch.int64, torch.uint8, torch.float32))
    return mask, lay(draw, mask.view(shape).to(dtype))


def lay(draw: Draw, tensor: Tensor) -> Tensor:
    """The same numbers, now and then in memory with gaps or in another order."""
    kind = draw.random()
    if kind < 0.8 or tensor.dim() == 0:
        return tensor
    if kind < 0.9:
        return torch.stack((tensor, tensor), -1)[..., 0]
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def garbage(draw: Draw, tensor: Tensor, mask: Tensor) -> Tensor:
    """NaN, or another number that must not be read, where the flat mask is 0."""
    fill = draw.choice((math.nan, math.inf, 1e30, 0.0))
    return torch.where(mask.view(tensor.shape), tensor, fill)


def whole(tensor: Tensor) -> Tensor:
    """An argument that is its leaf."""
    return tensor


@dataclass
class Given:
    """A tensor argument: its float64 value, the leaf that has its numbers, and the argument made of the leaf."""

    leaf: Tensor
    argument: Tensor
    make: Any

    def pulled(self, *gradients: Tensor) -> list[Tensor]:
        """Gradients of the argument as gradients of the leaf: the view's own map, in float64."""
        if self.make is whole:
            return [g.view(self.leaf.shape) for g in gradients]
        twin = self.leaf.detach().double().requires_grad_()
        view = self.make(twin)
        return [torch.autograd.grad(view, twin, g.view(view.shape), retain_graph=True)[0] for g in gradients]


def give(draw: Draw, value: Tensor, dtype: torch.dtype, needs_gradient: bool, *, inplace: bool = False) -> Given:
    """value (exact in dtype) as an argument: contiguous, sliced, transposed or a part of a larger tensor.

    inplace: for a call that writes in place, which takes no gaps between entries and regular leading dimensions only.
    """
    value = value.to(dtype)
    regular = 1 < value.dim() < (4 if inplace else 9)
    kind = draw.choices(("plain", "sliced", "transposed", "strided"), (6, 1, 1, 1))[0] if regular else "plain"
    draw.tell(memory=kind)
    if kind == "sliced":  # a padded batch shifted by one
        rows = torch.cat((value, value[..., :1, :]), -2) if value.shape[-2] else value
        leaf, make = rows, lambda t: t[..., : value.shape[-2], :]
    elif kind == "transposed":
        leaf, make = value.transpose(0, -2).contiguous(), lambda t: t.transpose(0, -2)
    elif kind == "strided" and not inplace:
        leaf, make = torch.stack((value, value), -1), lambda t: t[..., 0]
    else:
        leaf, make = value.clone(), whole
    leaf = leaf.detach().requires_grad_(needs_gradient)
    return Given(leaf, make(leaf), make)


def expanded(draw: Draw, value: Tensor, dtype: torch.dtype, needs_gradient: bool) -> tuple[Tensor, Given]:
    """The first row repeated by `expand` (one prompt for all responses): its value, and the argument."""
    first = value[:1].to(dtype)
    leaf = first.clone().requires_grad_(needs_gradient)
    shape = value.shape
    draw.tell(memory="expanded")
    return first.double().expand(shape), Given(leaf, leaf.expand(shape), lambda t: t.expand(shape))
