"""What the unchanged formula means where fp32 has no number: its value and gradient in float64, or their limit.

At a singular point the limit is looked for along neighbouring inputs: the batch, the weights and the buffers are moved
off the point by shrinking steps, the batch towards its own next sample and along a fixed pattern, from both sides, and
the results are extrapolated (Aitken: exact for h ** p, whatever p). A limit exists where every side that is finite
converges, and all to the same number. What all arguments of the failing ops come from is moved too, where it is made:
a forecast behind a ReLU stays at 0 otherwise. Where all else stays at the point, it is moved alone, whole numbers too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, takewhile
from typing import Any

import torch

from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.constant import SetArgument
from nandoctor.changes.guard import GuardArgument
from nandoctor.changes.running_op import RunningOp
from nandoctor.engine.module_state import is_large, known_tensors
from nandoctor.evidence.edits import Change, Edit, OpSite, SingleEdit, flatten
from nandoctor.evidence.trace import SourceLine
from nandoctor.fixes.agreement import (
    TOLERANCE,
    Result,
    gradient_error,
    gradient_errors,
    reversed_gradient,
    unlike_state,
)
from nandoctor.fixes.candidates import join
from nandoctor.fixes.neighbours import (
    WAYS,
    Own,
    Tensors,
    Way,
    are_numbers,
    forward_beside,
    forward_elsewhere,
    moves_at,
    pattern_like,
    sides_of,
    times_factor,
)
from nandoctor.fixes.variations import scaled
from nandoctor.fixes.verify import Trials
from nandoctor.text import number, percent

_FACTORS = tuple(0.5 * 4.0**-n for n in range(6))
"""exp is finite in float64 up to 709, in fp32 up to 88: with steps of 4, one factor lands between the two."""
_BISECTIONS = 4
"""1 - erf(x) is 0 in float64 from 5.9 on, in fp32 from 3.9 on: that takes up to three more."""
_STEPS = (2.0**-8, 2.0**-13, 2.0**-18)
"""Each is 1/32 of the one before: sqrt(h) still shrinks sixfold, and float64 keeps ten digits of 1/h."""
ROUNDING_IN_64 = 1e-10
"""What moves a result by less, as a share of its row, does not move it: float64 has 16 digits."""
_ROUNDING = 2.0**-22
"""A step that fp32's rounding makes anywhere."""
LOST = 0.5
"""The error of one weight's gradient from which on it is lost; fp32's own rounding has been seen to cost a seventh."""
VISIBLE = 0.03
"""The error of one weight's gradient that is looked at: rounding explains it if the batch's own costs a share of it."""
_SHARE = 0.1
"""The share: rounding inside of the model adds to that of the batch."""
_SETTLED = 1e-5
"""What moves by less between the first two steps, relative to the largest value, has come to its limit: only rounding
moves it at the third. Where terms cancel, as in (1 - cos(h)) / h ** 2, float64's is divided by h ** 2."""
_SHRINKING = 0.5
"""Differences of a convergent sequence shrink at least so much from step to step; those of log(h) do not."""
_LEAST = 1e-4
"""The error of a gradient that does not count, as a share of all gradients: 1e-6 with an eps, and 0 in the limit."""
_OTHERS = (1.0, -1.0, 1e3, -1e3)
"""What is added to a number that is put, to see whether it shows: a function may bend far from it."""
_CUT = 1e-9
"""A gradient that becomes exactly 0 counts from this share of all on: what has none is never trained."""
_LEFT = "output.kept."
"""What a step leaves behind is in the output of one that exposes it, by such a name."""
_ALIKE = 1e-3
"""Sides whose extrapolations differ by more, relative to the largest value, have no common limit."""
_DIVERGES, _OUTSIDE, _GROWS = math.nan, math.inf, -math.inf
"""In place of a limit: the sides do not converge to one number; no neighbour has a number there, as outside a domain;
the value grows without a limit when nothing but what the failing ops take is moved."""


