"""Compares two runs of one step: what is finite in both, how far values and gradients differ, and in what direction."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import hardshrink

from nandoctor.dumps.stored_tensor import is_dense
from nandoctor.engine.runner import Outcome
from nandoctor.evidence.formats import EDGE, FP16
from nandoctor.tracing.tensor_stats import all_finite, numbers_in, walk_tensors

TOLERANCE = 0.01
"""The largest accepted difference between a fixed run's output and fp32's, in every sample, as a share of the sample's
largest magnitude. In bf16, twice the error of the samples that are finite in the unchanged step is accepted.

fp16 rounds to 5e-4 and a deep network loses a few bits more; a changed computation is off by more than that. If a model
magnifies rounding further, or a sample is small because large terms cancel, fp32 is off float64 as well: its error
there, in fp16's coarser units, is accepted too."""
NOISE = 4 * 2.0 ** (24 - 11)
"""The ratio of fp16's rounding error (11 bits) to fp32's (24 bits), times 4 because individual errors vary."""
MOST_NOISE = 0.03
"""The limit of what is accepted as noise, as a share of the largest magnitude in the whole tensor."""
BF16_TOLERANCE = 8 * TOLERANCE
"""The limit of what is accepted for the error of bf16, which has 3 bits fewer than fp16, without the failure."""
FP32_ERROR = 10 * TOLERANCE
"""The largest error of fp32 against float64 with which fp32 can still serve as the reference for a fix."""
_SMALLEST_SHARE = 1e-3
_LARGEST_FP32 = torch.finfo(torch.float32).max
LARGEST_SQUARED = math.sqrt(_LARGEST_FP32)
"""The largest magnitude whose square fp32 holds: a squared error, gradient clipping and Adam compute the square."""
_SMALLEST_NORM = 1e-15
"""Below it the squares of fp32 numbers underflow."""
_PIECE = 1 << 16
_SIGNIFICANT = 0.01
"""A gradient's elements below this share of its largest have a sign that rounding may decide."""
LEAST, LEAST_IN_FP32 = 1e-4, 1e-6
"""The same share for a whole weight's gradient, of the largest of all weights: in a half format, and of two in fp32."""
_REVERSED = 0.1
"""The share of a gradient, by magnitude, that may have the other sign."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The values and gradients of a run, without its graph; `ran` is False if it could not be run, or raised.

    `meant` marks infinities in the output that the code intends, such as a mask's. `kept` names the model's state that
    the run left non-finite: True for NaN or +Inf, False for -Inf alone, which may be a mask. A large model's gradients
    are gigabytes, so they are checked only once; `looked_at`: the run has found them finite. `left` is the state that
    the run leaves, `flags` what is a flag, count or index in its output, by names that no state has. `may_hide` is
    False if no op of the run made NaN or +Inf, and none is in its batch.
    """

    values: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    ran: bool
    meant: Mapping[str, torch.Tensor] = field(default_factory=dict)
    looked_at: bool = False
    kept: Mapping[str, bool] = field(default_factory=dict)
    left: Mapping[str, torch.Tensor] = field(default_factory=dict)
    flags: Mapping[str, torch.Tensor] = field(default_factory=dict)
    may_hide: bool = True

    @property
    def finite(self) -> bool:
        """True if all values and gradients are finite."""
        return self.values_finite and self.gradients_finite

    @cached_property
    def values_finite(self) -> bool:
        """True if the output and the loss are finite."""
        return self.ran and all(map(self._is_finite, self.values))

    def _is_finite(self, name: str) -> bool:
        """Return True if a value is finite except for intended infinities."""
        value, meant = self.values[name], self.meant.get(name)
        if meant is None or meant.shape != value.shape:
            return all_finite(value)
        return not bool((torch.isnan(value) | (torch.isinf(value) & ~meant)).any())

    @property
    def infinities(self) -> Mapping[str, torch.Tensor]:
        """Masks of the infinities in the output, by name; empty if the output also has a NaN."""
        outputs = {name: value for name, value in self.values.items() if name != "loss"}
        if any(bool(torch.isnan(value).any()) for value in outputs.values()):
            return {}
        found = {name: torch.isinf(value) for name, value in outputs.items()}
        return {name: places for name, places in found.items() if bool(places.any())}

    @cached_property
    def has_nan(self) -> bool:
        """True if the output or the loss has a NaN, which no code intends."""
        return any(bool(torch.isnan(tensor).any()) for tensor in self.values.values())

    @cached_property
    def gradients_finite(self) -> bool:
        """True if every gradient is finite, or there are none."""
        return self.ran and (self.looked_at or all(map(all_finite, self.gradients.values())))

    @cached_property
    def gradient_sizes(self) -> Mapping[str, float]:
        """The largest magnitude in the gradient of each parameter, NaN if it holds one."""
        return {name: _largest_of(gradient) for name, gradient in self.gradients.items()}

    @cached_property
    def gradient_norms(self) -> Mapping[str, float]:
        """The norm of the finite elements in the gradient of each parameter."""
        return {name: _norm_of(gradient) for name, gradient in self.gradients.items()}

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients together."""
        return math.hypot(*self.gradient_norms.values())

    @property
    def largest_finite(self) -> float:
        """The largest finite magnitude in output and loss, 0 if there is none."""
        finite = (value[torch.isfinite(value)] for value in self.values.values())
        return max((float(value.abs().max()) for value in finite if value.numel()), default=0.0)

    @cached_property
    def loss_grain(self) -> float:
        """The rounding unit of a loss of terms as large as the output: one of 1 - p has no correct digit below it.

        The median counts: a mask's -1e9 says nothing about the other elements.
        """
        outputs = [value[torch.isfinite(value)].abs() for name, value in self.values.items() if name != "loss"]
        return torch.finfo(torch.float32).eps * max(
            (float(one.median()) for one in outputs if one.numel()), default=0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Differences:
    """Each sample's largest difference and largest magnitude in one tensor, and the `overall` largest magnitude."""

    largest: torch.Tensor
    magnitude: torch.Tensor
    overall: float

    @property
    def relative(self) -> torch.Tensor:
        """Each sample's largest difference as a share of its largest magnitude."""
        return self.largest / self.magnitude


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One run's values compared with a reference's: whether they are finite wherever those are, and the differences."""

    finite: bool
    values: Mapping[str, _Differences]

    @property
    def max_rel_err(self) -> float:
        """The worst sample's largest difference, relative to its largest magnitude."""
        return max((float(values.relative.max()) for values in self.values.values()), default=0.0)

    def accepted_rel_err(self, tolerance: float) -> float:
        """Return `max_rel_err`, but relative to the whole tensor's largest magnitude where it exceeds the tolerance.

        For differences that rounding explains: a sample of one value near 0 can be off by half of it.
        """
        found = 0.0
        for values in self.values.values():
            own = float(values.relative.max())
            whole = float(values.largest.max()) / (values.overall or 1.0)
            found = max(found, own if own <= tolerance else whole)
        return found

    @property
    def largest_finite_rel_err(self) -> float:
        """The same relative error as `max_rel_err`, over the samples where it is finite."""
        errors = torch.cat([torch.zeros(1), *(values.relative for values in self.values.values())])
        return float(errors[torch.isfinite(errors)].max())

    def agrees(self, *, unsure: Agreement | None = None, tolerance: float = TOLERANCE) -> bool:
        """Return True if rounding alone explains all differences; `unsure` compares fp32 with float64."""
        return all(self.is_honest(name, unsure=unsure, tolerance=tolerance) for name in self.values)

    def is_honest(self, name: str, *, unsure: Agreement | None = None, tolerance: float = TOLERANCE) -> bool:
        """Return True if rounding alone explains the differences in one value; `unsure` compares fp32 with float64."""
        ours = self.values[name]
        allowed = tolerance * ours.magnitude
        other = unsure.values.get(name) if unsure is not None and unsure.finite else None
        if other is not None:
            noise = (NOISE * other.largest).clamp(max=MOST_NOISE * ours.overall)
            allowed = torch.maximum(allowed, noise)
        return bool((ours.largest <= allowed).all())


