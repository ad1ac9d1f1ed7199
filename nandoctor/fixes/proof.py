"""Verifies a change by running exactly the text that is printed, on the failing batch and on variations of it.

A change of the batch applies to that batch alone, so it is not tried on variations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Literal

import torch

from nandoctor.evidence.edits import Change, Edit, Snippet, SourcePatch, flatten, only_widens
from nandoctor.evidence.report import Check
from nandoctor.fixes.agreement import (
    BF16_TOLERANCE,
    FP32_ERROR,
    LARGEST_SQUARED,
    MOST_NOISE,
    TOLERANCE,
    Result,
    compare_runs,
    gradients_finite,
    sample_errors,
)
from nandoctor.fixes.changed_lines import failing_op
from nandoctor.fixes.gradient_check import GradientCheck, Said, at_scale, in_bf16, run_lowered
from nandoctor.fixes.hidden_values import describe_hidden
from nandoctor.fixes.source_bounds import describe_cost, edges_of
from nandoctor.fixes.source_changes import PastBound
from nandoctor.fixes.variations import (
    NEARLY_THE_SAME,
    OTHER_SEED,
    SCALED,
    VARIATIONS,
    extreme_samples,
    scaled,
    squared_surrogate,
    surrogate_loss,
)
from nandoctor.fixes.verify import Judgement, Trials, selects, with_samples
from nandoctor.fixes.writing import WrittenChange
from nandoctor.replaying.runner import FailingStep
from nandoctor.text import are, constant, join_first, join_words, number, percent

_COARSER_IN_BF16 = 8
"""The ratio of rounding errors: bf16 has 8 bits and fp16 has 11."""
_NOT_RUN: Said = "not-checked", "not run, because an earlier check failed"
_AS_FP32: Said = "passed", "finite wherever fp32 is"
_FACTORS = tuple(0.5 * 4.0**-n for n in range(6))
"""exp is finite in float64 up to 709, in fp32 up to 88: with steps of 4, one factor lands between the two."""


class Verifier:
    """A verifier of the written changes of one step, which shares the runs that they are compared with.

    `guilty` are the samples to blame, () if unknown; `random`: random numbers are drawn; `trusts_fp32`: no float64 run.
    """

    def __init__(self, trials: Trials, *, guilty: tuple[int, ...], random: bool, trusts_fp32: bool) -> None:
        self._trials, self._search_trials = trials.with_gradients, trials
        self._guilty, self._random, self._trusts_fp32 = guilty, random, trusts_fp32
        samples = range(trials.step.num_samples or 0)
        self._healthy = tuple(sample for sample in samples if sample not in guilty) if guilty else ()
        self._gradients = GradientCheck(self._trials, healthy=self._healthy)
        self._verified: dict[object, tuple[Judgement, tuple[Check, ...]]] = {}

    def verify(self, written: WrittenChange, edit: Edit) -> tuple[Judgement, tuple[Check, ...]]:
        """Run the step with the written change and its gradients, then variations, up to the first check that fails.

        A change that was verified before is not run again.
        """
        key = written.kind, written.text, written.settings
        if key not in self._verified:
            self._verified[key] = self._verify(written, edit)
        return self._verified[key]

    def _verify(self, written: WrittenChange, edit: Edit) -> tuple[Judgement, tuple[Check, ...]]:
        change = written.change if written.change is not None else edit
        self._trials.sound_reference((change,))  # with it known, a change that fails needs no backward pass
        made, scale = self._gradients.run(change)
        judgement = self._trials.assess(made, (change,))
        criteria: list[tuple[str, Callable[[], Said]]] = [
            ("output", lambda: self._judge_output(judgement, made, change)),
            ("loss", lambda: self._gradients.judge_loss(made)),
            ("gradients", lambda: self._gradients.judge(change, made, scale, in_backward=written.in_backward)),
            ("loss scale", lambda: self._gradients.judge_growth(change, scale)),
            ("healthy samples", lambda: self._judge_healthy(change, made)),
        ]
        off = self.fp32_error if judgement.passes and not selects((change,)) else None
        if off is not None and not compare_runs(made, self._search_trials.exact()).agrees():  # fp32 proves nothing
            doubt = f"fp32 itself is {percent(off)} off float64 here"
            criteria.insert(1, ("float64", lambda: ("failed", doubt)))
        if spoilt := self._trials.list_spoilt(made):
            left = f"{join_first([f'`{name}`' for name in spoilt], 3)} {are(len(spoilt))} left with NaN or Inf"
            criteria.insert(2, ("buffers", lambda: ("failed", left)))
        if written.at_edge is not None:
            criteria.append(("values at the edge", partial(self._judge_edge, written.at_edge, edit, scale)))
        if written.past_bound is not None:
            criteria.append(("exponents past the bound", partial(self._judge_past_bound, written.past_bound)))
        elif written.in_backward and not self._trials.sound_reference(()).finite:
            criteria.append(("backward", lambda: ("failed", "there are no sound gradients to compare with")))
        source = change.source if isinstance(change, Snippet) else change
        mended = source if isinstance(source, SourcePatch) and not only_widens(edit) else None
        judge_varied = cache(partial(self._judge_variation, written, change, scale, mended))
        criteria.append(("samples to blame alone", partial(self._judge_alone, change, judge_varied)))
        checks: list[Check] = []
        for name, judge in criteria:
            failed = any(check.status == "failed" for check in checks)
            status, text = _NOT_RUN if failed else judge()
            checks.append(Check(name=name, status=status, text=text))
        for name in self._variations:
            failed = any(check.status == "failed" for check in checks)
            not_run = Check(name=name, status=_NOT_RUN[0], text=_NOT_RUN[1])
            checks.append(not_run if failed else self._check_variation(name, edit, judge_varied))
        passes = all(check.status != "failed" for check in checks)
        hidden = describe_hidden(replace(self._trials.step, changes=(change,))) if passes else None
        if hidden is not None:
            checks.append(Check(name="hidden values", status="failed", text=hidden[0].lower() + hidden[1:].rstrip(".")))
            passes = False
        return Judgement(outcome=judgement.outcome, passes=passes), tuple(checks)

    def _judge_output(self, judgement: Judgement, made: Result, change: Change) -> Said:
        error = judgement.outcome.max_rel_err
        if not judgement.outcome.finite or error is None:
            return "failed", "the output is not finite wherever it should be"
        largest = made.largest_finite
        if "loss" not in made.values and largest > LARGEST_SQUARED > self._trials.reference().largest_finite:
            return "failed", f"finite, up to {number(largest)}: its square, as in a squared error, overflows in fp32"
        besides = " except for infinities that fp32 has there too" if made.meant else ""
        told = f"finite{besides}, {percent(error)} off fp32"
        if not judgement.passes:
            return "failed", told
        off = self._error_of_smaller(change)
        if off is not None:
            return "failed", f"{told}, but {off}"
        return "passed", told + self._describe_rounding(change, made)

    def _describe_rounding(self, change: Change, made: Result) -> str:
        """Say that only rounding explains an accepted error of a sample, which may be large beside its own values."""
        own = compare_runs(made, self._trials.sound_reference((change,))).max_rel_err
        beside = f" (a small sample is {percent(own)} off)" if own > BF16_TOLERANCE else ""
        return f", within what rounding costs here{beside}" if own > TOLERANCE else ""

    def _error_of_smaller(self, change: Change) -> str | None:
        """Describe the change's error against float64 with smaller inputs; None if accepted, or not needed."""
        if selects((change,)) or self._smaller is None:
            return None
        factor, trials = self._smaller
        beside = compare_runs(trials.reference(change), trials.exact())
        if beside.finite and beside.agrees(unsure=compare_runs(trials.reference(), trials.exact())):
            return None
        return f"{percent(beside.max_rel_err)} off float64 with inputs of {factor:g} times the size"

    @cached_property
    def fp32_error(self) -> float | None:
        """The error of the unchanged step in fp32 against float64, if it is large and both are finite; else None."""
        if self._trials.numerics or self._trusts_fp32:
            return None
        reference, exact = self._search_trials.reference(), self._search_trials.exact()
        if not (reference.values_finite and exact.values_finite):
            return None
        off = compare_runs(reference, exact).max_rel_err
        return off if off > FP32_ERROR else None

    @cached_property
    def _smaller(self) -> tuple[float, Trials] | None:
        """The largest input factor with which float64 is finite, its gradients too if possible; and its trials."""
        if not self._trials.numerics or self._trials.exact().finite:
            return None
        found = None
        for factor in _FACTORS:
            batch = scaled(self._trials.step.batch, self._trials.step.used, factor)
            trials = self._trials.on(replace(self._trials.step, batch=batch)) if batch is not None else None
            if trials is None:
                return None
            if trials.exact().values_finite and (found is None or trials.exact().finite):
                found = factor, trials
            if trials.exact().finite:
                break
        return found

    def _judge_edge(self, at_edge: SourcePatch, edit: Edit, scale: float | None) -> Said:
        """Check that all stays finite with values exactly on the edge of a domain, which the next batch may have."""
        made, lowered = run_lowered(self._trials, at_edge, scale)
        edits = flatten((edit,))
        told = " and ".join(dict.fromkeys(constant(edge) for single in edits for edge in edges_of(single)))
        if not made.ran:
            return "not-checked", f"the step cannot be run with arguments of exactly {told}"
        if not made.finite:
            what = "gradients are" if made.values_finite else "output is"
            return "failed", f"{what} not finite with arguments of exactly {told}"
        cost = describe_cost(edits)
        at = "" if lowered is None else f" at loss scale {number(lowered)}"
        return "passed", f"finite with arguments of exactly {told}{at}{f'; {cost}' if cost else ''}"

    def _judge_past_bound(self, written: PastBound) -> Said:
        """Check that exponents past the bound of a clamp give what float64 gives without the clamp.

        One score past the bound of a softmax may still be the largest; two of them would tie.
        """
        trials = self._trials
        asked = written.in_backward or written.is_shared
        unknown: Literal["failed", "not-checked"] = "failed" if asked else "not-checked"
        if trials.numerics and not trials.exact().finite:
            if self._smaller is None:
                return unknown, "float64 overflows too: nothing shows what such exponents should give"
            _, trials = self._smaller
        runs = trials.reference(written.changed), trials.exact(written.unchanged), trials.exact()
        changed, exact, before = (replace(run, values=run.gradients) if written.in_backward else run for run in runs)
        made = compare_runs(changed, exact)
        if not exact.ran or not made.values or (written.in_backward and not exact.gradients_finite):
            return unknown, "the step cannot be run in float64 with such exponents"
        usual = compare_runs(exact, before).values
        off = max(
            float((found.largest / torch.maximum(found.magnitude, usual[name].magnitude)).max())
            for name, found in made.values.items()
        )
        said = f"{percent(off)} off float64 with all exponents past the bound"
        return "passed" if off <= TOLERANCE else "failed", said

    def _judge_healthy(self, change: Change, made: Result) -> Said:
        """Check that no healthy sample is off fp32 or its old value by more than 1 % or its error before the change."""
        if selects((change,)):
            return "not-checked", "the change takes samples out of the batch"
        if not self._healthy:
            return "not-checked", "every sample fails" if self._guilty else "the samples to blame are not known"
        # The samples that are not to blame are sound in the unchanged step; only their values are compared.
        before, reference = self._search_trials.run(), self._trials.sound_reference((change,))
        size = self._trials.step.num_samples
        errors = [sample_errors(one, other, size) for one, other in ((made, reference), (made, before))]
        own = sample_errors(before, reference, size)
        if own is None or errors[0] is None or errors[1] is None:
            return "not-checked", "no output has the samples as its first dimension"
        rows = list(self._healthy)
        if not bool(torch.isfinite(own[rows]).all()):
            return self._judge_healthy_alone(change)
        off = torch.minimum(*errors)[rows]  # type: ignore[arg-type]
        coarser = _COARSER_IN_BF16 if in_bf16(change, before=False) else 1
        allowed = (coarser * own).clamp(min=TOLERANCE, max=MOST_NOISE)[rows]
        largest = float(off.max())
        moved = f"change by {percent(largest)}" if largest else "do not change"
        text = f"the samples that were fine {moved}"
        return "passed" if bool((off <= allowed).all()) else "failed", text

    def _judge_healthy_alone(self, change: Change) -> Said:
        """Compare the healthy samples in fp32 in a batch of their own, because the failure spread to them."""
        others = self._trials_of(self._healthy)
        unchanged = others.reference()
        if not unchanged.finite:
            return "not-checked", "the samples that were fine cannot be run alone"
        comparison = compare_runs(others.reference(change), unchanged)
        if not comparison.finite:
            return "failed", "the samples that were fine are not finite alone"
        text = f"alone in fp32 the samples that were fine change by {percent(comparison.max_rel_err)}"
        return "passed" if comparison.agrees() else "failed", text

    @cached_property
    def _variations(self) -> Mapping[str, Trials | None]:
        """The trials of the step's variations, by name; None for a variation that does not apply."""
        return {name: self._varied((name,), self._trials.step) for name in (*VARIATIONS, OTHER_SEED)}

    def _varied(self, names: Iterable[str], step: FailingStep) -> Trials | None:
        """Return the trials of a step varied in all of these ways; None if one of them does not apply."""
        for name in names:
            if name == OTHER_SEED:
                varied = replace(step, seed=(step.seed or 0) + 1) if self._random else None
            else:
                batch = VARIATIONS[name](step.batch, step.used)
                varied = replace(step, batch=batch) if batch is not None else None
            if varied is None:
                return None
            step = varied
        return self._trials.on(step)

    @cached_property
    def _joined(self) -> Mapping[tuple[str, ...], Trials | None]:
        """Combined variations, on a few samples: all that hardly change the values, alone and with each scaling."""
        alike = tuple(name for name in NEARLY_THE_SAME if self._variations[name] is not None)
        scaled = ((name, *alike) for name in SCALED if self._variations[name] is not None)
        # Scale first: flags of 0 and 1 are not scaled, and noise would disguise them.
        step = self._trials.step
        few = step if self.few is None else with_samples(step, self.few)
        return {names: self._varied(names, few) for names in (alike, *scaled)}

    def _first_tries(self, name: str, *, widens: bool) -> Iterator[list[tuple[str, ...]]]:
        """Yield tries, each of combined variations, to run before one by itself; it is settled if all of a try pass.

        A change that only `widens` formats can fail only because of the size of values: if small changes do no harm at
        half and at double the size, they do none at the original size. This is not true of a guard around 1, say.
        """
        scaled = [names for names in self._joined if name in names and names[0] in SCALED]
        if len(scaled) == (1 if name in SCALED else len(SCALED)) and (widens or name in SCALED):
            yield scaled
        yield from ([names] for names in self._joined if name in names and names not in scaled)

    @cached_property
    def few(self) -> tuple[int, ...] | None:
        """Two of the samples to blame and one other, if these are at most half of the batch; else None.

        They are those with the largest values, and of those to blame also the one with the smallest.
        """
        step, size = self._trials.step, self._trials.step.num_samples or 0
        guilty = extreme_samples(self._guilty, step.batch, step.used, size)
        few = sorted((*guilty, *extreme_samples(self._healthy, step.batch, step.used, size)[:1]))
        return tuple(few) if guilty and 2 * len(few) <= size else None

    def _check_variation(self, name: str, edit: Edit, judge: Callable[[Trials | None], Said]) -> Check:
        """Judge a variation combined with others; if that does not pass, by itself on the whole batch."""
        for tried in self._first_tries(name, widens=only_widens(edit)):
            said = [judge(self._joined[names]) for names in tried]
            if all(status == "passed" for status, _ in said) and _AS_FP32 not in said:
                others = dict.fromkeys(other for names in tried for other in names if other != name)
                text = f"{said[-1][1]}, along with {', '.join(others)}" if others else said[-1][1]
                return Check(name=name, status="passed", text=text, samples=self.few)
        status, text = judge(self._variations[name])
        return Check(name=name, status=status, text=text)

    @cached_property
    def _guilty_alone(self) -> Trials | None:
        return self._trials_of(self._guilty) if self._healthy else None

    @cached_property
    def _others_alone(self) -> Trials | None:
        """The trials of as many healthy samples as there are samples to blame; None if there are fewer."""
        number_of = len(self._guilty)
        return self._trials_of(self._healthy[:number_of]) if number_of <= len(self._healthy) else None

    def _trials_of(self, samples: tuple[int, ...]) -> Trials:
        return self._trials.on(with_samples(self._trials.step, samples))

    def _judge_alone(self, change: Change, judge: Callable[[Trials | None], Said]) -> Said:
        """Judge as a variation, but excuse a loss (of pairs, say) that is not finite for so few samples."""
        alone, others = self._guilty_alone, self._others_alone
        said = judge(alone)
        if said[0] != "failed":
            return said
        if others is not None and not others.run().finite:
            if judge(others)[0] == "failed":
                return "not-checked", "without the change, the same number of the samples that were fine fails too"
        elif alone is not None and alone.reference(change).only_loss_fails:
            return "not-checked", "their output alone is finite in fp32, but their loss is not"
        return said

    def _judge_variation(
        self,
        written: WrittenChange,
        change: Change,
        scale: float | None,
        mended: SourcePatch | None,
        varied: Trials | None,
    ) -> Said:
        """Check only that the varied step is finite: there it may magnify fp16's rounding.

        A `mended` patch changes more than formats: its statements must not make non-finite values even where fp32 does.
        """
        if written.kind == "data":
            return "not-checked", "the change is of this batch alone"
        if varied is None:
            return "not-checked", "the step has no such variation"
        made, lowered = run_lowered(varied, change, scale)
        if made.finite:
            made_up = self._gradients.tell_made_up(made)
            told = self._describe_finite(made, lowered)
            return ("passed", told) if made_up is None else ("failed", f"gradients are {made_up}")
        if made.values_finite and varied.step.loss is squared_surrogate and varied.reference(change).finite:
            # The change is sound in fp32: what fp16 cannot hold may be the stand-in loss's own gradient.
            plain = self._trials.on(replace(varied.step, loss=surrogate_loss))
            if plain.run(*at_scale(change, 1.0)).finite:
                return "passed", "output finite, gradients too where they do not grow with the output"
        said = self._excuse(made, varied.reference())
        is_excused = said[0] != "failed" and made.ran and not made.values_finite
        traces = varied.trace(mended) if is_excused and mended is not None else None
        failing = failing_op(mended, traces[0]) if mended is not None and traces is not None else None
        if failing is None:
            return said
        return "failed", f"{failing.op} is not finite there, in a changed statement"

    def _describe_finite(self, made: Result, lowered: float | None) -> str:
        """Describe what was finite; there may be no gradients, and a stand-in loss has no value."""
        parts = ["output", *(["loss"] if "loss" in made.values else []), *(["gradients"] if made.gradients else [])]
        only = " alone" if len(parts) == 1 else ""
        at = "" if lowered is None else f", at loss scale {number(lowered)}"
        return f"{join_words(parts)}{only} finite{at}"

    def _excuse(self, made: Result, reference: Result) -> Said:
        """Check whether a non-finite run is non-finite only where the unchanged step in fp32 is too."""
        if not reference.ran:
            return "not-checked", "the unchanged step cannot be run on such a batch"
        if not self._trials.numerics and made.ran:
            if compare_runs(made, reference).finite and gradients_finite(made, reference):
                return _AS_FP32
            if not reference.finite:
                return "not-checked", "fp32 fails there as well"
        return "failed", "output is not finite" if not made.values_finite else "gradients are not finite"
