"""Choose the weights of the step: from a checkpoint, or the state dict of the dump that fits the model.

FSDP2's MixedPrecisionPolicy is repeated: weights, inputs and outputs are cast module by module. A reference run widens
the weights again, and inputs then follow them.
"""

from __future__ import annotations

import copy
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from nandoctor.dumps.classify import is_extra_state, unwrapped_name
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.reader import State, read_weights
from nandoctor.dumps.recorded_format import ModuleCasts, Recorded
from nandoctor.errors import DumpError
from nandoctor.file_memory import cast_to_file
from nandoctor.step.settings import Settings
from nandoctor.text import brief, join_first
from nandoctor.tracing.tensor_stats import all_finite
from nandoctor.trees import tree_map

_MAX_NAMES_COMPARED = 10
_MAX_NAMES_MADE = 2_000_000  # each prefix that is tried renames all weights


def take_weights(dump: Dump, settings: Settings) -> Dump:
    """Return the dump with the weights of `settings.weights`, if given; recorded buffers are kept.

    Raises:
        DumpError: no weights are given and the dump holds none, or the given weights cannot be read.
    """
    if settings.weights is None:
        if dump.holds_weights:
            return dump
        why = "they would have passed the recorder's max_nbytes" if dump.is_recorded else "a batch alone was saved"
        file = brief(str(dump.path), 1000)
        raise DumpError(
            f"{file}: the file holds no state dict: {why}.",
            remedy='Save them with the batch: torch.save({"state_dict": model.state_dict(), ...}, path). Or give the '
            "checkpoint that has them:",
            options=("--weights", "CHECKPOINT"),
        )
    state = read_weights(settings.directory / settings.weights)
    kept = {} if dump.holds_weights else dump.state
    given = brief(str(settings.weights), 1000)
    return replace(
        dump,
        state={**{name: tensor for name, tensor in state.items() if not is_extra_state(name)}, **kept},
        state_name="",
        other_states={},
        layout="plain" if dump.layout == "batch-only" else dump.layout,
        recorded=replace(dump.recorded, checkpoint=None),
        missing=tuple(text for text in dump.missing if not text.startswith("state_dict:")),
        notes=(*dump.notes, f"The weights are those of {given}, which may not be those of the failing step."),
        other_weights=True,
    )


def fit_state(dump: Dump, model: nn.Module) -> Dump:
    """Return the dump with the one of its state dicts that fits the model best, by the model's names.

    In a tie, its own stays.
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    states = {dump.state_name: dump.state, **dump.other_states}
    ways = [(name, *way) for name, state in states.items() for way in _name_as_model(state, own)]
    fits = [_num_fitting(state, own) for *_, state in ways]
    best, renamed, state = ways[fits.index(max(fits))]
    notes = [renamed] if renamed else []
    alike = {name: None for (name, *_), fit in zip(ways, fits, strict=True) if fit == max(fits) and name != best}
    choices = {name: shlex.quote(brief(f"{dump.path}:{name}", 1000)) for name in alike}
    notes += [f"The weights under {name!r} fit as well: try --weights {choice}." for name, choice in choices.items()]
    if best != dump.state_name:
        others = f"those under {dump.state_name!r} do not fit the model as well"
        notes = [f"The weights are those under {best!r}: {others}.", *notes]
    left = {name: state for name, state in states.items() if name != best}
    return replace(dump, state=state, state_name=best, other_states=left, notes=(*dump.notes, *notes))


def num_misfits(dump: Dump, model: nn.Module) -> int:
    """Return how many tensors of a model and of the state dict that fits it best do not fit each other."""
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    state = fit_state(dump, model).state
    return len(own) + len(state) - 2 * _num_fitting(state, own)[0]


def _name_as_model(state: State, own: State) -> Iterator[tuple[str, State]]:
    """Yield the state with the model's names, wrappers aside, and with each prefix added or removed, after a note.

    D-FINE writes its NaN.pth with and without a wrapper's: https://github.com/Peterande/D-FINE/issues/43
    """
    wrapped = {unwrapped_name(name): name for name in own}
    state = {name if name in own else wrapped.get(unwrapped_name(name), name): state[name] for name in state}
    yield "", state
    for prefix in _prefixes(state, own):
        kept = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        dropped = f", {len(state) - len(kept)} other tensors left out" if len(kept) < len(state) else ""
        yield f"The prefix {prefix!r} was taken off the weights' names{dropped}.", kept
    for prefix in _prefixes(own, state):
        named = {prefix + name: tensor for name, tensor in state.items()}
        yield f"The prefix {prefix!r} was put before the weights' names.", named


def _prefixes(longer: State, shorter: State) -> list[str]:
    """Return the prefixes that turn names of `shorter` into names of `longer`, judged by its longest names."""
    names = sorted(shorter, key=len)[-_MAX_NAMES_COMPARED:]
    found = Counter(key[: -len(name)] for key in longer for name in names if key.endswith("." + name))
    most = _MAX_NAMES_MADE // max(len(longer), len(shorter), 1)
    return sorted(prefix for prefix, _ in found.most_common(most))


def _num_fitting(state: State, own: State) -> tuple[int, int]:
    """Return how many of the model's weights have the same shape in a state dict, and how many are in it at all."""
    known = [name for name in own if name in state]
    return sum(not is_lazy(own[name]) and state[name].shape == own[name].shape for name in known), len(known)


