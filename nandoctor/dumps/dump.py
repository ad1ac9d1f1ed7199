"""`Dump`, one saved failing step, and the summary of its contents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nandoctor.dumps.classify import SecondMoment, is_loss, role_of
from nandoctor.dumps.recorded_format import FORMAT, Recorded, code_rows
from nandoctor.dumps.signature import Provenance
from nandoctor.dumps.stored_tensor import StoredTensor
from nandoctor.evidence.dump_summary import NO_TARGET, ArraySummary, DumpSummary, Layout, Role, SavedFlags
from nandoctor.text import brief, brief_list, brief_value, code, dtype_name, number, plural

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """A state dict, the arrays that were saved with it, and the plain values.

    `state` maps parameter and buffer names to tensors on the CPU; `state_name` is its name in the file, "" for the
    file itself; `other_states` are the file's other state dicts by name.
    `arrays` maps names to tensors of at least one dimension, in the order of the file. `scalars` holds numbers,
    strings, booleans, None, flat lists of them, and 0-dim arrays as numbers. Both flatten nested containers to dotted
    names; `tree` keeps the containers, with a `Slot` for each array. `with_grad` names the arrays that required
    gradients. `rng_states` are the states of random generators,
    `moments` the second moments of the optimizer, `idle` all tensors and NaN that no replay takes. `left_out` names
    the rest of the file: other weights, schedules, arrays of text. `recorded` is what a file in the recorder's format
    says of the call and its environment, and `provenance` whether this user's own recorder wrote it; `missing` names
    what it could not hold. If `other_weights`, `state` was read from another file (`notes` say so), and may not be that
    of the failing step.
    """

    path: Path
    nbytes: int
    layout: Layout
    state: Mapping[str, torch.Tensor]
    arrays: Mapping[str, torch.Tensor]
    with_grad: frozenset[str] = frozenset()
    scalars: Mapping[str, Any] = field(default_factory=dict)
    rng_states: tuple[torch.Tensor, ...] = ()
    moments: tuple[SecondMoment, ...] = ()
    idle: Mapping[str, Any] = field(default_factory=dict)
    state_name: str = ""
    other_states: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    tree: Any = None
    recorded: Recorded = field(default_factory=Recorded)
    provenance: Provenance = field(default_factory=Provenance)
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    other_weights: bool = False

    def __repr__(self) -> str:
        weights, arrays = plural(len(self.state), "weight"), brief_list(list(self.arrays)) or "no arrays"
        return f"Dump({brief(str(self.path), 1000)}: {weights}; {arrays})"

    @property
    def is_recorded(self) -> bool:
        """True if the recorder wrote it, or anyone in its format."""
        return self.layout == FORMAT

    @property
    def holds_weights(self) -> bool:
        """False if the weights did not fit into the file, or were never saved; True for a model without weights."""
        return self.layout != "batch-only" and self.recorded.checkpoint is None

    @property
    def losses(self) -> dict[str, float]:
        """The saved numbers with the name of a loss."""
        return {name: value for name, value in self.scalars.items() if isinstance(value, float) and is_loss(name)}

    @property
    def saved_flags(self) -> SavedFlags:
        """What went wrong according to the recorder; for any other file, a non-finite loss, and unsound numbers."""
        if not self.is_recorded:
            losses = self.losses
            unsound = {
                name: value for name, value in self.scalars.items() if name not in losses and _is_unsound(name, value)
            }
            told = {name: number(value) if _is_sound(value) else "NaN" for name, value in unsound.items()}
            numbers = [f"{code(name)} is {value}" for name, value in told.items()]
            return SavedFlags(loss=next(filter(_is_nonfinite, losses.values()), None), numbers=tuple(numbers))
        loss, reason = self.scalars.get("loss"), self.scalars.get("reason")
        counts = {name: value for name, value in self.scalars.items() if type(value) is int}
        return SavedFlags(
            loss=loss if _is_nonfinite(loss) else None,
            gradients=reason in ("gradients", "skipped"),
            here=reason != "loss" or self.scalars.get("nonfinite_here") is not False,
            rank=counts.get("rank", 0),
            num_ranks=counts.get("world_size", 1),
        )

    @property
    def loss_scale(self) -> float | None:
        """The saved loss scale, a plain number or in GradScaler's state; None without a positive finite one."""
        saved = [value for name, value in self.scalars.items() if name.rpartition(".")[2] in ("scale", "loss_scale")]
        scale = float(saved[0]) if saved and isinstance(saved[0], (int, float)) else math.nan
        return scale if math.isfinite(scale) and scale > 0 else None

    @property
    def has_first_scale(self) -> bool:
        """True if the loss scale is the first of torch's GradScaler, and no update is known that it fitted."""
        return self.loss_scale == _FIRST_SCALE and not self.scalars_by_last_name.get("_growth_tracker")

    @property
    def scalars_by_last_name(self) -> dict[str, Any]:
        """The scalars by the last part of their dotted names; the first, if several have the same one."""
        return {name.rpartition(".")[2]: value for name, value in reversed(list(self.scalars.items()))}

    @property
    def step(self) -> int | None:
        """The saved step of the training, under one of the names that the recorder and most scripts use."""
        scalars, names = self.scalars_by_last_name, ("step", "global_step", "iteration", "iter")
        return next((scalars[name] for name in names if type(scalars.get(name)) is int), None)

    def list_broken(self) -> list[str]:
        """Return what is NaN or Inf besides the arrays, the weights and the numbers: other states, the optimizer's.

        An infinity is often the start of a search for the best loss, or a mask that both states hold.
        """
        states = {
            name: [tensor for key, tensor in state.items() if key not in self.state or _is_sound(self.state[key])]
            for name, state in self.other_states.items()
        }
        return [name for name, it in chain(states.items(), self.idle.items()) if _is_nonfinite(it) or not _is_sound(it)]


