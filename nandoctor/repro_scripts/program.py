"""`Program`: one op extracted from a run with its tensors, as the text of a function that is run as it is printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from nandoctor.errors import NanDoctorError
from nandoctor.trees import walk

Mode = Literal["plain", "in_fp32", "product", "rounded"]
"""How CUDA's autocast runs an op: unchanged; on operands cast to fp32; as tensor cores do, with operands rounded, sums
in fp32 and the result rounded once; or in fp32 inside, with the result rounded to the format of the first operand."""

ValueKind = Literal["nan", "+inf", "-inf"]

INDENT = "    "
METHOD = "Tensor."
"""The prefix of a method's name; a method that writes to its tensor gets a copy."""

TESTS: dict[ValueKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": torch.isnan,
    "+inf": torch.isposinf,
    "-inf": torch.isneginf,
}


class Ref(str):
    """A leaf among the arguments, by its name."""

    __slots__ = ()


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

    def run(self) -> torch.Tensor:
        """Return what is checked: the result, or the gradients of the leaves, joined."""
        return _function_of(self.text)(*self.leaves.values())

    def run_in_fp32(self) -> torch.Tensor:
        """Return the same computed in fp32 from the same values, with nothing rounded on the way."""
        wide = [leaf.float() if is_cast(leaf) else leaf for leaf in self.leaves.values()]
        return _function_of(self.text)(*wide, **({"low": torch.float32} if self.takes_low else {}))

    def result(self) -> torch.Tensor:
        """Return the result, even if its gradients are checked."""
        return replace(self, gradient=None).run()

    def arguments(self) -> list[Any]:
        """Return all values among the arguments of the op, in lists as well."""
        return [value for _, value in walk((self.args, self.kwargs))]

    def with_values(self, **values: torch.Tensor) -> Program:
        """Return the same op with other values for the leaves of these names."""
        return replace(self, leaves={**self.leaves, **values})

    @property
    def takes_low(self) -> bool:
        """True if autocast's dtype is a parameter of the function."""
        return self.mode == "product" or any(value is self.low for value in self.arguments())

    @property
    def text(self) -> str:
        """The function `case` of the leaves, which returns what is checked.

        Raises:
            NanDoctorError: an argument cannot be written as a literal.
        """
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        low = ["*", f"low={self.low}"] if self.takes_low else []
        yield f"def case({', '.join([*self.leaves, *low])}):"
        if self.gradient is None:
            yield f"{INDENT}return {self._call()}"
            return
        for name in self.trained:
            yield f"{INDENT}{name} = {name}.detach().requires_grad_()"
        yield f"{INDENT}made = {self._call()}"
        leaves, incoming = ", ".join(self.trained), f"{self.gradient}.to(made.dtype)"
        yield f"{INDENT}gradients = torch.autograd.grad(made, [{leaves}], {incoming}, allow_unused=True)"
        yield f"{INDENT}return torch.cat([g.flatten().float() for g in gradients if g is not None])"

    def _call(self) -> str:
        """Return an expression for what the op gives, with the casts that autocast makes."""
        arguments = [self._argument(value) for value in self.args]
        arguments += [f"{name}={self._argument(value)}" for name, value in self.kwargs.items()]
        if self.function.startswith(METHOD):
            first, *others = arguments
            copy = ".clone()" if self.function.endswith("_") else ""
            made = f"{first}{copy}.{self.function.removeprefix(METHOD)}({', '.join(others)})"
        else:
            made = f"{self.function}({', '.join(arguments)})"
        item = "" if self.item is None else f"[{self.item}]"
        own = f".to({self.args[0]}.dtype)" if self.args and isinstance(self.args[0], Ref) else ""
        return made + item + {"product": ".to(low)", "rounded": own}.get(self.mode, "")

    def _argument(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._argument, value))}]"
        if not isinstance(value, Ref):
            return "low" if value is self.low else _write_value(value)
        cast = {"plain": "", "product": ".to(low).float()"}.get(self.mode, ".float()")
        return value + cast if is_cast(self.leaves[value]) else value


@lru_cache
def _function_of(text: str) -> Callable[..., torch.Tensor]:
    names: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
    exec(text, names)
    function: Callable[..., torch.Tensor] = torch.enable_grad()(names["case"])
    return function


def is_cast(leaf: torch.Tensor) -> bool:
    """Return True if autocast would cast this; float64 stays as it is."""
    return leaf.is_floating_point() and leaf.dtype != torch.float64


def kinds_of(values: torch.Tensor) -> tuple[ValueKind, ...]:
    """Return the kinds of non-finite values that occur, the worst first; () if all values are finite."""
    return tuple(kind for kind, test in TESTS.items() if bool(test(values).any()))


def _write_value(value: Any) -> str:
    """Return an expression for a plain argument of an op."""
    if isinstance(value, float):
        return write_number(value, torch.float64)
    if isinstance(value, torch.device):
        return "torch.get_default_device()"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise NanDoctorError(
        f"The op takes a {type(value).__name__}, which cannot be written as a literal.",
        remedy="`nandoctor replay -o report.json` saves what is known about the op.",
    )


def write_number(value: Any, dtype: torch.dtype) -> str:
    """Return the fewest digits that give the same number in its format; `inf` and `nan` by their names."""
    if not isinstance(value, float) or not math.isfinite(value):
        return repr(value)
    digits = (repr(float(f"{value:.{count}g}")) for count in range(1, 18))
    return next(text for text in digits if float(torch.tensor(float(text), dtype=dtype)) == value)
