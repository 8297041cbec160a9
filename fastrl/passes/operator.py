"""torch.library operators whose functions take NamedTuples: each field becomes an argument of the schema.

A schema holds tensors, numbers and strings only. `Transform`, `Statistics`, `Plan` and the like are taken apart on the
way into an operator, and put together on the way to its function, its fake and its backward, here only. Only
torch.compile and torch.func need that: any other call runs the function itself, inside a plain autograd function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate
from types import NoneType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd import profiler

from fastrl.backend.choice import resolved, row_functions
from fastrl.passes import consumed
from fastrl.planning import plans
from fastrl.planning.plans import Plan

P = ParamSpec("P")
R = TypeVar("R")


class _Field(NamedTuple):
    """A field of a NamedTuple, in which there may be another one."""

    name: str
    kind: Any  # its type
    inner: _Fields | None

    @classmethod
    def of(cls, name: str, hint: Any) -> _Field:
        kind = next((x for x in (hint, *get_args(hint)) if hasattr(x, "_fields")), None)
        return cls(name, hint, None if kind is None else _Fields(kind))

    @property
    def is_number(self) -> bool:
        return self.kind in (int, bool)


class _Fields:
    """The fields of a NamedTuple. Its leaves are they, or those of the NamedTuples that they are, in order."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.fields = [_Field.of(name, hint) for name, hint in get_type_hints(kind).items()]

    def leaves(self, value: Any) -> list[Any]:
        """The leaves of a value; None for each if that is None."""
        leaves: list[Any] = []
        for name, _, inner in self.fields:
            x = None if value is None else getattr(value, name)
            # Not by +=, in which torch.compile of torch 2.11 cannot add a named tuple to a list.
            leaves.extend([x] if inner is None else inner.leaves(x))
        return leaves

    def named(self, prefix: str, optional: bool) -> list[_Field]:
        """The leaves as fields with names in a schema; an optional tuple's are optional, but for numbers."""
        named: list[_Field] = []
        for field in self.fields:
            name, maybe = f"{prefix}_{field.name}", optional or NoneType in get_args(field.kind)
            if field.inner is not None:
                named.extend(field.inner.named(name, maybe))
            elif field.is_number or not optional:
                named.append(_Field(name, field.kind, None))
            else:
                named.append(_Field(name, _schema_type(field.kind) | None, None))
        return named

    def built(self, leaves: Iterator[Any]) -> Any:
        """The value from its leaves; None if all of them are."""
        values: list[Any] = []
        for _, hint, inner in self.fields:
            x = next(leaves) if inner is None else inner.built(leaves)
            values.append(x if x is None else bool(x) if hint is bool else tuple(x) if type(x) is list else x)
        return None if all(x is None for x in values) else self.kind(*values)


def _schema_type(hint: Any) -> Any:
    return Sequence[float] if get_origin(hint) is tuple else hint


class _Parameter:
    """A parameter of an operator's function, as arguments of its schema.

    The whole numbers of a NamedTuple, wherever they are in it, are one argument, a list: torch takes time for each pair
    of arguments. Each of its other leaves is an argument of its own.
    """

    def __init__(self, name: str, hint: Any) -> None:
        self.name, self.inner, optional = name, _Field.of(name, hint).inner, NoneType in get_args(hint)
        leaves = [_Field(name, hint, None)] if self.inner is None else self.inner.named(name, optional)
        self.is_number = [self.inner is not None and leaf.is_number for leaf in leaves]
        schema = [(leaf.name, leaf.kind) for leaf, number in zip(leaves, self.is_number, strict=True) if not number]
        self.has_numbers = any(self.is_number)
        if self.has_numbers:
            schema.append((f"{name}_numbers", Sequence[int] | None if optional else Sequence[int]))
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.arguments = [inspect.Parameter(x, either, annotation=_schema_type(kind)) for x, kind in schema]

    def packed(self, values: Sequence[Any]) -> Any:
        """The parameter, from the values of its arguments."""
        if self.inner is None:
            return values[0]
        others, numbers = iter(values), iter((values[-1] if self.has_numbers else None) or ())
        return self.inner.built(iter([next(numbers, None) if number else next(others) for number in self.is_number]))

    def unpacked(self, value: Any) -> Sequence[Any]:
        """The values of its arguments, or of their gradients."""
        if self.inner is None:
            return (value,)
        leaves = self.inner.leaves(value)
        others = [x for x, number in zip(leaves, self.is_number, strict=True) if not number]
        if self.has_numbers:
            numbers = [x for x, number in zip(leaves, self.is_number, strict=True) if number]
            others.append(None if value is None else [int(x) if isinstance(x, bool) else x for x in numbers])
        return others