def _is_sound(value: Any) -> bool:
    """Return False for a tensor with NaN or Inf, and for NaN among numbers."""
    if isinstance(value, list):
        return all(map(_is_sound, value))
    if isinstance(value, float):
        return not math.isnan(value)
    return not hasattr(value, "shape") or not any(_count_nonfinite(value))


def _is_unsound(name: str, value: Any) -> bool:
    """Return True for NaN, an infinite rate, and a loss scale of 0 or Inf, by which gradients cannot be divided."""
    last = name.rpartition(".")[2]
    is_useless = last in _SCALE_NAMES and (value == 0 or _is_nonfinite(value))
    return is_useless or (last == "lr" and _is_nonfinite(value)) or not _is_sound(value)


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


_BUFFER_NAMES = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_FIRST_SCALE = 65536.0
_SCALE_NAMES = frozenset({"scale", "loss_scale", "grad_scale", "scaler"})


def summarize(dump: Dump) -> DumpSummary:
    """Summarise the dump, with exact counts of NaN and infinities, in one pass over each finite tensor."""
    arrays = [_summarize(name, tensor, role_of(name)) for name, tensor in dump.arrays.items()]
    if not any(entry.role == "output" for entry in arrays):  # non-finite ones of unknown role caused the dump
        for place, entry in enumerate(arrays):
            if entry.role == "unknown" and entry.num_bad:
                arrays[place] = replace(entry, role="output")
    weights = [_summarize(name, tensor, None) for name, tensor in dump.state.items()]
    nonfinite = [entry for entry in weights if entry.num_bad]
    bad_buffers = tuple(entry for entry in nonfinite if is_buffer(entry.name))
    return DumpSummary(
        path=brief(str(dump.path), 1000),
        nbytes=dump.nbytes,
        layout=dump.layout,
        num_weights=len(dump.state),
        num_parameters=sum(tensor.numel() for name, tensor in dump.state.items() if not is_buffer(name)),
        arrays=tuple(arrays),
        scalars=tuple((name, brief_value(value)) for name, value in dump.scalars.items()),
        bad_weights=tuple(entry for entry in nonfinite if not is_buffer(entry.name)),
        bad_buffers=bad_buffers,
        missing=tuple(_missing(dump, arrays, bad_buffers)),
        notes=tuple(_notes(dump)),
    )


