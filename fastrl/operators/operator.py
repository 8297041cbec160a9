"""torch.library operators whose functions take NamedTuples: each field becomes an argument of the schema.

A schema holds tensors, numbers and strings only. `Transform`, `Statistics`, `Support` and the like are taken apart on
the way into an operator, and put together on the way to its function, its fake and its backward, here only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import NoneType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

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


class _Saved(NamedTuple):
    """The place of a tensor among those that autograd saved."""

    place: int


_TUPLES = (tuple, list)


def _rebuilt(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value with `leaf` applied to everything in it that is neither a tuple nor a list."""
    kind = type(value)
    if kind is _Saved or not isinstance(value, _TUPLES):
        return leaf(value)
    parts = [_rebuilt(x, leaf) if isinstance(x, _TUPLES) else leaf(x) for x in value]
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


#: Of each operator by its name: its function, with the arguments of the schema.
_bodies: dict[str, Callable[..., Any]] = {}


def body(name: str) -> Callable[..., Any]:
    """The function of the operator `fastrl::name`, with the arguments of its schema, as the dispatcher calls it."""
    return _bodies[name]


class Operator(Generic[P, R]):
    """A torch.library operator `fastrl::name` that is called as its function is; made by `operator`."""

    def __init__(self, function: Callable[P, R], mutates: Sequence[str]) -> None:
        hints = get_type_hints(function)
        results = None if hints["return"] is NoneType else hints["return"]
        del hints["return"]
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._result = results if hasattr(results, "_fields") else None
        self._parameters = tuple(_Parameter.of(name, hint) for name, hint in hints.items())
        ends = [0, *accumulate(parameter.width for parameter in self._parameters)]
        self._places = tuple(zip(self._parameters, map(slice, ends, ends[1:]), strict=True))

        def on_arguments(*arguments: Any) -> Any:
            return cast(Callable[..., Any], function)(**self.packed(arguments))

        schema = [x for parameter in self._parameters for x in parameter.schema(hints[parameter.name])]
        returns = tuple[tuple(get_type_hints(results).values())] if self._result else results  # type: ignore[misc]
        signature = inspect.Signature(schema, return_annotation=returns)
        on_arguments.__signature__ = signature  # type: ignore[attr-defined]
        self._operator = torch.library.custom_op(
            f"fastrl::{self.__name__}",
            on_arguments,
            mutates_args=mutates,
            schema=torch.library.infer_schema(on_arguments, mutates_args=mutates),
            # What works within a budget may ask the GPU for the number of its rows, and for its free memory.
            tags=(torch.Tag.cudagraph_unsafe,) if "budget" in hints else (),
        )
        _bodies[f"fastrl::{self.__name__}"] = on_arguments

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the operator; all parameters are needed, in order or by name."""
        results = self._operator(*self.unpacked(*args, **kwargs))
        return results if self._result is None else self._result(*results)

    def unpacked(self, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        """The arguments of the schema for a call."""
        unpacked: list[Any] = []
        if len(args) + len(kwargs) == len(self._parameters):
            for i, parameter in enumerate(self._parameters):
                if i >= len(args) and parameter.name not in kwargs:
                    break
                # Not by +=, in which torch.compile of torch 2.11 cannot add a named tuple to a list.
                unpacked.extend(parameter.unpacked(args[i] if i < len(args) else kwargs[parameter.name]))
            else:
                return unpacked
        names = ", ".join(parameter.name for parameter in self._parameters)
        raise TypeError(
            f"{self.__name__} takes {names}; got {len(args)} in order and {', '.join(kwargs) or 'none'} by name"
        )

    def packed(self, arguments: Sequence[Any]) -> dict[str, Any]:
        """The parameters by name, from the arguments of the schema."""
        return {parameter.name: parameter.packed(arguments[where]) for parameter, where in self._places}

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Registers the function that gives the results for fake tensors, from the same parameters."""
        self._operator.register_fake(lambda *arguments: fake(**self.packed(arguments)))

    def register_autograd(
        self,
        backward: Callable[..., dict[str, Any]],
        save: Callable[[Any, dict[str, Any], tuple[Tensor, ...]], dict[str, Any]],
        differentiable: int,
    ) -> None:
        """Registers the backward; only the first results, as many as `differentiable`, have a gradient.

        `save(ctx, inputs, results)` gets the parameters by name and the results. It returns by name what the backward
        reads, which `keep` saves and is then `saved(ctx)`. `backward(ctx,
        *upstream)` gets the gradients of the differentiable results, or None, and returns its own by parameter; what it
        leaves out has none.
        """

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            results = output if isinstance(output, tuple) else (output,)
            keep(ctx, save(ctx, self.packed(inputs), results))
            ctx.mark_non_differentiable(*results[differentiable:])

        def run(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
            gradients = backward(ctx, *upstream[:differentiable])
            return tuple(x for parameter in self._parameters for x in parameter.unpacked(gradients.get(parameter.name)))

        self._operator.register_autograd(run, setup_context=setup_context)


def keep(ctx: Any, values: dict[str, Any]) -> None:
    """Saves what a backward reads, by name: tensors, numbers, texts, and tuples or lists of them."""
    tensors: list[Tensor] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Saved(len(tensors) - 1)

    ctx.values = {name: _rebuilt(value, place) for name, value in values.items()}
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def saved(ctx: Any) -> dict[str, Any]:
    """What `keep` saved, by name; raises RuntimeError if a tensor of it was freed or changed."""
    tensors = ctx.saved_tensors

    def tensor(leaf: Any) -> Any:
        return tensors[leaf.place] if isinstance(leaf, _Saved) else leaf

    return {name: _rebuilt(value, tensor) for name, value in ctx.values.items()}


def operator(*, mutates: Sequence[str] = ()) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Returns a decorator that makes a function an operator; `mutates`: the schema's tensors that it writes to."""
    return lambda function: Operator(function, mutates)
