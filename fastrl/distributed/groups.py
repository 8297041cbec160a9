"""Process groups: what the ranks of a call tell each other before its work, so that all of them do it or none.

Each call over a group makes one exchange: a few KiB between the hosts, never on a GPU's stream, so that a GPU is not
waited for. It carries the facts that a plan depends on, or an error in their place. Thus an error in the checks of one
rank is raised by all, and none of them waits for a collective that never comes.

    with reporting(tp_group=tp_group):       # an error inside, before the exchange, reaches the other ranks
        arguments = checked(...)
        by_rank = agree("tp_group", tp_group, same={"targets": shape}, facts={"vocab": 127})
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

#: Older versions of torch have the old name alone, newer ones warn of it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Bytes of a rank's part of an exchange; longer error messages are cut.
_MESSAGE = 4096
_LONGEST_ERROR = 2000

#: Of each group the one in which its hosts talk; None: itself, because it can exchange tensors of a CPU.
_host_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup | None] = WeakKeyDictionary()
_exchanges: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def checked_group(name: str, group: object) -> ProcessGroup | None:
    """Returns the group, or None; raises an error that names the argument unless this process is one of its ranks."""
    if group is None:
        return None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name} must be a group that this process is a rank of, got the one of other ranks")
    if not isinstance(group, ProcessGroup):
        hint = " (.get_group() of a mesh's dimension is one)" if type(group).__name__ == "DeviceMesh" else ""
        raise TypeError(f"{name} must be a torch.distributed.ProcessGroup{hint}, got {type(group).__name__}")
    return group


@contextmanager
def reporting(**groups: ProcessGroup | None) -> Iterator[None]:
    """Tells the other ranks of the groups, by name, if the body raises before it exchanged anything with them."""
    present = {name: group for name, group in groups.items() if group is not None}
    before = {name: _exchanges.get(group, 0) for name, group in present.items()}
    try:
        yield
    except Exception as error:
        for name, group in present.items():
            if _exchanges.get(group, 0) == before[name]:
                _exchange(group, {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]})
        raise


def agree(name: str, group: ProcessGroup, same: Mapping[str, object], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The `facts` of every rank, in their order.

    Args:
        name: of the argument, for errors.
        same: by name what must be equal on all ranks, as text in errors.
        facts: numbers, texts and lists of them.

    Raises:
        RuntimeError: another rank raised an error instead; the message has it.
        ValueError: something of `same` differs.
    """
    texts = {key: str(value) for key, value in same.items()}
    answers = _exchange(group, {"same": texts, "facts": dict(facts)})
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise RuntimeError(f"rank {rank} of {name} raised {answer['error']}")
    for rank, answer in enumerate(answers):
        for key in dict.fromkeys([*texts, *answer["same"]]):  # in one order: every rank names the same one
            first, other = (x["same"].get(key, "nothing") for x in (answers[0], answer))
            if first != other:
                raise ValueError(
                    f"{key} must be the same on every rank of {name}, got {first} on rank 0 and {other} on rank {rank}"
                )
    return [answer["facts"] for answer in answers]


def _exchange(group: ProcessGroup, message: dict[str, Any]) -> list[dict[str, Any]]:
    """The message of every rank."""
    _exchanges[group] = _exchanges.get(group, 0) + 1
    if group.size() == 1:  # which needs no group of hosts
        return [message]
    data = json.dumps(message).encode()
    if len(data) > _MESSAGE:
        data = json.dumps(
            {"error": f"RuntimeError: what is agreed on takes {len(data)} bytes, at most {_MESSAGE}"}
        ).encode()
    mine = torch.frombuffer(bytearray(data.ljust(_MESSAGE)), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in start_gather(mine, _host_group(group))()]


def _host_group(group: ProcessGroup) -> ProcessGroup:
    """The group in which its ranks exchange tensors of a CPU; all of them make it together at their first exchange."""
    if group not in _host_groups:
        own = None
        if "cpu:" not in dist.get_backend_config(group):  # such as "cpu:gloo,cuda:nccl"
            own = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
        _host_groups[group] = own
    return _host_groups[group] or group


def gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """(...) -> (ranks, ...): x of every rank, which has the same shape on all of them."""
    return start_gather(x, group)()


def start_gather(x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Starts `gather`; the call of what it returns waits for the result, on a GPU without stopping the host."""
    x = x.contiguous()
    if group.size() == 1:
        return lambda: x[None]
    out = torch.empty((group.size(), *x.shape), dtype=x.dtype, device=x.device)
    # Flat, because gloo takes no other shape; into one tensor, because NCCL copies each of a list by itself.
    work = _all_gather(out.view(-1), x.view(-1), group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return out

    return finish
