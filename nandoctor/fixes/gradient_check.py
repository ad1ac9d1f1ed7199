"""Judges the gradients of a changed step: finite at the loss scale of the training, and near to fp32's.

Where it has come down since GradScaler began with 65,536, the largest one is taken at which the gradients are finite
(https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling), and none below that of the step. Where no scale is
known they are asked for at 65,536 and down to 256; below that only where they overflow without the failure as well.
Too low a scale shows as an error: small gradients are then rounded to zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal

import torch

from nandoctor.autocast.policy import REFERENCE
from nandoctor.errors import LossError, ModelError
from nandoctor.evidence.edits import Change, KeepSamples, SetLossScale, UseFormat, flatten
from nandoctor.evidence.formats import BF16, FP16
from nandoctor.fixes.agreement import (
    LARGEST_SQUARED,
    NOISE,
    Result,
    gradient_error,
    gradient_norm,
    share_rounded_to_zero,
)
from nandoctor.fixes.variations import SURROGATES, squared_surrogate
from nandoctor.fixes.verify import GRADIENT_TOLERANCE, Trials
from nandoctor.text import number, percent
from nandoctor.torch_compat import tree_map

Said = tuple[Literal["passed", "failed", "not-checked"], str]
"""A status, and the sentence that gives its reason; an aside comes after a semicolon, where a screen has no room."""

GROWTH = 4.0
"""GradScaler doubles its scale every 2,000 steps: room for two of these."""
_USUAL_SCALES = (65536.0, 4096.0, 256.0, 16.0, 1.0)
_BELOW_ONE = (1 / 16, 1 / 256)
"""For a stand-in loss whose own gradients fp16 cannot hold: what it is scaled by is not the training's."""
_LEAST_SCALE = 256.0
"""Where no scale is known: GradScaler comes down to it within eight steps, and small gradients are still seen."""
_MOST_NOISE = 0.5
"""The most that is allowed for what fp32 itself does not know of the gradients, as a share of their norm."""
_LARGEST_MADE_UP = 1e6
"""The largest norm of gradients that only a change gives a value, over that of the samples that were fine, or that the
loss hands to an ordinary output, where one is above 1: of a divisor kept at 1e-12 they are 1e12 times what they are of
1, and one update spoils every weight."""
_LARGEST_LOSS = 1e6
"""The same of the loss, over that of the samples that were fine: at 1e-12 the reciprocal, digamma and the like are
1e12, of which a weighted average over a batch leaves a thousandth, and the value that training shows means nothing."""
_LARGEST_UNKNOWN = 1e9
"""The same over the square of the largest output, where no sample was fine: the loss may have a factor of its own."""
_ORDINARY = 0.5
"""A value of an output for which losses of probabilities, of logits and of distances are all smooth."""
_LARGER = 1.1
"""A change of the formula may make the gradients smaller, and no larger than this."""


