"""Read a dump's arrays: the loop's batch, the outputs to compare a replay with, the precisions that they indicate."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from nandoctor.autocast.policy import LOW_DTYPES, Policy
from nandoctor.dumps.classify import role_of
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.packing import fill
from nandoctor.dumps.recorded_format import Autocast
from nandoctor.dumps.tensors import comparable_values
from nandoctor.dumps.trees import Slot, slots
from nandoctor.engine.reproduction import AUTOCAST_NAMES, SavedOutputs, are_round
from nandoctor.errors import DumpError
from nandoctor.evidence.formats import BF16, FORMATS, FP16, FloatFormat
from nandoctor.step.binding import Offer, required_names
from nandoctor.step.calls import names_taken
from nandoctor.step.settings import Settings
from nandoctor.text import brief_list
from nandoctor.tracing.tensor_stats import all_finite, format_of
from nandoctor.trees import walk

_CONTAINERS = (dict, list, tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBatch:
    """Every array of a dump on the replay's device, and the `offer` of those that may go into the model: no outputs.

    `tree` is the training loop's batch, with a `Slot` for each array.
    """

    arrays: Mapping[str, torch.Tensor]
    offer: Offer
    tree: Any
    notes: tuple[str, ...]

    def make(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the batch that the user's loss or call receives."""
        return fill(self.tree, tensors, self.offer.device)


def read_batch(dump: Dump, model: nn.Module, outputs: Collection[str], device: torch.device) -> SavedBatch:
    """Return the batch of a dump on the device.

    A recorder's file has the formats of the training. In any other, float64 is what numpy made of float32, unless the
    model itself has float64 parameters.
    """
    keeps_float64 = dump.is_recorded or any(item.dtype == torch.float64 for item in model.parameters())
    narrowed = [name for name, array in dump.arrays.items() if array.dtype == torch.float64 and not keeps_float64]
    arrays = {
        name: array.to(device, torch.float32 if name in narrowed else array.dtype)
        for name, array in dump.arrays.items()
    }
    inputs = {name: array for name, array in arrays.items() if name not in outputs}
    found = ((place, item, {*slots(item)}) for place, item in walk(dump.tree) if isinstance(item, _CONTAINERS))
    containers = {
        ".".join(map(str, place)): item for place, item, held in found if place and held and held <= inputs.keys()
    }
    return SavedBatch(
        arrays=arrays,
        offer=Offer(values={**dump.scalars, **inputs}, arrays=list(inputs), containers=containers, device=device),
        tree=_batch_of(dump, inputs),
        notes=tuple(
            f"{name} was saved as float64 and passed to the model as float32, its own precision." for name in narrowed
        ),
    )


def _batch_of(dump: Dump, inputs: Collection[str]) -> Any:
    """Return the loop's batch, with a `Slot` for each array.

    A recorder's file holds the batch or, if none was given, the arguments of the calls. In any other it is the
    container of all inputs, `batch` in `{"batch": {...}, "logit": ...}`; without one, everything that was saved.
    """
    if dump.is_recorded:
        arguments = {name.rpartition(".")[2]: Slot(name=name) for name in dump.recorded.inputs}
        return arguments if dump.recorded.batch is None else dump.recorded.batch
    tree = dump.tree if dump.tree is not None else {name: Slot(name=name) for name in dump.arrays}
    first = {name.partition(".")[0] for name in inputs}
    only = tree.get(next(iter(first))) if len(first) == 1 else None
    return only if isinstance(only, _CONTAINERS) else tree


def find_outputs(
    dump: Dump, model: nn.Module, settings: Settings, call: Callable[..., Any] | None, loss: Callable[..., Any] | None
) -> SavedOutputs:
    """Return the saved outputs; arrays that the user's call and loss take or read by name are inputs of those.

    Raises:
        DumpError: the settings name an output that does not exist.
    """
    number = dump.scalars.get(settings.output or "")
    chosen = (str(settings.output), torch.tensor(number, dtype=torch.float64)) if isinstance(number, float) else None
    field = settings.output if chosen is None else None
    if dump.is_recorded and settings.output is None:
        spoilt = dump.recorded.overwritten
        found = [it for it in dump.arrays.items() if it[0].partition(".")[0] == "output" and it[0] not in spoilt]
        # A non-finite one first, then the largest floating-point array.
        found.sort(key=lambda named: (all_finite(named[1]), not named[1].is_floating_point(), -named[1].numel()))
        names = [name for name, _ in found]
    else:
        inputs = (item.rpartition("=")[2] for item in settings.inputs)
        taken = {*required_names(model), *names_taken(loss, dump.arrays), *inputs}
        names = saved_outputs(dump.arrays, field, taken=taken, read=names_read((call, loss), dump.arrays))
    graded = chosen or ((names[0], dump.arrays[names[0]]) if names else _saved_number(dump))
    return SavedOutputs(names=tuple(names), graded=graded, field=field)


