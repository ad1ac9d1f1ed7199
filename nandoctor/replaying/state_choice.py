"""Finds the model's own among the state dicts of a file: a generator may lie beside its discriminator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from nandoctor.dumps.classify import strip_wrappers
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.summary import count_nonfinite
from nandoctor.replaying.model_loading import fit_prefix


def fit_state(dump: Dump, model: nn.Module) -> Dump:
    """The dump with the one of its state dicts that fits the model best; where several do alike, with its own."""
    if not dump.other_states:
        return dump
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    beside = {name: strip_wrappers(state)[0] for name, state in dump.other_states.items()}
    states = {dump.state_name: dump.state, **beside}
    num_fitting = {name: _count_fitting(state, own) for name, state in states.items()}
    best = max(states, key=lambda name: num_fitting[name])
    if num_fitting[best] == num_fitting[dump.state_name]:
        return dump
    note = f"The weights are those under {best!r}: those under {dump.state_name!r} do not fit the model as well."
    others = {name: state for name, state in states.items() if name != best}
    return replace(dump, state=states[best], state_name=best, other_states=others, notes=(*dump.notes, note))


def nonfinite_state(dump: Dump) -> Dump:
    """The dump with the first of its state dicts that holds something non-finite; where none does, with its own."""
    for name, state in ((dump.state_name, dump.state), *dump.other_states.items()):
        if any(any(count_nonfinite(tensor)) for tensor in state.values()):
            return replace(dump, state=state, state_name=name)
    return dump


def _count_fitting(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> int:
    """How many weights of the model are in it, of the same shape."""
    fitted, _ = fit_prefix(state, own)
    return sum(name in fitted and fitted[name].shape == tensor.shape for name, tensor in own.items())
