"""Models whose parameters lie over the ranks of a world, by FSDP2.

Between two calls of the model a rank holds its part of each parameter, of its gradient and of AdamW's moments. A call
gathers a layer at a time, and what lies outside of the layers (embedding, norm, head) for all of the call.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fastrl.models.patching import is_sharded
from fastrl.training.parallel.world import World


def shard(
    model: torch.nn.Module,
    layers: list[torch.nn.Module],
    world: World,
    dtype: torch.dtype,
    like: Mapping[str, Tensor] = MappingProxyType({}),
    exact: Sequence[torch.nn.Module] = (),
) -> None:
    """Lay a model's parameters over the ranks; their numbers, and those of buffers, are rank 0's, or by name `like`.

    On the other ranks, and where they are in `like`, which lies over the ranks already, they may lie on the device
    "meta". In calls of the model parameters and states are of `dtype`, or of the modules `exact` in float32; shards,
    and gradients that are added up over the ranks, are in float32.
    """
    state = {names[0]: tensor.detach() for names, tensor in _named_state(model)}
    for prefix, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            given = like.get(f"{prefix}.{name}" if prefix else name)
            made = spread(buffer, buffer, world).to(world.device) if given is None else given.clone()
            setattr(module, name, made)
    # Take the numbers from parameters; those that are one stay one.
    emptied: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            empty = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            setattr(module, name, emptied.setdefault(parameter, empty))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # that views may not be written to, which no loss does
    assert world.mesh is not None
    mesh = world.mesh if world.mesh.size(0) > 1 else world.mesh["shard"]  # one copy has no others to add up with
    for module in [*exact, *layers, model]:
        kind = torch.float32 if module in exact else dtype
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    spread_state(model, state, world, like)


def spread(whole: Tensor | None, like: Tensor, world: World) -> Tensor:
    """Rank 0's tensor, laid over the ranks as `like` is; what the others give has no meaning."""
    if world.size == 1:
        assert whole is not None
        return whole
    device = world.device if isinstance(like, DTensor) else torch.device("cpu")  # where the group is
    if world.main and whole is not None:
        full = whole.to(device)
    else:
        full = torch.empty(like.shape, dtype=like.dtype, device=device)
    if isinstance(like, DTensor):
        return distribute_tensor(full, like.device_mesh, like.placements)
    torch.distributed.broadcast(full, group=world.group, group_src=0)
    return full


def spread_state(
    model: torch.nn.Module,
    whole: dict[str, Tensor],
    world: World,
    like: Mapping[str, Tensor] = MappingProxyType({}),
    trained: bool = False,
) -> None:
    """Give a model rank 0's state, as `gathered_state` returns it; other ranks' has no meaning.

    Tensors are taken out of it, so that no rank holds whole what has been laid out. Those in `like` are laid out so
    already.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for names, tensor in _named_state(model, trained):
        if names[0] in like:
            laid = like[names[0]].detach().clone()
        else:
            found = next((name for name in names if name in whole), names[0])
            laid = spread(whole.pop(found, None), tensor, world)
        if tensor.is_meta:
            made[id(tensor)] = torch.nn.Parameter(laid, tensor.requires_grad)
        else:  # which an optimizer may hold
            tensor.detach().copy_(laid)
    tensors = model.state_dict(keep_vars=True).items()
    model.load_state_dict({n: made[id(x)] for n, x in tensors if id(x) in made}, strict=False, assign=True)


def local_bytes(tensor: Tensor) -> int:
    """What this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def gathered_bytes(model: torch.nn.Module, layers: list[torch.nn.Module]) -> int:
    """The most that a call of a sharded model gathers: a layer, and what lies outside of them."""
    if not is_sharded(model):
        return 0
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    return sum(p.nbytes for p in model.parameters()) - sum(sizes) + max(sizes, default=0)


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may lie over ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def gathered_state(model: torch.nn.Module, world: World, trained: bool = False) -> dict[str, Tensor]:
    """A model's state, without aliases of its parameters; see `whole_on_main`. With `trained` what is trained alone."""
    return whole_on_main(((names[0], tensor) for names, tensor in _named_state(model, trained)), world)


def whole_on_main(tensors: Iterable[tuple[str, Tensor]], world: World) -> dict[str, Tensor]:
    """Named tensors that may lie over ranks: whole, on rank 0 and the CPU; on other ranks nothing is kept."""
    whole = ((name, gathered(tensor)) for name, tensor in tensors)
    return {name: tensor.cpu().contiguous() for name, tensor in whole if world.main}


def _named_state(model: torch.nn.Module, trained: bool = False) -> list[tuple[list[str], Tensor]]:
    """A model's parameters and lasting buffers, or those that are trained, each once, with its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.requires_grad or not trained:
            found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


@contextmanager
def unsharded(model: torch.nn.Module) -> Iterator[None]:
    """Hold all of a model's parameters for the block, in which its calls need no other rank."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)  # as `fully_shard` has it
            part.reshard()


def reshard(model: torch.nn.Module) -> None:
    """Let go of what a call without a backward has gathered: until then `parameters` are the gathered ones."""
    if isinstance(model, FSDPModule):
        model.reshard()


def own_class(model: Any) -> Any:
    """The model's class, without what FSDP2 has put before it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