def names_read(functions: Collection[Callable[..., Any] | None], arrays: Collection[str]) -> frozenset[str]:
    """Return the arrays whose names, or names within a container, are among the texts in the functions."""
    texts = set[str]()
    waiting = [getattr(it.forward if isinstance(it, nn.Module) else it, "__code__", None) for it in functions]
    for code in waiting:  # it grows meanwhile
        constants = getattr(code, "co_consts", ())
        texts.update(constant for constant in constants if isinstance(constant, str))
        waiting += [constant for constant in constants if isinstance(constant, CodeType)]
    return frozenset(name for name in arrays if name in texts or name.rpartition(".")[2] in texts)


def saved_outputs(
    arrays: Mapping[str, torch.Tensor], key: str | None, *, taken: Collection[str] = (), read: Collection[str] = ()
) -> list[str]:
    """Return the names of the arrays that are saved outputs, the one to compare with first.

    `key` is the user's choice. Otherwise arrays are recognized by name, non-finite ones first, then those that the
    user's functions do not `read`. Failing that, any
    non-finite floating-point array of no known role counts, since a training script saves its dump because of it. An
    array whose name the model has `taken` is no output, nor is one of no known role that is read.

    Raises:
        DumpError: `key` names no array, and there is no saved output that it could be a field of.
    """
    named = [name for name in arrays if role_of(name) == "output" and name not in taken]
    named.sort(key=lambda name: (all_finite(arrays[name]), name in read))
    if key is not None and key in arrays:
        return [key, *(name for name in named if name != key)]
    if named:
        return named
    if key is not None:
        raise DumpError(
            f"The dump has no array {key!r}.",
            remedy=f"--output takes the name of the saved output: {brief_list(arrays) or '(there are no arrays)'}.",
        )
    unknown = (name for name in arrays if role_of(name) == "unknown" and name not in {*taken, *read})
    return [name for name in unknown if not all_finite(arrays[name])]


def _saved_number(dump: Dump) -> tuple[str, torch.Tensor] | None:
    """Return the name and value of a saved scalar output or loss, a non-finite one first; None if there is none."""
    outputs = {name: value for name, value in dump.scalars.items() if isinstance(value, float)}
    outputs = {name: value for name, value in outputs.items() if role_of(name) == "output"} | dump.losses
    named = sorted(outputs.items(), key=lambda item: math.isfinite(item[1]))
    is_known = named and not dump.is_recorded
    return (named[0][0], torch.tensor(named[0][1], dtype=torch.float64)) if is_known else None


_ENOUGH = 8
"""This many distinct values that all fit a format show that they were computed in it."""


def choose_policies(dump: Dump, settings: Settings, saved: torch.Tensor | None = None) -> tuple[Policy, ...]:
    """Return the user's policy, else the recorded one, else those to try, judged by the weights and `saved` output."""
    recorded, told = dump.recorded.autocast, dump.scalars_by_last_name
    if recorded is None and any(told.get(name) is False for name in AUTOCAST_NAMES):
        recorded = Autocast(enabled=False, device="cuda", dtype="float32")
    dtype = weight_dtype(dump.state)
    weights = format_of(dtype) if dtype in LOW_DTYPES else None
    # With fp32 weights, its format is that of the model's own autocast regions until a run shows that it has none.
    without = Policy(name=settings.policy or "cuda", format=weights or FP16, ambient=False)
    if settings.amp_dtype == "none":
        return (without,)
    is_cudas = recorded is None or recorded.device == "cuda" or recorded.emulated
    lists = settings.policy or ("cuda" if is_cudas else "native")
    known = weights or FP16
    if recorded is not None and recorded.enabled and recorded.dtype in ("float16", "bfloat16"):
        known = FORMATS[recorded.dtype]
    if settings.amp_dtype is not None or settings.policy is not None:
        known = FORMATS[settings.amp_dtype] if settings.amp_dtype else known
        ambient = recorded is None or recorded.enabled or settings.amp_dtype is not None
        return (Policy(name=lists, format=known, ambient=ambient),)
    if recorded is not None:
        as_recorded = Policy(name=lists, format=known, ambient=recorded.enabled)
        if recorded.enabled or weights is not None or saved is None or saved.dtype not in LOW_DTYPES:
            return (as_recorded,)
        return as_recorded, Policy(name="cuda", format=FORMATS[str(saved.dtype).removeprefix("torch.")])
    low = weights or (None if saved is None else _computed_in(saved)) or FP16
    autocast = [Policy(name="cuda", format=format_) for format_ in (low, BF16 if low is FP16 else FP16)]
    return (without, *autocast) if dtype is not None else (*autocast, without)


def weight_dtype(state: Mapping[str, torch.Tensor]) -> torch.dtype | None:
    """Return the one format other than fp32 that all weights were saved in; None if there is no such format."""
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point() or tensor.is_complex()}
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= {*LOW_DTYPES, torch.float64} else None


def _computed_in(saved: torch.Tensor) -> FloatFormat | None:
    """Return a saved output's half-precision format, or the one that its fp32 values all fit, as after `.float()`."""
    if saved.dtype in LOW_DTYPES:
        return format_of(saved.dtype)
    if saved.dtype is not torch.float32:
        return None
    values = comparable_values(saved.detach()).flatten()
    values = values[torch.isfinite(values)]
    if torch.unique(values[~are_round(values)]).numel() < _ENOUGH:
        return None
    fitting = (dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(values.to(dtype).float(), values))
    return next(map(format_of, fitting), None)
