"""One call of an aten op, as the dispatcher hands it on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nandoctor.ops import unread_inputs
from nandoctor.torch_compat import is_wrapped, schema_of, tree_map

if TYPE_CHECKING:
    from nandoctor.torch_compat import OpOverload

_DIMENSIONS = frozenset({"dim", "dims"})


class Signature(NamedTuple):
    """What an op's schema says, read once: torch makes new objects of it each time.

    `name` is the aten name without namespace, overload and the in-place underscore, `add` for `add_.Tensor`; of an op
    with dimensions its family's. `written` are the arguments that the op only writes to, `eps` the default of the one
    of that name.
    """

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    eps: float | None
    is_mutable: bool
    is_random: bool


@cache
def signature_of(op: OpOverload) -> Signature:
    """The signature of an op."""
    schema = schema_of(op)
    name = schema.name.partition("::")[2].removesuffix("_nd")
    defaults = (argument.default_value for argument in schema.arguments if argument.name == "eps")
    return Signature(
        name=name if name.startswith("_") else name.rstrip("_"),
        arguments=tuple(argument.name for argument in schema.arguments),
        written=frozenset(argument.name for argument in schema.arguments if argument.is_out),
        eps=next((float(default) for default in defaults if default is not None), None),
        is_mutable=schema.is_mutable,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """An op and the arguments that it was called with; the call as the code made it, where it was changed since."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    original: Invocation | None = None

    @property
    def name(self) -> str:
        """The aten name without namespace, overload and the in-place underscore: `add_.Tensor` is `add`."""
        return signature_of(self.op).name

    @property
    def is_random(self) -> bool:
        """Tell whether the op draws from torch's generator."""
        return signature_of(self.op).is_random

    @property
    def is_mutable(self) -> bool:
        """Tell whether the op writes to one of its arguments."""
        return signature_of(self.op).is_mutable

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """The arguments that were given, by their names in the schema."""
        yield from zip(signature_of(self.op).arguments, self.args, strict=False)
        yield from self.kwargs.items()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the op reads; those of a list are numbered, and what it only writes to is left out."""
        arguments = dict(self.arguments())
        skipped = signature_of(self.op).written.union(unread_inputs(self.name, arguments))
        for name, value in arguments.items():
            if name in skipped:
                continue
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, (list, tuple)):
                yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, torch.Tensor))

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Plain numbers among the arguments, and listed dimensions; the numbers of a list are numbered as well.

        A 0-dim tensor on the CPU is a number that torch wrapped for the user.
        """
        for name, value in self.arguments():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield name, float(value)
            elif isinstance(value, torch.Tensor) and _is_number(value):
                yield name, float(value.detach())
            elif name in _DIMENSIONS and isinstance(value, (list, tuple)):
                yield from ((f"{name}[{i}]", float(dim)) for i, dim in enumerate(value))
        eps = signature_of(self.op).eps
        if eps is not None and "eps" not in dict(self.arguments()):  # the dispatcher leaves out what equals its default
            yield "eps", eps

    def run(self) -> Any:
        """What the op returns."""
        return self.op(*self.args, **self.kwargs)

    def kept(self) -> Invocation:
        """The same call with the arguments as they are now: copied where the op will write to them."""
        return self.mapped(_copy) if self.is_mutable else self

    def widened(self) -> Invocation:
        """The same call in float64, or complex128: tensors and dtypes both."""
        return self.mapped(_widen)

    def with_argument(self, name: str, value: Any) -> Invocation:
        """The same call with another value for one argument: by its schema's name, or numbered as in `tensors`."""
        listed, _, index = name.partition("[")
        if index:
            items = list(dict(self.arguments())[listed])
            items[int(index[:-1])] = value
            return self.with_argument(listed, items)
        names = signature_of(self.op).arguments[: len(self.args)]
        if name in names:
            place = names.index(name)
            return replace(self, args=(*self.args[:place], value, *self.args[place + 1 :]))
        return replace(self, kwargs={**self.kwargs, name: value})

    def refused_fill(self, error: RuntimeError) -> Invocation | None:
        """The call as it would be with an infinity for the number that `error` says does not fit; None for any other.

        Torch rounds a product or a sum that passes the limit to Inf, and refuses to write such a number itself.
        """
        if "without overflow" not in str(error) or not schema_of(self.op).returns:
            return None
        numbers = (
            (name, value) for name, value in self.arguments() if isinstance(value, float) and math.isfinite(value)
        )
        largest = max(numbers, key=lambda item: abs(item[1]), default=None)
        return None if largest is None else self.with_argument(largest[0], math.copysign(math.inf, largest[1]))

    def mapped(self, change: Any) -> Invocation:
        """The same call with `change` made to every value among the arguments."""
        args, kwargs = tree_map(change, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)


def _is_number(tensor: torch.Tensor) -> bool:
    """Tell whether float() can read it: not a complex number, nor one of many under `torch.vmap`."""
    is_one = tensor.dim() == 0 and tensor.device.type == "cpu"
    return is_one and not tensor.is_complex() and not is_wrapped(tensor)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(_widest(value.dtype))
    return _widest(value) if isinstance(value, torch.dtype) else value


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype
