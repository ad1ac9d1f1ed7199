"""Checks the gradients of a changed step: finite at the training's loss scale, and close to fp32's.

GradScaler begins at 65,536 and doubles or halves its scale since: the gradients have to be finite at four times the
step's scale (https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling). If no scale is known, or only the first,
they have to be finite at one from 65,536 to 256; and at a lower one if they overflow without the failure as well. Too
low a scale shows as an error, since small gradients are then rounded to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from nandoctor.changes.batch import KeepSamples
from nandoctor.changes.setting import SetLossScale, UseFormat
from nandoctor.evidence.edits import Change, flatten
from nandoctor.evidence.formats import BF16, FP16
from nandoctor.fixes.agreement import LARGEST_SQUARED, NOISE, Result, gradient_error
from nandoctor.fixes.made_up_loss import surrogate_loss
from nandoctor.fixes.meaning import Meaning
from nandoctor.fixes.verify import GRADIENT_TOLERANCE, Trials
from nandoctor.text import number, percent


class Said(NamedTuple):
    """What a criterion says of a change; what follows a semicolon in the text is left out where there is no room.

    `samples` are those that were run, None for the whole batch. `replaces`: the change fails because of its meaning
    alone, as this sentence says; the criteria after it are judged nevertheless.
    """

    status: Literal["passed", "failed", "not-checked"]
    text: str
    samples: tuple[int, ...] | None = None
    replaces: str = ""


_GROWTH = 4.0
"""Room for two of the doublings that GradScaler makes every 2,000 steps."""
_USUAL_SCALES = (65536.0, 4096.0, 256.0, 16.0, 1.0)
_LOWERED, _LOWEST = 256.0, 16.0
"""On another batch GradScaler may have to lower its scale: to these, but not above the training's scale."""
_HALVINGS = 16.0
"""It may halve a scale that is low already a few times too: the mean over fewer samples has larger gradients."""
_LEAST_SCALE = 256.0
"""The lowest scale if none is known: GradScaler gets there in eight steps, and small gradients are not yet lost."""
_MOST_NOISE = 0.5
"""The limit of what is accepted for fp32's own error in the gradients, as a share of their norm."""
_LARGEST_MADE_UP = 1e6
"""The largest loss, or norm of the gradients, that is accepted where it is non-finite without the change, relative to
the healthy samples', or 1 if theirs is below 1. With a divisor clamped to 1e-12 the gradients are 1e12 times those of a
divisor of 1, and one update ruins every weight."""
_LARGEST_UNKNOWN = 1e9
"""The same relative to the square of the largest output, if no sample is healthy; the loss may have a factor."""
_MAX_GROWTH = 1.1
"""A change of the formula may make the gradients smaller, but at most this many times as large."""


