"""`Program`: one op extracted from a run with its tensors, run as it is printed, and sliced as far as it still fails.

Slicing halves the tensors, as long as it fails in the same way: the same kind of value, and fp32 finite if it was.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
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

    def with_values(self, **values: torch.Tensor) -> Program:
        """Return the same op with other values for the leaves of these names."""
        return replace(self, leaves={**self.leaves, **values})

    @property
    def takes_low(self) -> bool:
        """True if autocast's dtype is a parameter of the function."""
        return self.mode == "product" or any(value is self.low for _, value in walk((self.args, self.kwargs)))

    @property
    def text(self) -> str:
        """The function `case` of the leaves, which returns what is checked.

        Raises:
            NanDoctorError: an argument cannot be written as a literal.
        """
        low = ["*", f"low={self.low}"] if self.takes_low else []
        head = f"def case({', '.join([*self.leaves, *low])}):"
        if self.gradient is None:
            return f"{head}\n{INDENT}return {self._call()}"
        leaves, incoming = ", ".join(self.trained), f"{self.gradient}.to(made.dtype)"
        lines = (
            *(f"{name} = {name}.detach().requires_grad_()" for name in self.trained),
            f"made = {self._call()}",
            f"gradients = torch.autograd.grad(made, [{leaves}], {incoming}, allow_unused=True)",
            "return torch.cat([g.flatten().float() for g in gradients if g is not None])",
        )
        return f"\n{INDENT}".join([head, *lines])

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
    raise no_script(f"The op takes a {type(value).__name__}, which cannot be written as a literal.")


def no_script(why: str) -> NanDoctorError:
    """Return the error for a failure that no script can show."""
    return NanDoctorError(why, remedy="`nandoctor replay -o report.json` saves what is known about it.")


def write_number(value: Any, dtype: torch.dtype) -> str:
    """Return the fewest digits that give the same number in its format; `inf` and `nan` by their names."""
    if not isinstance(value, float) or not math.isfinite(value):
        return repr(value)
    digits = (repr(float(f"{value:.{count}g}")) for count in range(1, 18))
    return next(text for text in digits if float(torch.tensor(float(text), dtype=dtype)) == value)


_MAX_RUNS = 1500

Dimension = tuple[str, int]
"""A leaf and one of its dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a program fails: the worst kind of value in its results, and whether fp32 without rounding is finite."""

    kind: ValueKind
    finite_in_fp32: bool


def find_failure(program: Program) -> Failure | None:
    """Return how the program fails, None if it is finite."""
    kinds = kinds_of(program.run())
    return Failure(kind=kinds[0], finite_in_fp32=not kinds_of(program.run_in_fp32())) if kinds else None


def shrink(program: Program, failure: Failure) -> Program:
    """Return the program with its tensors sliced as far as `failure` persists, or the number of runs allows."""
    runs, before = itertools.count(), None

    def still_fails(smaller: Program) -> bool:
        try:
            return next(runs) < _MAX_RUNS and find_failure(smaller) == failure
        except Exception:  # mismatched shapes raise any exception of the op
            return False

    while before != (before := sum(leaf.numel() for leaf in program.leaves.values())):
        for slots in [*_groups(program)]:
            if len({program.leaves[name].shape[dim] for name, dim in slots}) == 1:
                program = _narrow(program, slots, still_fails)
    return program


def _narrow(program: Program, slots: tuple[Dimension, ...], still_fails: Callable[[Program], bool]) -> Program:
    """Cut the dimensions `slots` together, at either end: by half while the failure persists, then by less."""
    name, dim = slots[0]
    width = program.leaves[name].shape[dim] // 2
    while width > 0:
        shorter = next(filter(still_fails, _cut(program, slots, width)), None)
        program = program if shorter is None else shorter
        width = width // 2 if shorter is None else min(width, program.leaves[name].shape[dim] // 2)
    return program


def _groups(program: Program) -> Iterator[tuple[Dimension, ...]]:
    """Yield groups of dimensions of equal size, which may have to shrink together: all of them, then each."""
    by_size: dict[int, list[Dimension]] = defaultdict(list)
    for name, leaf in program.leaves.items():
        for dim, size in enumerate(leaf.shape):
            by_size[size].append((name, dim))
    for size, slots in sorted(by_size.items(), reverse=True):
        yield from (tuple(slots), *((slot,) for slot in slots)) if size > 1 else ()


def _cut(program: Program, slots: tuple[Dimension, ...], width: int) -> Iterator[Program]:
    """Yield the program without the first or the last `width` of the dimensions."""
    for start in (width, 0):
        sliced = {name: program.leaves[name] for name, _ in slots}
        for name, dim in slots:
            sliced[name] = sliced[name].narrow(dim, start, sliced[name].shape[dim] - width)
        yield program.with_values(**sliced)