class GradientCheck:
    """The gradients of one step with one change after the other; what they are compared with is run once.

    `healthy` are the samples that are not to blame, () where that is not known.
    """

    def __init__(self, trials: Trials, *, healthy: tuple[int, ...]) -> None:
        self._trials, self._healthy = trials, healthy

    def run(self, change: Change) -> tuple[Result, float | None]:
        """Run the step at the largest scale at which its gradients are finite; None where they are at none."""
        made = None
        for scale in self._scales(change):
            made = self._trials.run(*at_scale(change, scale))
            if made.gradients_finite or not made.values_finite:
                return made, scale if made.gradients_finite else None
        assert made is not None
        return made, None

    def judge_loss(self, made: Result) -> Said:
        """Say whether the loss of a run is finite, and no number that only the change makes up."""
        loss = made.values.get("loss")
        if loss is None:
            return "not-checked", "none is known (--loss)"
        if not bool(torch.isfinite(loss).all()):
            return "failed", "not finite"
        largest = float(loss.abs().max())
        if not self._trials.sound_reference(()).finite and largest > self._largest_loss:
            return "failed", f"finite, but {number(largest)}, made up by the change"
        return "passed", "finite"

    def _scales(self, change: Change) -> tuple[float, ...]:
        step = self._trials.step
        if (scale := scale_set_by(change)) is not None:
            return (scale,)
        narrow = not in_bf16(change, before=step.low is BF16)
        if step.loss_scale is None:
            below = _BELOW_ONE if narrow and self._stand_in_overflows(change) else ()
            return (*_USUAL_SCALES, *below) if narrow else (1.0,)
        grown = GROWTH * step.loss_scale
        larger = (usual for usual in _USUAL_SCALES if usual > grown) if narrow else ()
        return (*larger, grown, step.loss_scale)

    def judge(self, change: Change, made: Result, scale: float | None, *, in_backward: bool = False) -> Said:
        """Say whether the gradients of a run with `change` are finite, and within 10 % of fp32's.

        With `in_backward` the change is of code that computes them: it is no measure of what they should be.
        """
        of = "a stand-in loss" if self._trials.step.loss in SURROGATES else "the loss"
        if not made.gradients:
            return "not-checked", "no weight has a gradient"
        if scale is None:
            return "failed", f"gradients of {of} are not finite at loss scale {number(min(self._scales(change)))}"
        if (made_up := self.tell_made_up(made)) is not None:
            return "failed", f"gradients of {of}: {made_up}"
        told, aside = f"gradients of {of} finite at loss scale {number(scale)}", ""
        if self._trials.step.loss_scale is None and scale_set_by(change) is None:
            highest = max(self._scales(change))
            # A change whose own gradients need a lower scale than the others' is not excused by what those lose at
            # the highest one.
            larger = min((usual for usual in self._scales(change) if usual > scale), default=scale)
            excused = scale < 1 or (scale < larger and self._overflows_anyway(larger))
            aside = self._describe_unknown(scale, larger if excused else highest, excused=excused)
            if scale < min(_LEAST_SCALE, highest) and not excused:
                return "failed", told + aside
        if scale < 1 and (lost := self._loses_small_gradients(change, made, scale)) is not None:
            return "failed", f"{told}, where {lost} are rounded away"
        references = self._references(None if in_backward else change, made)
        error, allowed = _nearest(references, made, grain=FP16.smallest_subnormal / scale)
        told += _describe_error(error, allowed)
        is_taught = error or gradient_norm(made)
        told += "" if is_taught else " (all are 0, so this batch teaches nothing)"
        return "passed" if error is None or error <= allowed else "failed", told + aside

    def tell_made_up(self, made: Result) -> str | None:
        """Tell of finite gradients that are too large to be believed, where the unchanged step has none."""
        if self._trials.sound_reference(()).finite or (norm := gradient_norm(made)) <= self._largest_made_up:
            return None
        return f"finite, with a norm of {number(norm)}, made up by the change"

    @staticmethod
    def _describe_unknown(scale: float, larger: float, *, excused: bool) -> str:
        """What to say of the scale where that of the training is not known; with a `larger` one it overflows."""
        if scale == larger:
            return ""  # what fits at this scale fits at all below it
        if scale < 1:
            return "; it squares the output, and fp16 holds no more"
        if excused:
            return f"; at {number(larger)} they overflow without the failure too"
        return f"; not at {number(larger)}, with which GradScaler begins"

    def judge_growth(self, change: Change, scale: float | None) -> Said:
        """Say whether the gradients stay finite where GradScaler doubles its scale twice."""
        step = self._trials.step
        if scale_set_by(change) is not None:
            return "not-checked", "the change sets it"
        if step.loss_scale is None:
            return "not-checked", "not known"
        grown = GROWTH * step.loss_scale
        if scale is not None and scale >= grown:
            return "passed", f"gradients are finite at loss scale {number(grown)} too"
        if self._overflows_anyway(grown):
            return "not-checked", f"at loss scale {number(grown)} the gradients overflow without the failure too"
        return "failed", f"gradients are not finite at loss scale {number(grown)}"

    def _overflows_anyway(self, scale: float) -> bool:
        """Tell whether fp16 cannot hold the gradients of the weights, or of the samples that were fine."""
        sound = self._trials.sound_reference(())
        if sound.finite and self._largest(sound) * scale > FP16.max:
            return True
        if not self._healthy:
            return False
        made = self._trials.run(KeepSamples(samples=self._healthy), SetLossScale(value=scale))
        return made.values_finite and not made.gradients_finite

    def _stand_in_overflows(self, change: Change) -> bool:
        """Tell whether fp16 cannot hold the gradients that a stand-in loss has with the change in fp32."""
        if self._trials.step.loss is not squared_surrogate:
            return False
        return self._largest(self._trials.reference(change)) > FP16.max

    @staticmethod
    def _largest(made: Result) -> float:
        """The largest magnitude in all gradients."""
        largest = (float(gradient.abs().max()) for gradient in made.gradients.values() if gradient.numel())
        return max(largest, default=0.0) / made.gradient_scale

    def _references(self, change: Change | None, made: Result) -> Iterator[tuple[Result, float]]:
        """What the gradients are compared with in turn, and what they may be off by.

        fp32 and float64 of the unchanged step, and what fp32 loses there in fp16's coarser units; the same `change` in
        fp32, where it makes the gradients no larger; at last what fp16 loses in the samples that were fine.
        """
        sound = self._trials.sound_reference(() if change is None else (change,))
        if sound.finite:
            yield sound, GRADIENT_TOLERANCE
            exact = self._trials.exact()
            if exact.finite:
                yield exact, GRADIENT_TOLERANCE
                yield sound, min(NOISE * gradient_error(sound, exact), _MOST_NOISE)
        changed = None if change is None else self._trials.reference(change)
        no_larger = not sound.finite or gradient_norm(made) <= _LARGER * gradient_norm(sound)
        if changed is not None and changed.finite and no_larger:
            yield changed, GRADIENT_TOLERANCE
        if sound.finite and self._healthy:
            yield sound, min(2 * self._own_error, 1.0)

    @cached_property
    def _largest_loss(self) -> float:
        """The largest value that is believed of a loss that is not finite without a change."""
        fine = self._trials.reference(KeepSamples(samples=self._healthy)) if self._healthy else None
        loss = fine.values.get("loss") if fine is not None and fine.values_finite else None
        if loss is not None:
            return min(_LARGEST_LOSS * max(1.0, float(loss.abs().max())), LARGEST_SQUARED)
        return min(_LARGEST_UNKNOWN * max(1.0, self._trials.reference().largest_finite ** 2), LARGEST_SQUARED)

    @cached_property
    def _largest_made_up(self) -> float:
        """The largest norm that is believed of gradients which are not finite without a change."""
        if self._trials.step.loss in SURROGATES:
            return LARGEST_SQUARED
        fine = self._trials.reference(KeepSamples(samples=self._healthy)) if self._healthy else None
        usual = gradient_norm(fine) if fine is not None and fine.finite else self._steepness()
        return min(_LARGEST_MADE_UP * max(1.0, usual), LARGEST_SQUARED)

    def _steepness(self) -> float:
        """The norm of the gradient that the loss hands to an output of ordinary numbers, 1 where it cannot be told."""
        step, leaves = self._trials.step, list[torch.Tensor]()

        def make_ordinary(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                return leaf
            leaves.append(torch.full_like(leaf, _ORDINARY, dtype=torch.float32, requires_grad=True))
            return leaves[-1]

        with suppress(LossError, ModelError, RuntimeError):
            output = tree_map(make_ordinary, step.run(REFERENCE).output)
            loss = step.loss(output, step.batch) if step.loss is not None else None
            if loss is not None and loss.requires_grad:
                made = torch.autograd.grad(loss, leaves, allow_unused=True)
                norm = float(sum(gradient.double().square().sum() for gradient in made if gradient is not None)) ** 0.5
                return norm if math.isfinite(norm) else 1.0
        return 1.0

    def _loses_small_gradients(self, change: Change, made: Result, scale: float) -> str | None:
        """Tell whose gradients are lost at a scale that holds the largest ones, which a norm of all hides."""
        sound = self._trials.sound_reference((change,))
        if sound.gradients_finite and (share := share_rounded_to_zero(made, sound)) > GRADIENT_TOLERANCE:
            return f"{percent(share)} of those that are not 0 in fp32"
        if not self._healthy:
            # A loss with a scale of its own needs one below 1, and no other loss does.
            is_too_low = scale_set_by(change) is not None and scale * max(1.0, self._steepness()) < 1
            return "gradients of an ordinary size" if is_too_low else None
        return "those of the samples that were fine" if self._healthy_error(scale) > GRADIENT_TOLERANCE else None

    @cached_property
    def _own_error(self) -> float:
        """What the gradients of the samples that were fine are off by, in the format that the step failed in."""
        return self._healthy_error(self._trials.step.loss_scale or _USUAL_SCALES[1])

    def _healthy_error(self, scale: float) -> float:
        """How far off fp32 the gradients of the samples that were fine are; 0 where either are not finite."""
        kept = KeepSamples(samples=self._healthy)
        made, reference = self._trials.run(kept, SetLossScale(value=scale)), self._trials.reference(kept)
        return gradient_error(made, reference) if made.finite and reference.finite else 0.0


def _nearest(references: Iterable[tuple[Result, float]], made: Result, *, grain: float) -> tuple[float | None, float]:
    """How far gradients are off the nearest of their references, and how far they may be."""
    errors = []
    for reference, allowed in references:
        # The grain asks for one more pass over all gradients, and can only bring the error down.
        if (error := gradient_error(made, reference)) > allowed:
            error = gradient_error(made, reference, grain=grain)
        errors.append(error)
        if error <= allowed:
            return error, allowed
    return min(errors, default=None), GRADIENT_TOLERANCE


def _describe_error(error: float | None, allowed: float) -> str:
    """What to say of the difference from the nearest sound gradients, None where there are none."""
    if error is None:
        return ", with nothing to compare them with"
    if error > allowed:
        return f", {percent(error)} off fp32, more than {percent(allowed)}"
    honest = ", within what rounding costs here" if error > GRADIENT_TOLERANCE else ""
    if error > _MOST_NOISE:
        honest = ": fp16 loses as much of those of the samples that were fine"
    return f", {percent(error)} off fp32{honest}"


def at_scale(change: Change, scale: float) -> tuple[Change, ...]:
    """The change, and the loss scale where it sets none itself."""
    return (change,) if scale_set_by(change) is not None else (change, SetLossScale(value=scale))


def scale_set_by(change: Change) -> float | None:
    """The loss scale that a change asks for, None where it leaves that alone."""
    return next((edit.value for edit in flatten((change,)) if isinstance(edit, SetLossScale)), None)


def in_bf16(change: Change, *, before: bool) -> bool:
    """Tell whether the step runs in bf16 with a change, as it did `before` or because the change asks for it."""
    return before or any(isinstance(edit, UseFormat) and edit.format is BF16 for edit in flatten((change,)))
