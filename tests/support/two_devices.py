"""A policy on a device of its own, played on the CPU: what lies there and what lies on the host is told apart.

Tensors of a rollout are `Host`, those of a batch `Device`, and so is what is computed from them. An operation that
takes both fails, as with a GPU. Tensors made from numbers alone are neither.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastrl.training.batches.rollout import AXES, Rollout
from fastrl.training.engines import sampler


class _Placed(Tensor):
    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            on_device = any(isinstance(x, Device | nn.Parameter) for x in tensors)
            on_host = [x for x in tensors if isinstance(x, Host)]
            name = getattr(func, "__name__", "")
            if on_device and any(x.dim() > 0 for x in on_host):  # one number of the host's is let in
                raise AssertionError(f"tensors of the host and of the device meet in {name}")
            place: type[Tensor] = Device if on_device else Host
            if name == "cpu":
                place = Host
            elif name == "to" and any(isinstance(x, torch.device) for x in args[1:]):
                place = Device
            result = func(*args, **(kwargs or {}))
            if isinstance(result, tuple) and not isinstance(result, torch.Size):
                placed = [placed_at(place, x) for x in result]
                return type(result)(*placed) if hasattr(result, "_fields") else tuple(placed)
            return placed_at(place, result)


class Host(_Placed):
    """What the trainer holds on the CPU."""


class Device(_Placed):
    """What lies where the policy does."""


def placed_at(place: type[Tensor], x: Any) -> Any:
    """A tensor, or every tensor of a rollout, at that place; anything else as it is."""
    if isinstance(x, Rollout):
        return dataclasses.replace(x, **{name: placed_at(place, getattr(x, name)) for name in AXES})
    if not isinstance(x, Tensor) or isinstance(x, place | nn.Parameter):  # as another object, a leaf were none
        return x
    return x.as_subclass(place)


def set_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on rollouts that are drawn lie on the host, and `Rollout.to` alone moves a batch of one."""
    draw, move = sampler.CompletionSampler.finish, Rollout.to
    monkeypatch.setattr(sampler.CompletionSampler, "finish", lambda *args: placed_at(Host, draw(*args)))
    monkeypatch.setattr(Rollout, "to", lambda *args: placed_at(Device, move(*args)))