#: Of each operator by its name: its function, with the arguments of the schema.
_bodies: dict[str, Callable[..., Any]] = {}


def body(name: str) -> Callable[..., Any]:
    """The function of the operator `fastrl::name`, with the arguments of its schema, as the dispatcher calls it."""
    return _bodies[name]


class Operator(Generic[P, R]):
    """A decorator: a torch.library operator `fastrl::name` that is called as its function is.

    Its first parameter alone has a gradient, or if that is a NamedTuple, its tensors.
    """

    def __init__(self, function: Callable[P, R]) -> None:
        hints = get_type_hints(function)
        results = hints.pop("return")
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._function = cast(Callable[..., Any], function)
        self._result = results if hasattr(results, "_fields") else None
        self._parameters = tuple(_Parameter(name, hint) for name, hint in hints.items())
        self._names = tuple(hints)
        ends = [0, *accumulate(len(parameter.arguments) for parameter in self._parameters)]
        self._places = tuple(zip(self._parameters, map(slice, ends, ends[1:]), strict=True))
        self._backward: Callable[..., Any] | None = None

        def on_arguments(*arguments: Any) -> Any:
            return self._function(**self.packed(arguments))

        schema = [x for parameter in self._parameters for x in parameter.arguments]
        returns = tuple[tuple(get_type_hints(results).values())] if self._result else results  # type: ignore[misc]
        signature = inspect.Signature(schema, return_annotation=returns)
        on_arguments.__signature__ = signature  # type: ignore[attr-defined]
        self._operator = torch.library.custom_op(
            f"fastrl::{self.__name__}",
            lambda *arguments: _apart(on_arguments(*arguments)),
            mutates_args=(),
            schema=torch.library.infer_schema(on_arguments, mutates_args=()),
            # What works within a budget may ask the GPU for the number of its rows.
            tags=(torch.Tag.cudagraph_unsafe,) if "run" in hints else (),
        )
        _bodies[f"fastrl::{self.__name__}"] = on_arguments

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the operator; all parameters are needed, in order or by name."""
        arguments: dict[str, Any] = dict(zip(self._names, args, strict=False)) | kwargs
        if len(arguments) != len(self._names) or len(args) + len(kwargs) != len(self._names):
            raise TypeError(
                f"{self.__name__} takes {', '.join(self._names)}; got {len(args)} in order and"
                f" {', '.join(kwargs) or 'none'} by name"
            )
        first = arguments[self._names[0]]
        tensors = (first,) if self._parameters[0].inner is None else first
        # A dispatch mode looks at operators: selective checkpointing would keep the tiles that a product overwrites.
        if is_functional(tensors[0]) or torch._C._len_torch_dispatch_stack():
            results = self._operator(*self.unpacked(arguments))
        else:
            with profiler.record_function(f"fastrl::{self.__name__}") if profiler._is_profiler_enabled else _NOTHING:
                results = self._run(arguments, tensors)
        return cast(R, results if self._result is None else self._result(*results))

    def _run(self, arguments: dict[str, Any], tensors: Sequence[Any]) -> Any:
        """Calls the function, inside an autograd function if one of the tensors needs a gradient."""
        differentiable = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
        if self._backward is None or not differentiable:
            with torch.no_grad():
                return self._function(**arguments)

        def run(*_: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            results = self._function(**arguments)
            return results, self._save(arguments, results)

        return Once.apply(run, self._backward, self._differentiable, *tensors)

    def unpacked(self, arguments: dict[str, Any]) -> list[Any]:
        """The arguments of the schema for a call."""
        unpacked: list[Any] = []
        for parameter in self._parameters:
            # Not by +=, in which torch.compile of torch 2.11 cannot add a named tuple to a list.
            unpacked.extend(parameter.unpacked(arguments[parameter.name]))
        return unpacked

    def packed(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """The parameters by name, from the arguments of the schema."""
        return {parameter.name: parameter.packed(arguments[where]) for parameter, where in self._places}

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Registers the function that gives the results for fake tensors, from the same parameters."""
        self._operator.register_fake(lambda *arguments: fake(**self.packed(arguments)))

    def register_autograd(
        self,
        backward: Callable[..., Any],
        save: Callable[[dict[str, Any], tuple[Tensor, ...]], dict[str, Any]],
        differentiable: int,
    ) -> None:
        """Registers the backward; only the first results, as many as `differentiable`, have a gradient.

        `save(inputs, results)` gets the parameters by name and the results. It returns by name what the backward reads.
        `backward` is as in `Once`, for the arguments of the first parameter.
        """
        self._backward, self._save, self._differentiable = backward, save, differentiable
        count = len(self._parameters[0].arguments)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            keep(ctx, save(self.packed(inputs), output), backward, differentiable)
            ctx.mark_non_differentiable(*output[differentiable:])

        def run(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
            others = self._places[-1][1].stop - count
            return (*_gradients(ctx, ctx.needs_input_grad[:count], upstream), *[None] * others)

        self._operator.register_autograd(run, setup_context=setup_context)


_NOTHING = nullcontext()


def _apart(results: Tensor | Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
    """An operator's results, which may not share memory in a graph: copies where a backend filled one tensor."""
    if isinstance(results, Tensor):
        return results
    places = [x.untyped_storage().data_ptr() for x in results]
    return tuple(x.clone() if places.count(place) > 1 else x for x, place in zip(results, places, strict=True))


def is_functional(value: Any) -> bool:
    """Whether nothing may be overwritten: in a graph of torch.compile, for its stand-ins, and under torch.func."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return isinstance(value, Tensor) and type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__


# --- functions that are differentiable once ---------------------------------------------------------------------------


class Once(torch.autograd.Function):
    """`Once.apply(run, backward, differentiable, *inputs)`: results of `run(*inputs)`, and how they are differentiated.

    The first results, as many as `differentiable`, have gradients, and of the inputs the tensors. `run` returns the
    results, and by name what the backward reads: tensors, numbers, texts, tuples or lists of them. `backward(ctx,
    *upstream)` gets the gradients of the differentiable results, of which at least one is not None. It reads
    `saved(ctx)`, and `ctx.needs`, for each input whether its gradient is needed, and returns these gradients; those
    that are not needed may be anything. It runs once: not with create_graph=True.
    """

    @staticmethod
    def forward(ctx: Any, run: Any, backward: Any, differentiable: int, *inputs: Any) -> tuple[Any, ...]:
        # The graph's edges to the inputs already exist here. If logits were overwritten earlier, autograd would rebuild
        # the edge of a view as an as_strided one, whose backward copies the whole tensor.
        results, to_save = run(*inputs)
        keep(ctx, to_save, backward, differentiable)
        ctx.mark_non_differentiable(*results[differentiable:])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *_gradients(ctx, ctx.needs_input_grad[3:], upstream)


def _gradients(ctx: Any, needs: Sequence[bool], upstream: Sequence[Tensor | None]) -> list[Any]:
    """The gradients of a function's inputs, None for those that are not needed."""
    upstream = upstream[: ctx.differentiable]
    if all(x is None for x in upstream):
        return [None] * len(needs)
    if torch.is_grad_enabled() and any(type(x) is Tensor for x in upstream):  # whose graph would be cut silently
        raise RuntimeError("this function is differentiable once: its backward has no graph (create_graph=True)")
    ctx.needs = needs
    with _NOTHING if ctx.running is None else plans.run(ctx.running):
        gradients = ctx.run_backward(ctx, *upstream)
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]


class _Saved(NamedTuple):
    """The place of a tensor among those that autograd saved."""

    place: int


def keep(ctx: Any, values: dict[str, Any], backward: Callable[..., Sequence[Any]], differentiable: int) -> None:
    """Saves what a backward reads, by name, and the plan that runs now."""
    tensors: list[Tensor] = []
    ctx.values = {name: _placed(value, tensors) for name, value in values.items()}
    ctx.spent = False  # whether a backward has used up what it reads
    ctx.running, ctx.run_backward, ctx.differentiable = plans.running.get(), backward, differentiable
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _placed(value: Any, tensors: list[Tensor]) -> Any:
    """The value with the places of its tensors, which are appended to `tensors`, instead of them."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Saved(len(tensors) - 1)
    if not isinstance(value, tuple | list) or isinstance(value, Plan):  # which has no tensors
        return value
    parts = [_placed(x, tensors) for x in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def saved(ctx: Any) -> dict[str, Any]:
    """What `keep` saved, by name; raises RuntimeError if a tensor of it was freed or changed."""
    tensors = ctx.saved_tensors
    return {name: _restored(value, tensors) for name, value in ctx.values.items()}


def _restored(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Saved):
        return tensors[value.place]
    if not isinstance(value, tuple | list) or isinstance(value, Plan):
        return value
    parts = [_restored(x, tensors) for x in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def use_up(ctx: Any) -> None:
    """Notes that this backward uses up what was saved; raises RuntimeError if an earlier one did."""
    if ctx.spent:
        raise RuntimeError(
            "the first backward used up what this loss had kept, logits to overwrite (inplace=True) or gradients that"
            " were formed with the loss: for a second backward (retain_graph=True) compute the loss again"
        )
    ctx.spent = True


# --- a loss whose gradients are formed with its value -----------------------------------------------------------------
# Autograd saves them, and the backward returns them, times a scalar. So activation checkpointing around such a loss
# drops them, and forms them once again.

Gradients = Sequence[Tensor | consumed.Written | None]


def hand_over(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    """The saved `gradients` times the upstream scalar, which is read on its device, in the saved `dtype`.

    A buffer that has this dtype is scaled in place: a second rounding, unless the scalar is a power of two. A float32
    buffer of a narrower gradient is scaled and rounded in one pass.
    """
    results = saved(ctx)
    use_up(ctx)
    for one in results["written"]:
        one.check()
    ctx.values = {}  # which hold what was written
    scaled: list[Tensor | None] = []
    for gradient, need in zip(results["gradients"], ctx.needs, strict=False):
        if gradient is None or not need:
            scaled.append(None)
            continue
        if type(gradient) is Tensor:
            gradient = gradient.data  # whose changes autograd does not report, because a second backward is refused
            out = gradient if gradient.dtype == results["dtype"] else torch.empty_like(gradient, dtype=results["dtype"])
            if gradient.numel():  # a shard of the head may be empty
                scale(gradient, upstream.float(), out, results["backend"])
        else:  # a compiler's fake tensor: graphs are functional, and the compiler manages memory
            out = (gradient * upstream).to(results["dtype"])
        scaled.append(out)
    return scaled


#: A product in another dtype than its factor's is formed in pieces of this many bytes.
_PIECE_BYTES = 2 << 20


def scale(tensor: Tensor, factor: Tensor, out: Tensor, backend: str) -> None:
    """Write the tensor times a 0-dim float32 factor on its device to `out`: the tensor itself, or of another dtype."""
    if resolved(backend, tensor.device.type) == "triton":
        row_functions(backend, tensor).scale(tensor, factor, out)
    elif tensor.device.type != "cpu":
        # A factor without dimensions would be rounded to the tensor's dtype first: 65536 is infinite in float16.
        torch.mul(tensor, factor.view((1,) * tensor.dim()), out=out)
    elif factor.item() == 1:
        if out is not tensor:
            out.copy_(tensor)
    elif out is tensor:
        out.mul_(factor)
    else:  # a product in another dtype would be held whole in its own first
        rows = max(1, _PIECE_BYTES // max(tensor[0].numel() * tensor.element_size(), 1))
        for source, target in zip(tensor.split(rows), out.split(rows), strict=True):
            target.copy_(source * factor)


def attach_gradients(
    run: Callable[..., tuple[Tensor, Gradients, R]], inputs: Sequence[Tensor | None], backend: str
) -> tuple[Tensor, R]:
    """What `run(*inputs)` returns: a 0-dim value, which is attached to its gradients, and what has none.

    run: returns the value, a gradient or None for each input, and results without a gradient.
    """
    others: list[R] = []

    def form(*inputs: Any) -> tuple[tuple[Tensor], dict[str, Any]]:
        value, gradients, rest = run(*inputs)
        others.append(rest)
        written = tuple(x for x in gradients if isinstance(x, consumed.Written))
        tensors = tuple(x.gradient if isinstance(x, consumed.Written) else x for x in gradients)
        return (value,), {"gradients": tensors, "written": written, "dtype": inputs[0].dtype, "backend": backend}

    (value,) = Once.apply(form, hand_over, 1, *inputs)
    return value, others[0]
