"""`Program`: a few ops cut out of a run, with their tensors in hand, to be run by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

import torch

from nandoctor.torch_compat import tree_leaves, tree_map, tree_tensors

Mode = Literal["plain", "in_fp32", "product", "rounded"]
"""How CUDA's autocast runs an op: as it comes; on operands cast to fp32; as tensor cores do, operands rounded, sums in
fp32, the result rounded once; or in fp32 inside, rounded to the format of the first operand."""

ValueKind = Literal["nan", "+inf", "-inf"]

METHOD = "Tensor."
"""What the name of a method starts with; one that writes to its tensor is given a copy."""

TESTS: dict[ValueKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": torch.isnan,
    "+inf": torch.isposinf,
    "-inf": torch.isneginf,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A leaf, a number or the result of an earlier node, by its name; `item` is the place among several results."""

    name: str
    item: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One op: `function` is the dotted name of what is called, `mode` how autocast runs it. Arguments hold `Ref`s."""

    name: str
    function: str
    mode: Mode
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, values: Mapping[str, Any], own_low: torch.dtype, low: torch.dtype) -> Any:
        """What the op gives on these values, with `low` in the place of the format that autocast computed in."""
        args, kwargs = self._fill(values, own_low, low)
        function = find_function(self.function)
        if self.mode == "plain":
            return function(*args, **kwargs)
        args_in_fp32, kwargs_in_fp32 = cast(self._lift((args, kwargs), low), torch.float32)
        made = function(*args_in_fp32, **kwargs_in_fp32)
        return made if self.mode == "in_fp32" else cast(made, low if self.mode == "product" else args[0].dtype)

    def operands(self, values: Mapping[str, Any], low: torch.dtype) -> list[torch.Tensor]:
        """The tensors that the op takes, those of a product rounded to `low`."""
        return tree_tensors(self._lift(self._fill(values, low, low), low))

    def _fill(self, values: Mapping[str, Any], own_low: torch.dtype, low: torch.dtype) -> Any:
        def fill(value: Any) -> Any:
            if isinstance(value, Ref):
                return values[value.name] if value.item is None else values[value.name][value.item]
            return low if value is own_low else value

        return tree_map(fill, (self.args, dict(self.kwargs)))

    def _lift(self, taken: Any, low: torch.dtype) -> Any:
        return cast(taken, low) if self.mode == "product" else taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Ops in order, the last of which gives the `result`.

    `leaves` are the tensors from outside, `numbers` the constants that may be to blame. With a `gradient`, the name of
    the leaf that came in from behind, what is looked at are the gradients of the leaves `trained`. `low` is what
    autocast computed in.
    """

    nodes: tuple[Node, ...]
    result: Ref
    leaves: Mapping[str, torch.Tensor]
    numbers: Mapping[str, float] = field(default_factory=dict)
    low: torch.dtype
    gradient: str | None = None
    trained: tuple[str, ...] = ()
    random: bool = False

    def run(self) -> tuple[torch.Tensor, ...]:
        """What fails: the result, or the gradients of the leaves."""
        return self._run(self.leaves, self.low)

    def run_in(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The same from the same values in fp32 or float64, with nothing rounded on the way."""
        return self._run({name: cast(leaf, dtype) for name, leaf in self.leaves.items()}, dtype)

    def run_last_exactly(self) -> tuple[torch.Tensor, ...]:
        """The last op in float64, from the operands that it had; for gradients all ops, from the leaves."""
        if self.gradient is not None:
            return self.run_in(torch.float64)
        values = cast(self._run_nodes(self.leaves, self.low), torch.float64)
        return (self._result_in({**values, self.result.name: self.nodes[-1].run(values, self.low, torch.float64)}),)

    def taken_by_last(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the last op takes, or its backward takes: the result and the gradient beside them."""
        values = self._run_nodes(self.leaves, self.low)
        behind = [] if self.gradient is None else [self._result_in(values), self.leaves[self.gradient]]
        return (*self.nodes[-1].operands(values, self.low), *behind)

    @property
    def result_shape(self) -> torch.Size:
        """The shape of what the last op gives, which the gradient has to have."""
        return self._result_in(self._run_nodes(self.leaves, self.low)).shape

    def arguments(self) -> list[Any]:
        """Every value among the arguments of the ops, out of their lists."""
        return tree_leaves([(node.args, dict(node.kwargs)) for node in self.nodes])

    def with_values(self, **values: Any) -> Program:
        """The same ops with other values for leaves or numbers of these names."""
        numbers = {name: values.pop(name, number) for name, number in self.numbers.items()}
        return replace(self, leaves={**self.leaves, **values}, numbers=numbers)

    def _run(self, leaves: Mapping[str, torch.Tensor], low: torch.dtype) -> tuple[torch.Tensor, ...]:
        if self.gradient is None:
            return (self._result_in(self._run_nodes(leaves, low)),)
        tracked = {name: leaves[name].detach().requires_grad_() for name in self.trained}
        with torch.enable_grad():
            made = self._result_in(self._run_nodes({**leaves, **tracked}, low))
        incoming = leaves[self.gradient].to(made.dtype)
        gradients = torch.autograd.grad(made, [*tracked.values()], incoming, allow_unused=True)
        return tuple(gradient for gradient in gradients if gradient is not None)

    def _run_nodes(self, leaves: Mapping[str, torch.Tensor], low: torch.dtype) -> dict[str, Any]:
        """Every value by its name: leaves, numbers, and what the ops give."""
        values: dict[str, Any] = {**leaves, **self.numbers}
        with torch.random.fork_rng(devices=[], enabled=self.random):
            if self.random:
                torch.manual_seed(0)
            for node in self.nodes:
                values[node.name] = node.run(values, self.low, low)
        return values

    def _result_in(self, values: Mapping[str, Any]) -> torch.Tensor:
        made: Any = values[self.result.name]
        result: torch.Tensor = made if self.result.item is None else made[self.result.item]
        return result


def find_function(name: str) -> Callable[..., Any]:
    """The function of that dotted name; one that writes to its first argument gets a copy of it."""
    root: Any = torch
    function: Callable[..., Any] = reduce(getattr, name.removeprefix("torch.").split("."), root)
    if name.startswith(METHOD) and name.endswith("_"):
        return lambda first, *args, **kwargs: function(first.clone(), *args, **kwargs)
    return function


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The value with its floating-point tensors in `dtype`; autocast leaves float64 alone."""
    return tree_map(lambda leaf: leaf.to(dtype) if is_cast(leaf) else leaf, value)


def is_cast(value: Any) -> bool:
    """Tell whether autocast would cast this."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def kinds_of(tensors: tuple[torch.Tensor, ...]) -> tuple[ValueKind, ...]:
    """Which non-finite values there are, the worst first; none where all is finite."""
    parts = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return tuple(kind for kind, test in TESTS.items() if any(bool(test(part).any()) for part in parts))