class GradientCheck:
    """A check of one step's gradients with one change after another; what they are compared with is run once.

    `healthy` are the samples that are not to blame, () if that is not known.
    """

    def __init__(self, trials: Trials, meaning: Meaning, *, healthy: tuple[int, ...]) -> None:
        self._trials, self._meaning, self._healthy = trials, meaning, healthy
        mode = trials.step.mode
        self._own_scale = None if mode.is_first_scale else mode.loss_scale

    def run(self, change: Change) -> tuple[Result, float | None]:
        """Run the step at the largest scale at which its gradients are finite; that scale is None if there is none."""
        made, scale = _run_at_first(self._trials, change, self._scales(change))
        return made, scale if made.gradients_finite else None

    def judge_loss(self, made: Result) -> Said:
        """Check that the loss of a run is finite, and not a huge number that only the change produces."""
        loss = made.values.get("loss")
        if loss is None:
            return Said("not-checked", "none is known (--loss)")
        if not bool(torch.isfinite(loss).all()):
            return Said("failed", "not finite")
        if self._is_made_up(_size_of_loss, made):
            return Said("failed", f"finite, but up to {number(_size_of_loss(made))}, which only the change produces")
        return Said("passed", "finite")

    def _scales(self, change: Change) -> tuple[float, ...]:
        if (scale := scale_set_by(change)) is not None:
            return (scale,)
        if self._own_scale is None:
            return (1.0,) if in_bf16(change, before=self._trials.step.low is BF16) else _USUAL_SCALES
        return (_GROWTH * self._own_scale, self._own_scale)

    def judge(self, change: Change, made: Result, scale: float | None) -> Said:
        """Check that the gradients of a run with `change` are finite, and within 10 % of fp32's."""
        of = "a made-up loss" if self._trials.step.loss is surrogate_loss else "the loss"
        scales = self._scales(change)
        if not made.gradients:
            return Said("not-checked", "no weight has a gradient")
        if scale is None:
            return Said("failed", f"gradients of {of} are not finite at loss scale {number(min(scales))}")
        if (made_up := self.tell_made_up(made)) is not None:
            return Said("failed", f"gradients of {of}: {made_up}")
        told, aside = f"gradients of {of} finite at loss scale {number(scale)}", ""
        highest = max(scales)
        # The next larger scale counts: a change that needs a still lower one is not excused by an overflow that
        # happens without the failure at the highest.
        larger = min((tried for tried in scales if tried > scale), default=scale)
        excused = scale < larger and self._overflows_anyway(larger)
        if excused:
            aside = f"; at {number(larger)} those of a sound step overflow too"
        elif scale < highest:  # what fits at the highest fits at all lower ones
            why = "with which GradScaler begins" if self._own_scale is None else "to which GradScaler doubles it"
            aside = f"; not at {number(highest)}, {why}"
        needed = min(_LEAST_SCALE, highest) if self._own_scale is None else highest
        if scale < needed and not excused:
            return Said("failed", told + aside)
        grain = FP16.smallest_subnormal / scale
        error, allowed, name = _nearest(self._references(change, made), made, grain=grain)
        told += _describe_error(error, allowed, name)
        if not (error or made.gradient_norm):
            told += " (all are 0, so the model learns nothing from this batch)"
        if error is None or error <= allowed:
            return Said("passed", told + aside)
        replaces = f"the gradients are {percent(error)} off the formula's" if self._trials.numerics else ""
        return Said("failed", told + aside, replaces=replaces)

    def tell_made_up(self, made: Result) -> str | None:
        """Describe gradients that are finite but implausibly large, if the unchanged step has none; None otherwise."""
        if self._trials.sound_reference(()).finite:
            return None
        norm, is_surrogate = made.gradient_norm, self._trials.step.loss is surrogate_loss
        if norm <= LARGEST_SQUARED if is_surrogate else not self._is_made_up(lambda run: run.gradient_norm, made):
            return None
        return f"finite, but with a norm of {number(norm)}, which only the change produces"

    def _overflows_anyway(self, scale: float) -> bool:
        """Return True if fp16 cannot hold the gradients of the sound reference or of the healthy samples either.

        Past float64's range the sound reference has smaller inputs, and gradients that are smaller by the same factor.
        """
        sound, smaller, factor = self._trials.sound_reference(()), self._meaning.smaller, 1.0
        if smaller is not None:
            factor, sound = smaller[0], smaller[1].exact()
        largest = max(sound.gradient_sizes.values(), default=0.0)
        if sound.finite and largest * scale > factor * FP16.max:
            return True
        if not self._healthy:
            return False
        made = self._trials.run(KeepSamples(samples=self._healthy), SetLossScale(value=scale))
        return made.values_finite and not made.gradients_finite

    def _references(self, change: Change, made: Result) -> Iterator[tuple[Result, float, str]]:
        """Yield the references that the gradients are compared with in turn: the accepted error and the name of each.

        First fp32 and float64 of the unchanged step, then fp32 with its own error in fp16's coarser units. Next comes
        fp32 with the same `change`, if that makes the gradients no larger; last, fp32 with fp16's error in the healthy
        samples.
        """
        sound, name = self._trials.sound_reference((change,)), self._trials.reference_name
        if sound.finite:
            yield sound, GRADIENT_TOLERANCE, name
            exact = self._trials.exact()
            if exact.finite:
                yield exact, GRADIENT_TOLERANCE, "float64"
                yield sound, min(NOISE * gradient_error(sound, exact), _MOST_NOISE), name
        changed = self._trials.reference(change)
        no_larger = not sound.finite or made.gradient_norm <= _MAX_GROWTH * sound.gradient_norm
        if changed.finite and no_larger:
            yield changed, GRADIENT_TOLERANCE, self._trials.changed_name
        if sound.finite and self._healthy:
            yield sound, min(2 * self.own_error, 1.0), name

    def _is_made_up(self, size: Callable[[Result], float], made: Result) -> bool:
        """Return True if a loss, or a norm of gradients, is implausibly large, and the unchanged step has none."""
        if self._trials.sound_reference(()).finite:
            return False
        fine = self._trials.reference(KeepSamples(samples=self._healthy)) if self._healthy else None
        if fine is not None and fine.finite:
            return size(made) > min(_LARGEST_MADE_UP * max(1.0, size(fine)), LARGEST_SQUARED)
        usual = max(1.0, self._trials.reference().largest_finite ** 2)
        return size(made) > min(_LARGEST_UNKNOWN * usual, LARGEST_SQUARED)

    @cached_property
    def own_error(self) -> float:
        """The error of the healthy samples' gradients in the step's own format; 0 if these or fp32's are not finite."""
        kept, scale = KeepSamples(samples=self._healthy), self._own_scale or _USUAL_SCALES[1]
        made, reference = self._trials.run(kept, SetLossScale(value=scale)), self._trials.reference(kept)
        return gradient_error(made, reference) if made.finite and reference.finite else 0.0


