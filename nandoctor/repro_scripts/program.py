"""`Program`: one op extracted from a run with its tensors, to run on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import torch

from nandoctor.trees import parts, tree_map, walk

Mode = Literal["plain", "in_fp32", "product", "rounded"]
"""How CUDA's autocast runs an op: unchanged; on operands cast to fp32; as tensor cores do, with operands rounded, sums
in fp32 and the result rounded once; or in fp32 inside, with the result rounded to the format of the first operand."""

ValueKind = Literal["nan", "+inf", "-inf"]

METHOD = "Tensor."
"""The prefix of a method's name; a method that writes to its tensor gets a copy."""

TESTS: dict[ValueKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": torch.isnan,
    "+inf": torch.isposinf,
    "-inf": torch.isneginf,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A leaf among the arguments, by its name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One op: `function` is the dotted name to call, `mode` how autocast runs it. Arguments contain `Ref`s.

    `leaves` are the tensors that it takes; of several results, the one at `item` is checked. With a `gradient`, the
    name of the leaf that is the result's incoming gradient, the gradients of the leaves `trained` are checked instead.
    `low` is autocast's dtype.
    """

    function: str
    mode: Mode
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Mapping[str, torch.Tensor]
    low: torch.dtype
    item: int | None = None
    gradient: str | None = None
    trained: tuple[str, ...] = ()

    def run(self) -> tuple[torch.Tensor, ...]:
        """Return what is checked: the result, or the gradients of the leaves."""
        return self._run(self.leaves, self.low)

    def run_in_fp32(self) -> tuple[torch.Tensor, ...]:
        """Return the same computed in fp32 from the same values, with nothing rounded on the way."""
        return self._run(cast(dict(self.leaves), torch.float32), torch.float32)

    @property
    def result_shape(self) -> torch.Size:
        """The shape of the result, which the gradient has to have."""
        return self._result(self.leaves, self.low).shape

    def arguments(self) -> list[Any]:
        """Return all values among the arguments of the op, in lists as well."""
        given = (self.args, self.kwargs)
        return [value for _, value in walk(given, lambda value: None if isinstance(value, Ref) else parts(value))]

    def with_values(self, **values: torch.Tensor) -> Program:
        """Return the same op with other values for the leaves of these names."""
        return replace(self, leaves={**self.leaves, **values})

    def call(self, leaves: Mapping[str, torch.Tensor], low: torch.dtype) -> Any:
        """Return what the op gives for these leaves, with `low` in place of autocast's own dtype."""

        def fill(value: Any) -> Any:
            if isinstance(value, Ref):
                return leaves[value.name]
            return low if value is self.low else value

        args, kwargs = tree_map(fill, (self.args, dict(self.kwargs)))
        function = find_function(self.function)
        if self.mode == "plain":
            return function(*args, **kwargs)
        taken = cast((args, kwargs), low) if self.mode == "product" else (args, kwargs)
        args_in_fp32, kwargs_in_fp32 = cast(taken, torch.float32)
        made = function(*args_in_fp32, **kwargs_in_fp32)
        return made if self.mode == "in_fp32" else cast(made, low if self.mode == "product" else args[0].dtype)

    def _run(self, leaves: Mapping[str, torch.Tensor], low: torch.dtype) -> tuple[torch.Tensor, ...]:
        if self.gradient is None:
            return (self._result(leaves, low),)
        tracked = {name: leaves[name].detach().requires_grad_() for name in self.trained}
        with torch.enable_grad():
            made = self._result({**leaves, **tracked}, low)
        incoming = leaves[self.gradient].to(made.dtype)
        gradients = torch.autograd.grad(made, [*tracked.values()], incoming, allow_unused=True)
        return tuple(gradient for gradient in gradients if gradient is not None)

    def _result(self, leaves: Mapping[str, torch.Tensor], low: torch.dtype) -> torch.Tensor:
        made = self.call(leaves, low)
        result: torch.Tensor = made if self.item is None else made[self.item]
        return result


def find_function(name: str) -> Callable[..., Any]:
    """Return the function with that dotted name; one that writes to its first argument gets a copy of it."""
    root: Any = torch
    function: Callable[..., Any] = reduce(getattr, name.removeprefix("torch.").split("."), root)
    if name.startswith(METHOD) and name.endswith("_"):
        return lambda first, *args, **kwargs: function(first.clone(), *args, **kwargs)
    return function


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the value with its floating-point tensors in `dtype`, except float64, which autocast leaves as is."""
    return tree_map(lambda leaf: leaf.to(dtype) if is_cast(leaf) else leaf, value)


def is_cast(value: Any) -> bool:
    """Return True if autocast would cast this."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def kinds_of(tensors: tuple[torch.Tensor, ...]) -> tuple[ValueKind, ...]:
    """Return the kinds of non-finite values that occur, the worst first; () if all values are finite."""
    return tuple(kind for kind, test in TESTS.items() if any(bool(test(tensor).any()) for tensor in tensors))
