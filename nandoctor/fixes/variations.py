"""Batches close to the failing one, and a loss if none is known: what a fix has to pass besides the step itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.dumps.tensors import comparable_values
from nandoctor.engine.call import Batch, Call
from nandoctor.engine.module_state import is_large
from nandoctor.engine.reproduction import is_flags
from nandoctor.engine.runner import FailingStep, Watch
from nandoctor.errors import LossError, ModelError
from nandoctor.tracing.tensor_stats import walk_tensors

_NOISE = 1e-3
"""A share of each value: less than the next batch differs by, more than fp16's rounding."""


def surrogate_loss(output: Any, _: Batch) -> torch.Tensor:
    """Return a scalar through which every floating-point value of the output gets a gradient of its own.

    It stands in for a training loss that is not known: the mean of each tensor, weighted by a fixed pattern so that a
    softmax or a norm, whose plain mean is constant, has a gradient too.
    """
    total = torch.zeros(())
    for _path, leaf in walk_tensors(output):
        if leaf.is_floating_point() and leaf.numel() and not leaf.is_nested and leaf.layout == torch.strided:
            pattern = torch.linspace(-1, 1, leaf.numel(), device=leaf.device).cos().view(leaf.shape)
            total = total.to(leaf.device) + (leaf.float() * pattern).mean()
    return total


def _in_another_order(call: Call) -> Call | None:
    if not all(map(is_dense, call.taken.values())):
        return None  # a sparse array has no samples to move
    moved = {name: value.roll(1, 0) for name, value in call.batch.items() if is_dense(value) and value.dim()}
    return replace(call, batch={**call.batch, **moved})


def _noisy(call: Call) -> Call | None:
    """Change every value by a share of itself, so that the zeros of a mask stay zeros."""

    def change(value: torch.Tensor) -> torch.Tensor:
        return value * (1 + _NOISE * torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value))

    return _changed(call, call.used, change)


def scaled(call: Call, names: frozenset[str], factor: float) -> Call | None:
    """Multiply the named arrays' real numbers by a factor, but not flags of 0 and 1; None if there is nothing else."""
    dense = {name: call.batch[name] for name in names & call.batch.keys() if is_dense(call.batch[name])}
    measured = frozenset(name for name, value in dense.items() if not is_flags(value))
    return _changed(call, measured, lambda value: value * factor)


def _changed(call: Call, names: frozenset[str], change: Callable[[torch.Tensor], torch.Tensor]) -> Call | None:
    """Return the call with the named arrays of real numbers changed; None if there are none."""
    dense = {name: value for name, value in call.batch.items() if name in names and is_dense(value)}
    numbers = {name: value for name, value in dense.items() if value.is_floating_point()}
    changed = {name: change(comparable_values(value)).to(value.dtype) for name, value in numbers.items()}
    return replace(call, batch={**call.batch, **changed}) if changed else None


VARIATIONS: Mapping[str, Callable[[Call], Call | None]] = {
    "samples in another order": _in_another_order,
    "small noise on the inputs": _noisy,
    "inputs halved": lambda call: scaled(call, call.used, 0.5),
    "inputs doubled": lambda call: scaled(call, call.used, 2.0),
}
"""By name, functions that return a call for which a fix has to work as well, or None if this one has no such one."""
OTHER_SEED = "other seed"
NEARLY_THE_SAME = ("samples in another order", "small noise on the inputs", OTHER_SEED)
"""Those that hardly change the values; they are combined in one run, and with each of the others."""
SCALED = ("inputs halved", "inputs doubled")


def extreme_samples(samples: Sequence[int], call: Call) -> tuple[int, ...]:
    """Return which of `samples` has the largest magnitude in its inputs, then which has the smallest."""
    size = call.batch_size or 0
    arrays = [array for array in call.taken.values() if is_dense(array) and array.dim() and len(array) == size]
    largest = torch.zeros(size, dtype=torch.float64)
    for array in arrays:
        if array.is_floating_point() and array.numel():
            magnitudes = array.detach().double().nan_to_num().abs().reshape(size, -1).amax(1).cpu()
            largest = torch.maximum(largest, magnitudes)
    ordered = sorted(samples, key=lambda sample: -float(largest[sample]))
    return tuple(dict.fromkeys((*ordered[:1], *ordered[-1:])))


_MOST_OUTPUTS = 4
_SCALE = 2.0**-10
"""So small that a gradient is finite if only its size made it non-finite."""


def with_doubtful_loss(step: FailingStep) -> FailingStep | None:
    """Return the step with a made-up loss if its gradients are non-finite; None too for a large model, to save memory.

    The step is one in training whose forward is finite, and whose loss is not known.
    """
    is_trained = step.mode.training and any(parameter.requires_grad for parameter in step.model.parameters())
    if not is_trained or is_large(step.model):
        return None
    stand_in = replace(step, loss=surrogate_loss, mode=replace(step.mode, loss_scale=_SCALE))
    return stand_in if _fails(stand_in) else None


def fails_with_any_loss(step: FailingStep) -> bool:
    """Return True if a gradient of 0 for any one tensor of the output makes others NaN: then that of any loss does.

    Torch multiplies a gradient by derivatives alone, and 0 times a number is 0: one of them is infinite.
    """
    made = step.run(watch=Watch(stage="backward", statistics="none", backward=True)).output
    places = [place for place, (_, leaf) in enumerate(walk_tensors(made)) if leaf.requires_grad]
    return 0 < len(places) <= _MOST_OUTPUTS and all(
        _fails(replace(step, loss=partial(_zero_loss, place=place))) for place in places
    )


def _zero_loss(output: Any, _: Batch, *, place: int) -> torch.Tensor:
    """Return 0, with a gradient of 0 for one tensor of the output."""
    return ([*walk_tensors(output)][place][1].float() * 0).sum()


def _fails(step: FailingStep) -> bool:
    with suppress(LossError, ModelError):  # the output depends on no weight, or this device has no backward for it
        return bool(step.run(watch=Watch(stage="backward", statistics="none", backward=True)).trace.bad_gradients)
    return False