@dataclass(eq=False, kw_only=True)
class Meaning:
    """The meaning of one step's unchanged formula; what it needs is run once, and only when it is asked for.

    `behind` are the arrays, weights and buffers that the failing ops' arguments are computed from; all, if it is empty.
    `sources` are the places of the ops that all these arguments come from, `constants` the names of such tensors, and
    `makers` the places of the ops that made those in which they are singular.
    `by_hand` are the places of the ops that compute gradients in a hand-written backward. `meets_infinity`: the failing
    ops give or take one, where the mean of no elements is NaN at once.
    """

    trials: Trials
    behind: frozenset[str] = frozenset()
    sources: frozenset[OpSite] = frozenset()
    constants: frozenset[str] = frozenset()
    makers: frozenset[OpSite] = frozenset()
    by_hand: frozenset[SourceLine | None] = frozenset()
    meets_infinity: bool = False

    @cached_property
    def smaller(self) -> tuple[float, Trials] | None:
        """An input factor with which float64 is finite, its gradients too if possible, but fp32 is not; its trials."""
        if not self.trials.numerics or self.trials.exact().finite:
            return None
        found, too_large = None, 1.0
        for factor in _FACTORS:
            trials = self.with_inputs(factor)
            if trials is None:
                return None
            if trials.exact().values_finite and (found is None or trials.exact().finite):
                found = factor, trials
            if trials.exact().finite:
                break
            too_large = factor if found is None else too_large
        for _ in range(_BISECTIONS):
            if found is None or _holds_alone(found[1]):
                return found
            factor = math.sqrt(found[0] * too_large)
            trials = self.with_inputs(factor)
            if trials is not None and trials.exact().finite:
                found = factor, trials
            else:
                too_large = factor
        return None  # where fp32 is finite too, such inputs show nothing of the failure

    def with_inputs(self, factor: float) -> Trials | None:
        """Return trials with the inputs, and all else in the batch behind the failing ops, multiplied by a factor."""
        step = self.trials.step
        call = scaled(step.call, step.call.used | self.behind, factor)
        return None if call is None else self.trials.on(replace(step, call=call))

    @cached_property
    def directed(self) -> Result | None:
        """A run of the unchanged step whose gradients are finite, and not of a NaN; None if there is none.

        Past fp32's range the gradients are those of float64: their direction counts, whatever their size.
        """
        found = self.trials.exact() if self.trials.numerics else self.trials.reference()
        return found if found.ran and found.gradients and found.gradients_finite and not found.has_nan else None

    def is_rounding(self, name: str, error: float) -> bool:
        """Return True if rounding explains the error of a gradient, as that of min(x, y) for a box found exactly.

        The gradient in float64, or of a batch within the rounding, then points elsewhere, or is off by a share of it.
        """
        meant, trials = self.directed, self.trials
        if meant is None or not trials.numerics:
            return reversed_gradient(trials.reference(), trials.exact()) is not None
        near = [run for run in self._nearby if run.gradients_finite and name in run.gradients]
        least = LOST if error > LOST else error * _SHARE
        return any(gradient_error(run, meant, (name,)) > least for run in near)

    @cached_property
    def _nearby(self) -> list[Result]:
        """The step moved within the rounding of each number; a zero has none."""
        pattern = {name: pattern_like(value, torch.zeros_like(value)) for name, value in self._moved.items()}
        ways = [pattern, {name: -step for name, step in pattern.items()}] if pattern else []
        return [self._run_beside(_ROUNDING, direction) for direction in ways]

    @cached_property
    def limit(self) -> Result | None:
        """The limits of values and gradients; None if float64 is finite, or nothing moves.

        In place of one there may be `_DIVERGES`, `_OUTSIDE` or `_GROWS`. Where what the failing ops take can only be
        moved apart from all that it has in common with the rest, nothing but such growth counts.
        """
        if not self.trials.numerics or self.trials.exact().finite or is_large(self.trials.step.model):
            return None
        beside = self._follow(partial(self._run_beside, direction=way) for way in sides_of(self._moved))
        jointly = self._follow(self._beside_jointly())
        values = _agreed([side.values for side in (*beside, *jointly)])
        sides = beside or jointly  # gradients have to agree among the runs in which nothing is moved by hand
        for runs, is_apart in ((self._beside_sources(), False), (self._beside(self.makers), True)):
            if (is_open := self._open(values)) or not values:
                found = self._follow(runs)
                moved = {
                    name: torch.where(torch.isnan(value), _GROWS, _OUTSIDE if is_apart else value)
                    for name, value in _agreed([side.values for side in found]).items()
                }
                both = is_open.keys() & moved
                values = moved | values | {name: torch.where(is_open[name], moved[name], values[name]) for name in both}
                sides = sides if is_apart else found or sides
        if not sides:
            return None
        return Result(values=values, gradients=_agreed([side.gradients for side in sides]), ran=True)

    @cached_property
    def has_limit(self) -> bool:
        """True if the step tends to numbers wherever its values, or else its gradients, are none in float64."""
        if (limit := self.limit) is None:
            return False
        exact = self.trials.exact()
        for tends, itself in ((limit.values, exact.values), (limit.gradients, exact.gradients)):
            shared = tends.keys() & itself.keys()
            known = [torch.isfinite(tends[name])[~torch.isfinite(itself[name])] for name in shared]
            if any(one.numel() for one in known):
                return all(bool(one.all()) for one in known)
        return False

    @cached_property
    def _elsewhere(self) -> Meaning | None:
        """The meaning of the step with other numbers at which it has a limit too, or at least fails; None without any.

        A point like x - x.mean() = 0 survives one factor for each tensor, and x = y one for all. Zeros stay where they
        are, and so does a point like x = 0; what the formula gives there may be another number.
        """
        owners: tuple[Own, ...] = ("element", "tensor", "all")
        others = [*map(self._with_numbers, owners)]
        failing = (it for it in others if it.trials.exact().ran and not it.trials.exact().finite)
        return next((it for it in others if it.has_limit), next(failing, None))

    def _with_numbers(self, by: Own) -> Meaning:
        step, given = self.trials.step, self.trials.step.call.batch
        numbers = {name: it for name, it in given.items() if it.is_floating_point() and are_numbers(it)}
        batch = {**given, **{name: times_factor(name, value, by) for name, value in numbers.items()}}
        call = replace(step.call, batch=batch, forward=partial(forward_elsewhere, step, by))
        return replace(self, trials=self.trials.on(replace(step, call=call)))

    def find_fill(self, guard: GuardArgument) -> float:
        """Find the result of a guarded op with which the step comes to its limit: by secants, as it may bend it."""
        one, other = guard.fill, guard.fill + 1.0
        offs = [self._off_limit(replace(guard, fill=fill)) for fill in (one, other)]
        if offs[0].shape != offs[1].shape:  # a sparse result has no zeros
            return guard.fill
        moved = (offs[1] - offs[0]).nan_to_num().abs()
        if not bool((moved > ROUNDING_IN_64).any()):  # as where what follows takes away any shift
            return guard.fill
        place = int(moved.argmax())
        before, last = (float(off[place]) for off in offs)
        for _ in range(4):  # of a straight line the first is exact
            if abs(last) <= _SETTLED * float(moved[place]) or last == before or not math.isfinite(last):
                break
            one, other = other, other - last * (other - one) / (last - before)
            before, last = last, float(self._off_limit(replace(guard, fill=other))[place])
        found, short = (float(f"{other:.{digits}g}") for digits in (6, 4))
        return short if abs(short - found) <= _ALIKE / 10 * abs(found) else found

    def describe_alone(self, guard: GuardArgument) -> str | None:
        """Describe a guard whose number is the limit for the numbers of this step alone, or may be; else None."""
        if self._elsewhere is None:
            return f"whether {guard.fill:g} is the limit for other numbers too is not known"
        fill = self._elsewhere.find_fill(guard)
        if abs(fill - guard.fill) <= TOLERANCE * max(abs(fill), abs(guard.fill)):
            return None
        return f"{guard.fill:g} is the limit for the numbers of this step alone; for others it is {fill:g}"

    def _off_limit(self, change: Change) -> torch.Tensor:
        """Return how far off its limit a changed step is in float64 where it gives no number itself, as shares."""
        made = self.trials.exact(change).values
        limit = self.limit.values if self.limit is not None else {}
        names = [name for name in limit.keys() & made.keys() if limit[name].shape == made[name].shape]
        places = {
            name: torch.isfinite(limit[name]) & ~torch.isfinite(self._itself(name, limit[name])) for name in names
        }
        return torch.cat(
            [torch.zeros(0), *(((made[name] - limit[name]) / _largest(limit[name]))[places[name]] for name in names)]
        )

    def describe_replaced(self, change: Change, made: Result, edit: Edit) -> str | None:
        """Describe where a run has a number that the unchanged formula does not tend to in float64; None if nowhere.

        Where that is NaN for every neighbour too, as for the mean of no elements, nothing is replaced; where it is an
        infinity that became NaN, something is if the number that the `edit` puts shows. Where it is infinite for all of
        them, smaller inputs may show that only float64's range is too small.
        """
        sources = {site.source for single in flatten((edit,)) for site in single.sites}
        is_by_hand = bool(sources) and self.by_hand.issuperset(sources) and not self.trials.sound_reference(()).finite
        if is_by_hand and _with_other_numbers(edit) != edit:
            return "a number is put into a hand-written backward, and what that should give is not known"
        if not self.trials.numerics or not made.values:
            return None
        if (values := self._describe_values(made, edit)) is not None:
            return values
        # Where a value has no limit, such as log(0), that of a gradient means nothing.
        if (limit := self.limit) is None:
            return None
        if not all(bool(torch.isfinite(values).all()) for values in limit.values.values()):
            return self._describe_shown(edit)
        is_open = not self.trials.exact().gradients_finite
        return _describe_gradients(self.trials.exact(change), limit) if is_open else None

    def _describe_values(self, made: Result, edit: Edit) -> str | None:
        """Describe the worst value of a run that is no number in the unchanged formula, and no limit of it."""
        limit = self.limit
        if limit is None and not self.trials.exact().values:
            return "what the formula gives is not known, as the step was not run in float64"
        for name, ours in ((name, value.double()) for name, value in made.values.items()):
            itself = self._itself(name, ours)
            if ours.shape != itself.shape:
                return f"the {'loss' if name == 'loss' else 'output'} has another shape than the formula gives"
            tends = itself if limit is None else limit.values.get(name, itself).double()
            unknown = ~torch.isfinite(tends) & ~torch.isfinite(itself)
            lacks = self._lacks(name, itself) if limit is not None or self.smaller is not None else unknown
            if _with_other_numbers(edit) != edit:  # another form of the same puts no number anywhere
                lacks = lacks | ((tends == _GROWS) & ~torch.isfinite(itself))
            if self.meets_infinity and bool(unknown.any()):
                lacks = lacks | (unknown & self._shows(edit, name))
            off = torch.where(torch.isfinite(tends), ours - tends, 0.0).abs().masked_fill(lacks, torch.inf)
            replaced = (off > TOLERANCE * _largest(tends)) & torch.isfinite(ours) & ~torch.isfinite(itself)
            if bool(replaced.any()):
                worst = int(torch.where(replaced, off, 0.0).argmax())
                return self._describe_at(worst, name, (ours, tends, itself))
        return None

    def _describe_shown(self, edit: Edit) -> str | None:
        """Describe a gradient that depends on the number that an edit puts where the formula has none.

        The mean of no elements as one more summand of a loss moves no gradient: nothing is trained by it.
        """
        clamps = [it for it in flatten((edit,)) if isinstance(it, ClampArgument)]
        if any(clamp.keeps_sign for clamp in clamps) or self.smaller is not None:
            return None
        own = self.trials.exact(edit)
        for other in dict.fromkeys(_with_other_numbers(edit, by) for by in _OTHERS):
            made = self.trials.exact(other)
            errors = gradient_errors(own, made)
            if (name := next((name for name, off in errors.items() if off > TOLERANCE), None)) is not None:
                return f"the gradient of `{name}` depends on the number that is put"
            if (left := unlike_state(made, own, counts=False)) is not None:
                return f"`{left}`, which the step leaves, depends on the number that is put"
        return None

    def _describe_at(self, place: int, name: str, values: tuple[torch.Tensor, ...]) -> str:
        """Describe an element of a value of a run beside the limit there and what the formula itself gives."""
        made = values[0]
        given, tends, gives = (float(one.flatten()[place]) for one in values)
        if name.startswith(_LEFT):
            what = f"`{name.removeprefix(_LEFT)}` is left as"
        elif name == "loss" or not made.dim():
            what = f"the {'loss' if name == 'loss' else 'output'} is"
        else:
            kind = "sample" if len(made) == self.trials.step.call.sample_count else "row"
            what = f"{kind} {place // max(made[0].numel(), 1)} gets"
        formula = f"gives {'+' if gives > 0 else '-'}Inf"
        formula = "gives NaN, and no limit was found" if math.isnan(gives) else formula
        formula = f"tends to {number(tends)}" if math.isfinite(tends) else formula
        return f"{what} {number(given)} where the formula {formula}"

    @cached_property
    def is_lacking(self) -> bool:
        """True if a value of the step has no limit, so that any number there is made up."""
        limits = self.limit.values if self.limit is not None else {}
        return any(bool(self._lacks(name, self._itself(name, value)).any()) for name, value in limits.items())

    def _itself(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a value of the unchanged step in float64, NaN if that raises an error before it."""
        return self.trials.exact().values.get(name, torch.full_like(like, torch.nan)).double()

    def _lacks(self, name: str, itself: torch.Tensor) -> torch.Tensor:
        """Return where a value of the step has neither a number nor a limit, or is infinite for its neighbours too.

        Where no neighbour could be run, it is infinite itself.
        """
        tends = self.limit.values.get(name) if self.limit is not None else None
        is_infinite = torch.isinf(itself) if tends is None else ~torch.isfinite(tends) & torch.isinf(itself)
        is_past_range = bool(is_infinite.any()) and self.smaller is not None
        is_open = torch.isnan(tends) & torch.isnan(itself) if tends is not None else torch.zeros_like(is_infinite)
        return is_open | (is_infinite & (not is_past_range))

    def _shows(self, edit: Edit, name: str) -> torch.Tensor:
        """Return where another number in the edit's place gives another value in float64, and no smaller inputs do."""
        ours, others = (self.trials.exact(one).values.get(name) for one in (edit, _with_other_numbers(edit)))
        if ours is None or others is None or ours.shape != others.shape or self.smaller is not None:
            return torch.zeros((), dtype=torch.bool)
        return (ours - others).abs() > TOLERANCE * _largest(ours)

    @cached_property
    def _moved(self) -> dict[str, torch.Tensor]:
        """What is moved along: the numbers behind the failing ops, but for whole ones, which are moved alone."""
        behind = self.behind or self.trials.step.call.batch.keys()
        return {name: value.double() for name, value in self._numbers(behind).items() if value.is_floating_point()}

    def _numbers(self, names: Set[str]) -> dict[str, torch.Tensor]:
        """Return the tensors of these names, in the model or the batch, that hold numbers."""
        held = known_tensors(self.trials.step.model, self.trials.step.call.batch)
        return {name: value.detach() for _, name, value in held if name in names and are_numbers(value)}

    def _run_beside(
        self, size: float, direction: Tensors | None = None, sites: Set[OpSite] = frozenset(), way: Way = WAYS[0]
    ) -> Result:
        """Run the step with what is given moved in a direction, and what is made at the sites in one of the ways."""
        trials, step, call = self.trials, self.trials.step, self.trials.step.call
        if direction is not None:
            shifts = {name: size * shift for name, shift in direction.items()}
            moved = {name: call.batch[name].double() + shifts[name] for name in shifts.keys() & call.batch}
            beside = replace(call, batch={**call.batch, **moved}, forward=partial(forward_beside, step, shifts))
            trials = trials.on(replace(step, call=beside))
        return trials.exact(*moves_at(sites, way, size))

    def _beside_sources(self) -> Iterator[Callable[[float], Result]]:
        """Yield runs in which what the arguments of the failing ops come from is moved, where it is made."""
        constants = self._numbers(self.constants - self._moved.keys())
        for direction in sides_of({name: value.double() for name, value in constants.items()}):
            yield partial(self._run_beside, direction=direction)
        yield from self._beside(self.sources)

    def _beside(self, sites: Set[OpSite]) -> Iterator[Callable[[float], Result]]:
        """Yield runs in which what is made at these places is moved."""
        for way in WAYS if sites else ():
            yield partial(self._run_beside, sites=sites, way=way)

    def _beside_jointly(self) -> Iterator[Callable[[float], Result]]:
        """Yield runs in which what the arguments of the failing ops come from is moved along with all that is given.

        So a forecast that stays at 0 moves with the number that it is compared with.
        """
        given = self._moved | {name: value.double() for name, value in self._numbers(self.constants).items()}
        pairs = zip(sides_of(given), WAYS, strict=False) if self.sources else ()
        for direction, way in islice(pairs, 2, None):  # along a pattern: alike to one side, apart to the other
            yield partial(self._run_beside, direction=direction, sites=self.sources, way=way)

    def _open(self, values: Tensors) -> Tensors:
        """Return where the step is NaN and every neighbour is too; nothing if it is so nowhere."""
        pairs = ((name, value, self._itself(name, value)) for name, value in values.items())
        found = {name: (value == _OUTSIDE) & torch.isnan(itself) for name, value, itself in pairs}
        return found if any(bool(places.any()) for places in found.values()) else {}

    def _follow(self, sides: Iterable[Callable[[float], Result]]) -> list[Result]:
        """Return the limit, or what stands in its place, from each of the sides from which the step can be run."""
        found, exact = list[Result](), self.trials.exact()
        for run in sides:
            runs = [*takewhile(lambda made: made.ran, map(run, _STEPS))]
            if len(runs) == len(_STEPS):
                names = _common([exact, *runs] if exact.values else runs, "values")
                values = {name: _extrapolate([made.values[name] for made in runs]) for name in names}
                names = _common(runs, "gradients")
                gradients = {name: _extrapolate([made.gradients[name] for made in runs]) for name in names}
                found.append(Result(values=values, gradients=gradients, ran=True))
        return found


def _holds_alone(trials: Trials) -> bool:
    """Return True if float64 has values, or gradients, that fp32 has not; what is NaN in both says nothing."""
    exact, reference = trials.exact(), trials.reference()
    return (exact.values_finite, exact.finite) != (reference.values_finite, reference.finite)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WriteUnlike(SingleEdit):
    """Write unlike numbers in place of one infinity; for a run alone, to see whether the numbers matter."""

    site: OpSite
    argument: str
    value: float

    def run(self, op: RunningOp) -> Any:
        made = op.run(**{self.argument: self.value})
        return torch.where(made == self.value, made * torch.linspace(1, 2, made.numel()).to(made).view_as(made), made)


def _with_other_numbers(edit: Edit, by: float = 1.0) -> Edit:
    """Return the edit with other bounds of its clamps, other values of its guards, and unlike ones for infinities."""
    return join([_with_other_number(single, by) for single in flatten((edit,))])


def _with_other_number(edit: SingleEdit, by: float) -> SingleEdit:
    if isinstance(edit, SetArgument) and edit.value is not None and math.isinf(edit.was):
        return _WriteUnlike(site=edit.site, argument=edit.argument, value=edit.value)
    if not isinstance(edit, ClampArgument | GuardArgument):
        return edit
    low, high = (4 * bound if bound is not None else None for bound in (edit.low, edit.high))
    is_put = isinstance(edit, GuardArgument) or edit.nan  # a bound alone puts no `fill`
    return replace(edit, low=low, high=high, fill=edit.fill + by if is_put else edit.fill)


def _common(runs: Sequence[Result], what: str) -> list[str]:
    """Return the names of the tensors that all runs have in the same shape."""
    first, *others = (getattr(run, what) for run in runs)
    return [name for name, one in first.items() if all(name in o and o[name].shape == one.shape for o in others)]


def _extrapolate(run: Sequence[torch.Tensor]) -> torch.Tensor:
    """Extrapolate three values to a step of 0; or `_DIVERGES`, or `_OUTSIDE` where the last is not finite."""
    first, second, third = (one.double() for one in run)
    before, last = second - first, third - second
    ratio = torch.where(before == 0, 0.0, last / before)
    settled = torch.where(before.abs() <= _SETTLED * _largest(second), second, _DIVERGES)
    limit = torch.where(last.abs() <= _SHRINKING * before.abs(), third + last * ratio / (1 - ratio), settled)
    limit = torch.where(limit.abs() <= _SHRINKING * third.abs(), 0.0, limit)  # it still shrinks, as sqrt(h) does
    return torch.where(torch.isfinite(third), limit, _OUTSIDE)


def _agreed(sides: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """Return the mean over the sides in the domain: `_DIVERGES` where one does or they differ, `_OUTSIDE` for none."""
    found = {}
    for name in sides[0] if sides else ():
        stacked = torch.stack([side[name] for side in sides if name in side])
        inside = stacked != _OUTSIDE
        mean = torch.where(inside, stacked, 0.0).sum(0) / inside.sum(0)
        spread = torch.where(inside, stacked - mean, 0.0).abs().amax(0)
        agreed = torch.where(spread <= _ALIKE * _largest(mean), mean, _DIVERGES)
        found[name] = torch.where(inside.any(0), agreed, _OUTSIDE)
    return found


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the largest finite magnitude of each row; that of all for a row as good as 0, and without rows."""
    sizes = torch.where(torch.isfinite(values), values, 0.0).abs()
    overall = sizes.amax().clamp(min=torch.finfo(torch.float32).tiny) if values.numel() else sizes.sum()
    own = sizes.flatten(1).amax(1).view(-1, *[1] * (values.dim() - 1)) if values.dim() > 1 and len(sizes) else overall
    return torch.where(own > 1e-12 * overall, own, overall)  # rounding may leave as much of 0


def _describe_gradients(made: Result, meant: Result) -> str | None:
    """Describe gradients that differ from the `meant` ones where these are numbers."""
    cut, least = (max(share * meant.gradient_norm, torch.finfo(torch.float32).tiny) for share in (_CUT, _LEAST))
    for name in sorted(made.gradients.keys() & meant.gradients):
        theirs = meant.gradients[name].double()
        known = torch.isfinite(theirs)
        ours = made.gradients[name].double()
        if bool((known & (ours == 0) & (theirs.abs() > cut)).any()):
            return f"a gradient in `{name}` is cut off, where the formula has one"
        size, off = meant.gradient_norms[name], float(torch.where(known, ours - theirs, 0.0).norm())
        if off > max(TOLERANCE * size, least):
            far = percent(off / size) if size else "far"
            return f"the gradient of `{name}` is {far} off what the formula gives or tends to"
    return None