def keep(outcome: Outcome | None) -> Result:
    """Return the result of a run, or of None if it could not be run; float64 values beyond fp32's range become Inf."""
    if outcome is None:
        return Result(values={}, gradients={}, ran=False)
    others = ((path, it) for path, it in walk_tensors(outcome.output) if is_dense(it) and not it.is_complex())
    return Result(
        values=values_of(outcome.output, outcome.loss),
        gradients={name: _plain(gradient) for name, gradient in (outcome.gradients or {}).items()},
        ran=outcome.trace.raised is None,
        looked_at=not outcome.trace.bad_gradients,
        kept=outcome.kept,
        left=outcome.left,
        flags={f"the output {path}".rstrip(): it for path, it in others if not it.is_floating_point()},
    )


def unlike_state(made: Result, meant: Result, *, counts: bool) -> str | None:
    """Return what a run leaves otherwise than another, where both are finite, or flags otherwise; of `counts` alone."""
    ours, theirs = ({**run.left, **run.flags} for run in (made, meant))
    for name, other in theirs.items():
        one = ours.get(name, torch.zeros(0))
        is_count = not other.dtype.is_floating_point and (not other.dim() or other.dtype is torch.uint8)
        if counts and not is_count:
            continue
        if one.shape != other.shape:
            return name
        known = torch.isfinite(one) & torch.isfinite(other)
        off, size = (float(it[known].double().norm()) for it in (one.double() - other.double(), other))
        if off > (0.0 if is_count else TOLERANCE * size):
            return name
    return None


