"""torch.library operators whose functions take NamedTuples: each field becomes an argument of the schema.

A schema holds tensors, numbers and strings only. `Transform`, `Statistics`, `Support` and the like are taken apart on
the way into an operator, and put together on the way to its function, its fake and its backward, here only. Only
torch.compile and torch.func need that: any other call runs the function itself, inside a plain autograd function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import NoneType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd import profiler

from fastrl.operators.saved import keep, refuse_second_order, resumed

P = ParamSpec("P")
R = TypeVar("R")


class _Parameter(NamedTuple):
    """A parameter of an operator's function."""

    name: str
    kind: Any  # its type
    fields: tuple[str, ...]  # of the NamedTuple that it is; empty: it is something else
    scalars: tuple[type, ...]  # their types if they are whole numbers: these are one argument, a list

    @classmethod
    def of(cls, name: str, hint: Any) -> _Parameter:
        kind = next((x for x in (hint, *get_args(hint)) if hasattr(x, "_fields")), hint)
        fields = getattr(kind, "_fields", ())
        types = tuple(get_type_hints(kind).values()) if fields else ()
        return cls(name, kind, fields, types if {int, bool}.issuperset(types) else ())

    @property
    def width(self) -> int:
        """The number of its arguments in the schema."""
        return len(self.fields) if self.fields and not self.scalars else 1

    def schema(self, hint: Any) -> Iterator[inspect.Parameter]:
        """The arguments of the schema; the fields of an optional NamedTuple are optional."""
        types = {"": hint}
        if self.scalars:  # torch takes time for each pair of arguments
            types = {"": Sequence[bool] if set(self.scalars) == {bool} else Sequence[int]}
        elif self.fields:
            types = get_type_hints(self.kind)
        for field, field_type in types.items():
            of_list = Sequence[float] if get_origin(field_type) is tuple else field_type
            kind = of_list | None if field and NoneType in get_args(hint) else of_list
            name = f"{self.name}_{field}" if field else self.name
            yield inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)

    def packed(self, values: Sequence[Any]) -> Any:
        """The parameter, from the values of its arguments. An optional NamedTuple is None if all fields are."""
        if not self.fields:
            return values[0]
        if self.scalars:
            return self.kind(*(bool(x) if t is bool else x for t, x in zip(self.scalars, values[0], strict=True)))
        for x in values:
            if x is not None:
                return self.kind(*[tuple(x) if type(x) is list else x for x in values])
        return None

    def unpacked(self, value: Any) -> Sequence[Any]:
        """The values of its arguments, or of their gradients."""
        if not self.fields:
            return (value,)
        if self.scalars:
            return (None if value is None else list(value),)
        return (None,) * len(self.fields) if value is None else value


#: Of each operator by its name: its function, with the arguments of the schema.
_bodies: dict[str, Callable[..., Any]] = {}


def body(name: str) -> Callable[..., Any]:
    """The function of the operator `fastrl::name`, with the arguments of its schema, as the dispatcher calls it."""
    return _bodies[name]