def is_buffer(name: str) -> bool:
    """Return True for the name of a buffer that a normalisation layer updates in its forward."""
    return name.rpartition(".")[2] in _BUFFER_NAMES


def _summarize(name: str, tensor: torch.Tensor, role: Role | None) -> ArraySummary:
    num_nan, num_posinf, num_neginf = _count_nonfinite(tensor)
    return ArraySummary(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        role=role,
        num_nan=num_nan,
        num_posinf=num_posinf,
        num_neginf=num_neginf,
    )


def _count_nonfinite(tensor: torch.Tensor | StoredTensor) -> tuple[int, int, int]:
    if isinstance(tensor, StoredTensor):
        return tensor.count_nonfinite()
    from nandoctor.dumps.tensors import count_nonfinite

    return count_nonfinite(tensor)


def _missing(dump: Dump, arrays: Sequence[ArraySummary], bad_buffers: tuple[ArraySummary, ...]) -> Iterator[str]:
    """Yield what the file lacks for a full replay, the gravest first; a file of weights alone lacks only its batch."""
    if not dump.holds_weights:
        yield "No weights: a replay takes them from a checkpoint, with --weights PATH."
    yield from (f"The recorder could not keep {text}." for text in dump.missing)
    if dump.is_recorded:
        return
    roles = {entry.role for entry in arrays}
    if not roles & {"input", "unknown"}:
        yield "No input: the weights can be examined, not replayed. Next time add the batch: 'image': image.cpu()."
    if bad_buffers:
        yield (
            "The buffers are non-finite, most likely because they were saved after the failing forward, which writes "
            "them. Next time copy model.buffers() before the forward and save the copies."
        )
    if not arrays:
        return
    if not roles & {"output", "unknown"}:  # output and target may have any name
        yield "No output: a replay cannot be checked against it. Next time add 'logit': output.detach().cpu()."
    if not roles & {"target", "unknown"}:
        yield NO_TARGET
    if not dump.rng_states:
        yield (
            "No random state: where the model draws numbers, as dropout does, a replay draws others. Next time add "
            "'rng_state': torch.get_rng_state() (torch.cuda.get_rng_state() on a GPU), taken before the forward."
        )
    if not any(name.rpartition(".")[2] in _SCALE_NAMES for name in dump.scalars):
        yield (
            "No loss scale: if a GradScaler was on, gradients are not replayed at its scale. Next time add 'scaler': "
            "scaler.state_dict()."
        )


def _notes(dump: Dump) -> Iterator[str]:
    if dump.is_recorded:
        # What a replay would import and call, whether it asks first, and the state of autocast.
        if dump.provenance.own:
            yield "Your own recorder wrote it, so a replay runs the code that it names."
        else:
            stranger = f"It was not recorded by you ({dump.provenance.detail})"
            yield f"{stranger}: a replay asks before it runs the code that it names."
        yield from (f"{label}: {text}" for label, text in code_rows(dump.recorded))
        if (autocast := dump.recorded.autocast) is not None:
            lists = ", with CUDA's op lists" if autocast.emulated else ""
            under = f"in {autocast.dtype} on {autocast.device}{lists}"
            yield f"Autocast was {brief(under if autocast.enabled else f'off, on {autocast.device}')}."
    if dump.state_name not in ("", "state_dict"):
        yield f"The weights are those under {dump.state_name!r}."
    for name, state in dump.other_states.items():
        if nonfinite := [key for key, tensor in state.items() if any(_count_nonfinite(tensor))]:
            yield f"There are also non-finite weights under {name!r}: {brief_list(nonfinite)}."
    if dump.left_out:
        yield f"Not read: {brief_list(dump.left_out)}."
