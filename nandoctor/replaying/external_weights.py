"""Weights from a checkpoint beside the dump, and whether they are those of the step that failed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from nandoctor.dumps.array_roles import is_extra_state
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.recorded_format import WeightSample
from nandoctor.dumps.weights import State, read_weights, sample_weights
from nandoctor.errors import DumpError
from nandoctor.file_memory import cast_to_file
from nandoctor.replaying.model_loading import fit_prefix
from nandoctor.replaying.settings import Settings
from nandoctor.text import brief, dtype_name, number, plural


def take_weights(dump: Dump, settings: Settings) -> Dump:
    """The dump with the weights of `settings.weights`, if given; what the recorder kept of buffers stays.

    Raises:
        DumpError: no weights are given and the dump holds none, or those that are given cannot be read.
    """
    if settings.weights is None:
        if not dump.holds_weights:
            raise _missing_weights(dump)
        return dump
    path = settings.directory / settings.weights
    known, kept = _known_samples(dump), {} if dump.holds_weights else dump.state
    state = {name: tensor for name, tensor in read_weights(path).items() if not is_extra_state(name)}
    state = dict(fit_prefix(state, {name: sample.values for name, sample in known.items()})[0]) if known else state
    match = _compare(state, known)
    state = {name: _in_format(tensor, known.get(name)) for name, tensor in state.items()}
    return replace(
        dump,
        state={**state, **kept},
        state_name="",
        other_states={},
        prefix="",
        layout="plain" if dump.layout == "batch-only" else dump.layout,
        recorded=None if dump.recorded is None else replace(dump.recorded, checkpoint=None),
        missing=tuple(text for text in dump.missing if not text.startswith("state_dict:")),
        notes=(*dump.notes, _describe_match(match, brief(str(settings.weights), 1000))),
        other_weights=match.num_other > 0 or match.rounded_to != "" or not match.num_compared,
    )


def _missing_weights(dump: Dump) -> DumpError:
    recorded = dump.recorded
    path = recorded.checkpoint.path if recorded is not None and recorded.checkpoint is not None else ""
    why = "they would have passed the recorder's max_nbytes" if recorded is not None else "a batch alone was saved"
    file, checkpoint = shlex.quote(brief(str(dump.path), 1000)), shlex.quote(path) if path else "CHECKPOINT"
    command = f"nandoctor replay {file} --weights {checkpoint}"
    return DumpError(
        f"{brief(str(dump.path), 1000)}: the file holds no state dict: {why}.",
        remedy=f"Give the checkpoint that has the weights: {command}. Or save them with the batch: "
        'torch.save({"state_dict": model.state_dict(), ...}, path).',
    )


def _known_samples(dump: Dump) -> Mapping[str, WeightSample]:
    """What the dump has of its own weights."""
    if dump.recorded is not None and dump.recorded.checkpoint is not None:
        return dump.recorded.checkpoint.samples
    return sample_weights(dump.state)


def _in_format(tensor: torch.Tensor, sample: WeightSample | None) -> torch.Tensor:
    """The weight in the format that the training had it in, which a checkpoint may have widened."""
    if sample is None or sample.values.dtype == tensor.dtype or not tensor.is_floating_point():
        return tensor
    return cast_to_file(tensor, sample.values.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Match:
    """How many weights were compared, how many are others, and how far the values are apart.

    `rounded_to` is the format that the checkpoint has rounded the very values to, "" where it has not. `distance` is
    ||checkpoint - dump|| / ||dump|| over all values that the dump has; inf where that is not a number.
    """

    num_compared: int = 0
    num_other: int = 0
    rounded_to: str = ""
    distance: float = 0.0


def _compare(state: State, known: Mapping[str, WeightSample]) -> _Match:
    num_compared, num_other, rounded_to, off, size = 0, 0, "", 0.0, 0.0
    for name, sample in known.items():
        values = _take(state[name], sample.at) if name in state else None
        if values is None or not sample.at.numel():
            continue
        num_compared += 1
        values, saved, rounded = _alike(values, sample.values)
        rounded_to = rounded or rounded_to
        num_other += not bool(((values == saved) | (values.isnan() & saved.isnan())).all())
        off += float((values - saved).abs().square().sum())
        size += float(saved.abs().square().sum())
    distance = (off / size) ** 0.5 if 0 < size < float("inf") and off < float("inf") else float("inf")
    return _Match(num_compared=num_compared, num_other=num_other, rounded_to=rounded_to, distance=distance)


def _take(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor | None:
    """The values at these places; None where there are none of them."""
    if tensor.layout is not torch.strided or not at.numel():
        return None
    if int(at.min()) < 0 or int(at.max()) >= tensor.numel():
        return None
    return tensor[torch.unravel_index(at, tensor.shape)] if tensor.dim() else tensor.reshape(1)


def _alike(found: torch.Tensor, saved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Both in the coarser of their formats, to be compared, and the name of that where it is the checkpoint's."""
    exact = torch.complex128 if found.is_complex() else torch.float64
    if found.dtype == saved.dtype or not (found.is_floating_point() and saved.is_floating_point()):
        return found.to(exact), saved.to(exact), ""
    if found.element_size() > saved.element_size():
        return found.to(saved.dtype).to(exact), saved.to(exact), ""
    return found.to(exact), saved.to(found.dtype).to(exact), dtype_name(found.dtype)


def _describe_match(match: _Match, path: str) -> str:
    if not match.num_compared:
        return f"The weights are those of {path}; the dump has none to compare them with."
    if not match.num_other:
        rounded = f", rounded to {match.rounded_to}" if match.rounded_to else ""
        return (
            f"The weights are those of {path}: the values that the dump has of {plural(match.num_compared, 'tensor')} "
            f"are the same there{rounded}."
        )
    far = f", by {number(100 * match.distance)} % in norm" if match.distance < float("inf") else ""
    return (
        f"{path} is not of the failing step: {match.num_other} of {plural(match.num_compared, 'tensor')} that were "
        f"compared differ from the dump's{far}. What is replayed is this batch with those weights."
    )