def unwritten_state(made: Result, meant: Result, before: Mapping[str, torch.Tensor]) -> str | None:
    """Return what a run leaves as it was `before`, and another does not."""
    for name in before.keys() & made.left.keys() & meant.left.keys():
        was, ours, theirs = (values.double() for values in (before[name], made.left[name], meant.left[name]))
        if ours.equal(was) and theirs.shape == was.shape and not theirs.equal(was):
            return name
    return None


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient dense, since torch has no norm and no comparison for it, and a complex one in reals."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def values_of(output: Any, loss: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the numbers of an output and its loss, by their paths."""
    found = ((path, numbers_in(leaf)) for path, leaf in walk_tensors(output))
    values = {f"output.{path}": _in_range(values) for path, values in found if values is not None}
    return values if loss is None else values | {"loss": _in_range(loss.detach())}


def _in_range(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is not torch.float64:
        return tensor
    return torch.where(tensor.abs() > _LARGEST_FP32, tensor.sign() * math.inf, tensor)


def compare_runs(made: Result, reference: Result, *, exact: Result | None = None) -> Agreement:
    """Compare `made` with the reference; given `exact`, differences are counted from the range between the two."""
    finite, values = made.ran and reference.ran, {}
    for name, theirs in reference.values.items():
        ours = made.values.get(name)
        if ours is None or ours.shape != theirs.shape:
            return Agreement(finite=False, values={})
        # Both may be at a format's edge, which code uses for -inf.
        at_edge = (theirs.abs() >= EDGE * _LARGEST_FP32) & (ours.abs() >= EDGE * FP16.max)
        sound = torch.isfinite(theirs) & ~(at_edge & (theirs.sign() == ours.sign()))
        finite = finite and _is_finite_where(sound, ours)
        other = exact.values.get(name) if exact is not None and exact.ran else None
        nearest = theirs if other is None or other.shape != theirs.shape else _nearest_between(ours, theirs, other)
        if theirs.numel():
            values[name] = _differences(ours, nearest, sound, grain=reference.loss_grain if name == "loss" else 0.0)
    return Agreement(finite=finite, values=values)


def _is_finite_where(sound: torch.Tensor, values: torch.Tensor) -> bool:
    return all_finite(values) or not bool((sound & ~torch.isfinite(values)).any())


def gradients_finite(made: Result, reference: Result) -> bool:
    """Return True if every gradient is finite wherever the reference's is."""
    pairs = [(made.gradients[name], reference.gradients[name]) for name in made.gradients.keys() & reference.gradients]
    return made.gradients_finite or (
        made.ran and all(_is_finite_where(torch.isfinite(theirs), ours) for ours, theirs in pairs)
    )


def _largest_of(gradient: torch.Tensor) -> float:
    """Return the largest magnitude in a gradient, NaN if it holds one."""
    ends = torch.aminmax(gradient) if gradient.numel() else ()  # eight times as fast as a norm
    return max((abs(float(end)) for end in ends), default=0.0)


def _norm_of(gradient: torch.Tensor) -> float:
    """Return the norm of the finite elements, in float64 if their squares leave fp32's range."""
    norm = float(torch.linalg.vector_norm(gradient))
    if math.isfinite(norm) and norm > _SMALLEST_NORM:
        return norm
    if gradient.layout is torch.strided and not bool(gradient.any()):  # as often for an embedding
        return 0.0
    return float(torch.nan_to_num(gradient.double(), 0.0, 0.0, 0.0).norm())


def sample_errors(made: Result, reference: Result, num_samples: int | None) -> torch.Tensor | None:
    """Return each sample's largest relative difference over the outputs whose dimension 0 is the batch.

    None if there is no such output.
    """
    differences = compare_runs(made, reference).values.values()
    errors = [values.relative for values in differences if len(values.largest) == num_samples]
    return torch.stack(errors).amax(0) if errors else None


def _nearest_between(ours: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Clamp `ours` to the range between the two; a non-finite `other` is ignored."""
    ends = one.double(), torch.where(torch.isfinite(other), other, one).double()
    return ours.double().clamp(torch.minimum(*ends), torch.maximum(*ends))


def _differences(ours: torch.Tensor, theirs: torch.Tensor, sound: torch.Tensor, *, grain: float) -> _Differences:
    """Measure the differences of the `sound` elements per sample of dimension 0; those up to `grain` count as 0."""
    rows = (ours.shape[0], -1) if ours.dim() else (1, 1)
    difference = torch.where(sound, ours.double() - theirs.double(), 0.0).abs().reshape(rows).amax(1)
    subnormal = torch.finfo(ours.dtype).smallest_normal * torch.finfo(ours.dtype).eps  # the format has no smaller steps
    difference = torch.where(difference <= max(grain, subnormal), 0.0, difference)
    magnitude = torch.where(sound, theirs.double(), 0.0).abs().reshape(rows).amax(1)
    overall = float(magnitude.max())
    # A sample of zeros is measured against the others' magnitude.
    return _Differences(
        largest=torch.nan_to_num(difference, nan=math.inf),
        magnitude=magnitude.clamp(min=_SMALLEST_SHARE * overall if overall else 1.0),
        overall=overall,
    )


def gradient_error(
    made: Result, reference: Result, names: Collection[str] | None = None, *, grain: float = 0.0
) -> float:
    """Return the norm of the difference of gradients, relative to the norm of the reference's finite ones.

    They are those of all weights in both, or of `names`. Differences up to `grain` are ignored: the run's format cannot
    represent them.
    """
    names = names or made.gradients.keys() & reference.gradients
    pieces = (ours - theirs for name in names for ours, theirs in _pieces(made, reference, name))
    difference = math.hypot(*(_norm_of(hardshrink(piece, grain) if grain else piece) for piece in pieces))
    norm = math.hypot(*(reference.gradient_norms[name] for name in names))
    return difference / norm if norm else difference


def gradient_errors(made: Result, meant: Result, *, least: float = LEAST) -> dict[str, float]:
    """Return how far the gradient of each parameter is off what it should be, without those that are small beside all.

    All gradients together may hide that a small one is lost; an optimizer such as Adam makes them alike.
    """
    sizes = meant.gradient_sizes
    largest = max(sizes.values(), default=0.0)
    counted = [name for name in sorted(sizes) if sizes[name] > least * largest]
    return {name: gradient_error(made, meant, (name,)) if name in made.gradients else 1.0 for name in counted}


def reversed_gradient(made: Result, meant: Result, *, least: float = LEAST) -> str | None:
    """Return the parameter whose gradient mostly points the other way than it should, or None."""
    worst, most = None, _REVERSED
    for name in sorted(made.gradients.keys() & meant.gradients):
        # That of a bias before a softmax is 0 but for rounding.
        is_noise = any(run.gradient_sizes[name] <= least * max(run.gradient_sizes.values()) for run in (made, meant))
        same_shape = made.gradients[name].shape == meant.gradients[name].shape
        share = _share_reversed(made, meant, name) if same_shape and not is_noise else 0.0
        worst, most = (name, share) if share > most else (worst, most)
    return worst


def _share_reversed(made: Result, meant: Result, name: str) -> float:
    """Return the share of a gradient, by magnitude, in which another has a significant element of the other sign.

    An element of the other sign is off by more than its magnitude; if all are off by less together, none is looked at.
    """
    our_least, least = (_SIGNIFICANT * run.gradient_sizes[name] for run in (made, meant))
    pieces = [*_pieces(made, meant, name)]
    off = math.fsum(_total(ours - theirs) for ours, theirs in pieces)
    whole = math.fsum(_total(hardshrink(theirs, least)) for _, theirs in pieces)
    if off <= _REVERSED * whole:
        return 0.0
    turned = 0.0
    for ours, theirs in pieces:
        counted = (theirs.abs() >= least) & (ours.abs() >= our_least) & ((ours < 0) != (theirs < 0))
        turned += _total(theirs * counted)
    return turned / whole if turned else 0.0


def _pieces(made: Result, reference: Result, name: str) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield a gradient of both runs in pieces whose temporaries stay in the cache, which is ten times as fast."""
    pair = made.gradients[name], reference.gradients[name]
    if all(tensor.layout is torch.strided for tensor in pair):
        return zip(*(torch.split(tensor.flatten(), _PIECE) for tensor in pair), strict=True)
    return iter((pair,))


def _total(values: torch.Tensor) -> float:
    """Return the sum of the magnitudes, which is twice as fast as torch's norm of order 1."""
    return float(values.abs().sum(dtype=torch.promote_types(values.dtype, torch.float32)))