def fill_loss(loss: Any, dump: Dump) -> tuple[Any, list[str]]:
    """Return a loss that is a module with its own state from the file, as a center, and a note; if it is all there."""
    own = loss.state_dict() if isinstance(loss, nn.Module) and not dump.is_recorded else {}
    if not own:
        return loss, []
    states = dict(dump.other_states)
    for prefix in _prefixes(dump.arrays, own):
        inside = {name.removeprefix(prefix): item for name, item in dump.arrays.items() if name.startswith(prefix)}
        states[prefix.removesuffix(".")] = inside
    for name, state in states.items():
        if state.keys() == own.keys() and _num_fitting(state, own)[0] == len(own):
            filled = copy.deepcopy(loss)  # the caller's stays as it is
            filled.load_state_dict(state)
            return filled, [f"The loss has the state under {name!r}."]
    return loss, []


def nonfinite_state(dump: Dump) -> Dump:
    """Return the dump with the first of its state dicts that holds non-finite values; if none does, unchanged."""
    for name, state in ((dump.state_name, dump.state), *dump.other_states.items()):
        if not all(map(all_finite, state.values())):
            return replace(dump, state=state, state_name=name)
    return dump


@contextmanager
def registered_state() -> Iterator[set[str]]:
    """Yield the set of names of state registered in this context; empty if a builder returns an existing model."""
    names = set[str]()

    def add(_: object, name: str, __: object) -> None:
        names.add(name)

    with register_module_parameter_registration_hook(add), register_module_buffer_registration_hook(add):
        yield names


def cast_weights(dump: Dump) -> Dump:
    """Return the dump with its weights in the formats that FSDP cast them to; a note names those that overflow."""
    casts = dump.recorded.mixed_precision
    if casts is None:
        return dump
    formats = {name: getattr(torch, dtype) for name, dtype in casts.parameters.items() if name in dump.state}
    cast = {name: cast_to_file(dump.state[name], dtype) for name, dtype in formats.items()}
    lost = [name for name, tensor in cast.items() if all_finite(dump.state[name]) and not all_finite(tensor)]
    notes = [f"FSDP's policy casts these weights to a format that they overflow: {join_first(lost, 3)}."] * bool(lost)
    narrow = sorted({dtype for dtype in casts.gradients.values() if dtype in ("float16", "bfloat16")})
    notes += [
        f"FSDP's policy sums gradients over ranks in {dtype} (reduce_dtype). A replay has one rank's, and "
        "does not repeat that: where they are finite here, try reduce_dtype=torch.float32."
        for dtype in narrow
    ]
    return replace(dump, state={**dump.state, **cast}, notes=(*dump.notes, *notes))


def add_casts(model: nn.Module, recorded: Recorded) -> None:
    """Cast floating-point inputs and outputs of the modules that the recorded policy applied to."""
    casts, parameters = recorded.mixed_precision or ModuleCasts(), dict(model.named_parameters())
    for path, module in model.named_modules():
        if path in casts.inputs:
            cast = _caster(path, casts.inputs[path], casts, parameters)
            module.register_forward_pre_hook(lambda _, *given, cast=cast: cast(given), with_kwargs=True)
        if path in casts.outputs:
            cast = _caster(path, casts.outputs[path], casts, parameters)
            module.register_forward_hook(lambda _, __, output, cast=cast: cast(output))


def _caster(path: str, dtype: str, casts: ModuleCasts, parameters: Mapping[str, nn.Parameter]) -> Callable[[Any], Any]:
    """Return a function that casts a module's values to the recorded format, or to its weights' if that is wider."""
    names = (name for name in casts.parameters if name in parameters and name.startswith(f"{path}." if path else ""))
    weight, recorded = parameters.get(next(names, "")), getattr(torch, dtype)

    def cast_leaf(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point()):
            return leaf
        return leaf.to(recorded if weight is None else torch.promote_types(recorded, weight.dtype))

    return lambda value: tree_map(cast_leaf, value)
