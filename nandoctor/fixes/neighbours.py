"""The neighbours of a failing step: the same code on numbers that are moved a little, or on other numbers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import nn

from nandoctor.changes.running_op import RunningOp, is_tensor
from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.engine.module_state import is_code, state_of
from nandoctor.engine.reproduction import is_flags
from nandoctor.engine.runner import FailingStep
from nandoctor.evidence.edits import Edit, OpSite, SingleEdit
from nandoctor.ops import CASTS, MOVES
from nandoctor.trees import tree_map

Tensors = Mapping[str, torch.Tensor]
Own = Literal["element", "tensor", "all"]
"""What has a factor of its own where numbers are changed."""
Way = tuple[bool, float]
"""Whether each sample is moved towards the next, or along a pattern; and the sign."""
WAYS: tuple[Way, ...] = ((True, 1.0), (True, -1.0), (False, 1.0), (False, -1.0))


def are_numbers(value: torch.Tensor) -> bool:
    """Return True for finite real numbers; zeros and ones are flags, unless they are weights or a number alone."""
    if not is_dense(value) or value.is_complex() or value.dtype is torch.bool or not value.numel():
        return False
    may_be_flags = value.dim() > 0 and not isinstance(value, nn.Parameter)
    return not (may_be_flags and is_flags(value)) and bool(torch.isfinite(value).all())


def forward_beside(step: FailingStep, shifts: Tensors, batch: Tensors) -> Any:
    """Run the forward with moved weights, buffers and attributes; every run puts back the model's state."""
    for _, name, tensor in state_of(step.model):
        if name in shifts.keys() - step.call.batch:
            tensor.data = tensor.data + shifts[name]
    return step.call.forward(batch)


def sides_of(moved: Tensors) -> Iterator[Tensors]:
    """Yield the directions in which tensors are moved, one for each of `WAYS`."""
    if not moved:
        return
    towards = {name: _towards_next(value) for name, value in moved.items()}
    yield towards
    yield {name: -step for name, step in towards.items()}
    # Alike to one side, apart to the other: x / y at 0 / 0 tends to 1 where both are moved alike.
    yield {name: pattern_like(value, _sizes_in(value)) for name, value in moved.items()}
    phased = zip(sorted(moved), count(1), strict=False)
    yield {name: -pattern_like(moved[name], _sizes_in(moved[name]), phase) for name, phase in phased}


def _towards_next(value: torch.Tensor) -> torch.Tensor:
    """Return the step from each sample to the next, of at most the size of its elements."""
    sizes = _sizes_in(value)
    return (value.roll(1, 0) - value if value.dim() else value).clamp(-sizes, sizes)


def _sizes_in(value: torch.Tensor) -> torch.Tensor:
    """Return the elements' magnitudes; that of a zero is the median of the others, at most 1."""
    others = value[value != 0].abs()
    return torch.where(value == 0, min(float(others.median()), 1.0) if others.numel() else 1.0, value.abs())


def pattern_like(value: torch.Tensor, sizes: torch.Tensor, phase: int = 0) -> torch.Tensor:
    """Return a half to the whole of each size, so that a small variance stays positive; zeros move to one side."""
    pattern = _waves(value, phase)
    pattern = (1 + pattern.abs()) / 2 * torch.where(pattern < 0, -1.0, 1.0)
    return torch.where(value == 0, pattern.abs() * sizes, pattern * value)


def _waves(value: torch.Tensor, phase: int = 0) -> torch.Tensor:
    places = torch.linspace(1, 20, value.numel(), dtype=value.dtype, device=value.device)
    return (places + phase).cos().view(value.shape)


def moves_at(sites: Set[OpSite], way: Way, size: float) -> list[Edit]:
    """Return what moves all that is made at these places, in one of `WAYS`."""
    towards, sign = way
    ordered = enumerate(sorted(sites, key=str))
    return [_Move(site=site, by=sign * size, phase=place, towards=towards) for place, site in ordered]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move(SingleEdit):
    """Move what an op makes, but flags; only to look at what is beside it. Each `phase` moves equal numbers apart."""

    site: OpSite
    by: float
    phase: int
    towards: bool

    def works_in_place(self, *, has_out: bool) -> bool:
        return not has_out

    def run(self, op: RunningOp) -> Any:
        return tree_map(partial(self._moved, op=op), op.run())

    def _moved(self, made: Any, op: RunningOp) -> Any:
        if not (is_tensor(made) and made.is_floating_point()):
            return made
        of_flags = any(taken.dtype is torch.bool for _, taken in op.tensors())
        if made.dim() and op.name in MOVES | CASTS and (of_flags or is_flags(made)):
            return made
        value = made.detach().double().nan_to_num(0.0, 0.0, 0.0)
        step = _towards_next(value) if self.towards else pattern_like(value, _sizes_in(value), self.phase)
        return made.add_(self.by * step) if op.is_mutable else made + self.by * step


def forward_elsewhere(step: FailingStep, by: Own, batch: Tensors) -> Any:
    """Run the forward with other weights, buffers, attributes and numbers; every run puts back the model's state."""
    for _, name, tensor in state_of(step.model):
        if are_numbers(tensor) and tensor.is_floating_point():
            tensor.data = times_factor(name, tensor.data, by)
    with ExitStack() as undo:
        for place, numbers in _list_numbers(step.model):
            undo.callback(numbers.update, dict(numbers))
            floats = [name for name, value in numbers.items() if type(value) is float]
            numbers.update({name: numbers[name] * _factor_of(f"{place}.{name}", by) for name in floats})
        hook = step.model.register_forward_pre_hook(lambda _, *given: tree_map(_other_number, given), with_kwargs=True)
        undo.callback(hook.remove)
        return step.call.forward(batch)


def _list_numbers(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """Return the attributes of the user's modules and of their configs, and the dicts among them, each once."""
    found = dict[int, tuple[str, dict[str, Any]]]()
    for path, module in model.named_modules():
        own = {} if type(module).__module__.startswith("torch.") else vars(module)
        for name, held in {"": module, **own}.items() if own else ():
            numbers = held if type(held) is dict else getattr(held, "__dict__", None)
            if isinstance(numbers, dict) and not is_code(held):
                found.setdefault(id(numbers), (f"{path}.{name}", numbers))
    return list(found.values())


def _other_number(given: Any) -> Any:
    return given * _factor_of("", "all") if type(given) is float else given


def times_factor(name: str, value: torch.Tensor, by: Own) -> torch.Tensor:
    """Return a tensor times a factor, of which it, or each of its elements, may have its own."""
    scaled = value * _factor_of(name, by)
    return scaled * (1 + _waves(value) / 2) if by == "element" else scaled


def _factor_of(name: str, by: Own) -> float:
    """Return a factor between 0.2 and 0.8, the same in every process, and for "all" of every name."""
    return 0.2 + 0.6 * zlib.crc32(b"" if by == "all" else name.encode()) / 2**32