class Operator(Generic[P, R]):
    """A torch.library operator `fastrl::name` that is called as its function is; made by `operator`.

    Its first parameter alone has a gradient, or if that is a NamedTuple, its tensors.
    """

    def __init__(self, function: Callable[P, R], mutates: Sequence[str]) -> None:
        hints = get_type_hints(function)
        results = None if hints["return"] is NoneType else hints["return"]
        del hints["return"]
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._function, self._mutates = cast(Callable[..., Any], function), mutates
        self._result = results if hasattr(results, "_fields") else None
        self._parameters = tuple(_Parameter.of(name, hint) for name, hint in hints.items())
        ends = [0, *accumulate(parameter.width for parameter in self._parameters)]
        self._places = tuple(zip(self._parameters, map(slice, ends, ends[1:]), strict=True))
        self._backward: Callable[..., Any] | None = None

        def on_arguments(*arguments: Any) -> Any:
            return self._function(**self.packed(arguments))

        schema = [x for parameter in self._parameters for x in parameter.schema(hints[parameter.name])]
        returns = tuple[tuple(get_type_hints(results).values())] if self._result else results  # type: ignore[misc]
        signature = inspect.Signature(schema, return_annotation=returns)
        on_arguments.__signature__ = signature  # type: ignore[attr-defined]
        self._operator = torch.library.custom_op(
            f"fastrl::{self.__name__}",
            on_arguments,
            mutates_args=mutates,
            schema=torch.library.infer_schema(on_arguments, mutates_args=mutates),
            # What works within a budget may ask the GPU for the number of its rows.
            tags=(torch.Tag.cudagraph_unsafe,) if "budget" in hints else (),
        )
        _bodies[f"fastrl::{self.__name__}"] = on_arguments

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the operator; all parameters are needed, in order or by name."""
        arguments = self._named(args, kwargs)
        first = self._parameters[0].unpacked(arguments[self._parameters[0].name])
        if _is_traced(first[0]):
            results = self._operator(*self._unpacked(arguments))
        elif profiler._is_profiler_enabled:
            with profiler.record_function(f"fastrl::{self.__name__}"):
                results = self._run(arguments, first)
        else:
            results = self._run(arguments, first)
        return cast(R, results if self._result is None else self._result(*results))

    def _run(self, arguments: dict[str, Any], first: Sequence[Any]) -> Any:
        """Calls the function, inside an autograd function if a tensor of its first parameter needs a gradient."""
        if self._backward is not None and torch.is_grad_enabled() and any(map(_requires_grad, first)):
            return _Eager.apply(self, arguments, *first)
        with torch.no_grad():
            results = self._function(**arguments)
            for name in self._mutates:
                torch.autograd.graph.increment_version(arguments[name])
        return results

    def _named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments = {p.name: value for p, value in zip(self._parameters, args, strict=False)} | kwargs
        if len(args) + len(kwargs) == len(self._parameters) == len(arguments):
            return arguments
        names = ", ".join(parameter.name for parameter in self._parameters)
        raise TypeError(
            f"{self.__name__} takes {names}; got {len(args)} in order and {', '.join(kwargs) or 'none'} by name"
        )

    def unpacked(self, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        """The arguments of the schema for a call."""
        return self._unpacked(self._named(args, kwargs))

    def _unpacked(self, arguments: dict[str, Any]) -> list[Any]:
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

        `save(inputs, results)` gets the parameters by name and the results. It returns by name what the backward reads,
        which `keep` saves and is then `saved(ctx)`. `backward(ctx, *upstream)` gets the gradients of the differentiable
        results, of which at least one is not None, and `ctx.needs`, for each tensor of the first parameter whether its
        gradient is needed. It returns the gradient of the first parameter, once: not with create_graph=True.
        """
        self._backward, self._save, self._differentiable = backward, save, differentiable

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            self.set_up(ctx, self.packed(inputs), output)

        def run(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
            others = self._places[-1][1].stop - self._parameters[0].width
            return (*self.gradients(ctx, ctx.needs_input_grad, upstream), *[None] * others)

        self._operator.register_autograd(run, setup_context=setup_context)

    def set_up(self, ctx: Any, arguments: dict[str, Any], output: Any) -> None:
        """Saves what the backward reads."""
        results = output if isinstance(output, tuple) else (output,)
        keep(ctx, self._save(arguments, results))
        ctx.mark_non_differentiable(*results[self._differentiable :])

    def gradients(self, ctx: Any, needs: Sequence[bool], upstream: Sequence[Tensor | None]) -> Sequence[Any]:
        """The gradients of the first parameter's arguments in the schema."""
        first, upstream = self._parameters[0], upstream[: self._differentiable]
        if all(x is None for x in upstream):
            return [None] * first.width
        refuse_second_order(*upstream)
        ctx.needs = needs[: first.width]
        assert self._backward is not None
        with resumed(ctx):
            return first.unpacked(self._backward(ctx, *upstream))


class _Eager(torch.autograd.Function):
    """A call of an operator that nothing traces."""

    @staticmethod
    def forward(ctx: Any, operator: Operator[..., Any], arguments: dict[str, Any], *first: Any) -> Any:
        ctx.operator = operator
        results = operator._function(**arguments)
        operator.set_up(ctx, arguments, results)
        return results if isinstance(results, Tensor) else tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.operator.gradients(ctx, ctx.needs_input_grad[2:], upstream)


def _is_traced(value: Any) -> bool:
    """Whether something looks at the operators of this call: torch.compile, its stand-ins, torch.func, a dispatch mode.

    Such a mode is selective activation checkpointing, which would keep the tiles that a product overwrites.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if torch._C._len_torch_dispatch_stack():
        return True
    return isinstance(value, Tensor) and type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def operator(*, mutates: Sequence[str] = ()) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Returns a decorator that makes a function an operator; `mutates`: the schema's tensors that it writes to."""
    return lambda function: Operator(function, mutates)