def _size_of_loss(made: Result) -> float:
    return float(made.values["loss"].abs().max()) if "loss" in made.values else 0.0


def _nearest(
    references: Iterable[tuple[Result, float, str]], made: Result, *, grain: float
) -> tuple[float | None, float, str]:
    """Return the gradients' error against the first reference that accepts it, else the smallest; limit and name."""
    errors = list[tuple[float, str]]()
    for reference, allowed, name in references:
        # The grain costs one more pass over all gradients, and can only lower the error.
        if (error := gradient_error(made, reference)) > allowed:
            error = gradient_error(made, reference, grain=grain)
        errors.append((error, name))
        if error <= allowed:
            return error, allowed, name
    least, nearest = min(errors, default=(None, ""))
    return least, GRADIENT_TOLERANCE, nearest


def _describe_error(error: float | None, allowed: float, name: str) -> str:
    """Describe the error against the nearest sound gradients; None means that there are none."""
    if error is None:
        return ", with nothing to compare them with"
    if error > allowed:
        return f", {percent(error)} off {name}, more than {percent(allowed)}"
    honest = ", within what rounding costs here" if error > GRADIENT_TOLERANCE else ""
    return f", {percent(error)} off {name}{honest}" if name else honest


def at_scale(change: Change, scale: float) -> tuple[Change, ...]:
    """Return the change, with the loss scale if it sets none itself."""
    return (change,) if scale_set_by(change) is not None else (change, SetLossScale(value=scale))


def run_lowered(trials: Trials, change: Change, scale: float | None) -> tuple[Result, float | None]:
    """Run another batch at the loss scale, or where its gradients need it at a lower one, which is returned as well."""
    highest = scale or 1.0
    known = trials.step.mode.loss_scale or highest
    scales = dict.fromkeys((highest, min(highest, known, _LOWERED), min(highest / _HALVINGS, known, _LOWEST)))
    made, lowered = _run_at_first(trials, change, scales)
    return made, lowered if lowered < highest else None


def _run_at_first(trials: Trials, change: Change, scales: Iterable[float]) -> tuple[Result, float]:
    """Run the step at the first loss scale at which its gradients are finite, or its values are not; else the last."""
    for scale in scales:
        made = trials.run(*at_scale(change, scale))
        if made.gradients_finite or not made.values_finite:
            break
    return made, scale


def scale_set_by(change: Change) -> float | None:
    """Return the loss scale that a change sets, None if it sets none."""
    return next((edit.value for edit in flatten((change,)) if isinstance(edit, SetLossScale)), None)


def in_bf16(change: Change, *, before: bool) -> bool:
    """Return True if the step runs in bf16 with a change: it did `before`, or the change switches to it."""
    return before or any(isinstance(edit, UseFormat) and edit.format is BF16 for edit in flatten((change,)))
