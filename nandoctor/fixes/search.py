"""Searches for changes that fix the failing step, and verifies each by running it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, takewhile

from nandoctor.causes.base import Candidate, list_behind, list_makers, list_sources
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.guard import GuardArgument
from nandoctor.changes.keep_fp32 import KeepModule, KeepOp
from nandoctor.changes.setting import WHOLE, SetOptimizerEps, UseFormat
from nandoctor.diagnosis.conclusion import Findings, is_mask
from nandoctor.diagnosis.run_summary import outputs_differ
from nandoctor.engine.runner import FailingStep
from nandoctor.evidence.edits import Edit, SourcePatch, Together, flatten, is_text_alone, only_widens
from nandoctor.evidence.formats import BF16, FP16, FP32, FP64, FloatFormat
from nandoctor.evidence.report import (
    NOTHING_FOUND,
    Check,
    Counterfactual,
    Diagnosis,
    Fix,
    FixSettings,
    Fp32SetSearch,
    Report,
    TrialOutcome,
)
from nandoctor.evidence.trace import SourceLine
from nandoctor.fixes.candidates import (
    by_lines,
    cost_of,
    distinct_leads,
    is_below,
    join,
    propose,
    vary_settings,
    wider_lines,
)
from nandoctor.fixes.fp32_sets import Kept, refine, search_fp32_sets
from nandoctor.fixes.later_origins import describe_later, find_later_origins
from nandoctor.fixes.meaning import Meaning
from nandoctor.fixes.notes import by_hand, describe_none, describe_search, distance_of, find_program_error
from nandoctor.fixes.proof import Verifier
from nandoctor.fixes.verify import BudgetSpent, Judgement, TrialBudget, Trials
from nandoctor.fixes.writing import ChangeWriter, WrittenChange, write_title
from nandoctor.ops import CASTS, PRODUCTS
from nandoctor.text import constant, join_first
from nandoctor.tracing.tensor_stats import measure_all

_CHANGES, _FP32_SETS, _SETTINGS = "changes of the operation", "sets of modules in fp32", "other settings"
_OF_INFINITIES = "indeterminate-form"
_EPS_LOST = "optimizer-eps-underflow"
_LARGEST_NEAR = 2.0**20  # fp32's rounding error there is at most 1/16
_CLAMPED = 8
"""The size of a clamp or guard that replaces values which are sound in fp32."""


def search_fixes(report: Report, step: FailingStep, findings: Findings, budget: TrialBudget) -> Report:
    """Add to the report what came of the suggested changes, the smallest sets of modules in fp32, and other settings.

    Nothing is tried if the step did not fail. `step.progress` is notified, and may let an interrupt end the search.
    """
    if findings.verdict in NOTHING_FOUND:
        return report
    none = "No fix was tried:"
    if findings.trace.unread:
        what = join_first(findings.trace.unread, 3)
        return replace(report, search_notes=(f"{none} none can be checked, because the output holds {what}.",))
    outputs = [stats for call in findings.trace.calls if not call.module for stats in call.outputs]
    is_output_finite = bool(outputs) and all(stats.finite for stats in outputs)
    if step.loss is None and findings.trace.raised is not None and is_output_finite:
        return replace(report, search_notes=(f"{none} the step fails in its loss, which could not be run to the end.",))
    if any(diagnosis.origin.phase == "optimizer" for diagnosis in findings.conclusion.diagnoses[:1]):
        return _fix_optimizer(report, step, findings, budget)
    search = _Search(step, findings, budget)
    with _ending_early(step):
        search.try_changes()
        search.try_fp32_sets()
        search.vary_settings()
    return search.added_to(report)


@contextmanager
def _ending_early(step: FailingStep) -> Iterator[None]:
    """Let the budget end a search and, where `step.progress` does, the user too; what was found stays."""
    try:
        with suppress(BudgetSpent):
            yield
    except KeyboardInterrupt:
        if not step.progress.stop():
            raise


def _rank(tried: list[Fix], from_fp32_sets: list[Fix], findings: Findings) -> list[Fix]:
    """Rank verified fixes first: changes at the origin, then sets found by search, then another format; by size.

    Then come fixes that leave the origin as it is: they help because an input happens to arrive in fp32. Workarounds
    follow, and what failed. Among changes of one size, the smaller error is better.
    """
    at_origin = {item.patch for item in tried}

    def key(item: Fix) -> tuple[list[bool], int, float]:
        size = _size(item.edit, findings)
        is_better = (
            item.verified,
            item.workaround is not None,
            not _is_only_upstream(item.edit, findings),
            size < WHOLE,
            item.patch in at_origin and not _replaces_sound(item.edit, findings),
        )
        return [not one for one in is_better], size, distance_of(item)

    return sorted(_distinct([*from_fp32_sets, *tried]), key=key)


def _is_only_upstream(edit: Edit, findings: Findings) -> bool:
    """Return True if a change only keeps modules in fp32, and none that the failure starts in."""
    blamed = {suspect.site.module for suspect in findings.conclusion.suspects}
    singles = flatten((edit,))
    modules = {single.module for single in singles if isinstance(single, KeepModule)}
    modules |= {single.site.module for single in singles if isinstance(single, KeepOp)}
    reaches = any(is_below(path, module) for path in blamed for module in modules)
    return only_widens(edit) and bool(modules) and not reaches


def _fix_optimizer(report: Report, step: FailingStep, findings: Findings, budget: TrialBudget) -> Report:
    """Keep the weights in fp32, and with them the optimizer's state; or use an eps that its format holds."""
    if not any(diagnosis.cause and diagnosis.cause.code == _EPS_LOST for diagnosis in findings.conclusion.diagnoses):
        told = f"No fix was tried: an optimizer's own code is not changed. {by_hand(findings)}".rstrip()
        return replace(report, search_notes=(told,))
    search = _Search(step, findings, budget)
    if any(slot.eps for slot in findings.slots):  # an eps of 0 is 0 in fp32 too
        with _ending_early(step):
            search.try_fp32_weights()
    found = (*search.added_to(report).fixes, *_fix_optimizer_eps(findings))
    return replace(report, fixes=tuple(replace(fix, rank=rank) for rank, fix in enumerate(found)))


def _fix_optimizer_eps(findings: Findings) -> Iterator[Fix]:
    """Yield the eps with which the steps of all parameters are least wrong, and what it costs."""
    safe = [slot.safe_eps for slot in findings.slots]
    if safe and all(eps is not None for eps in safe):
        eps = max(eps for eps in safe if eps is not None)
        edit = SetOptimizerEps(value=eps)
        settings = FixSettings(optimizer_eps=eps)
        written = WrittenChange(kind="setting", title=write_title(edit), text="", settings=settings)
        cost = (
            f"small gradients, whose squares are 0 in {findings.slots[0].moment.dtype}, move a weight by the gradient"
        )
        proof = Judgement(
            outcome=TrialOutcome(finite=True, max_rel_err=None),
            passes=False,
            workaround=f"{cost} / {constant(eps)} times the rate, and not by the rate",
        )
        yield _make_fix(edit, written, proof, ())


class _Search:
    """The search on one step, stage by stage, and its results so far.

    A stage raises BudgetSpent once the budget is used up.
    """

    def __init__(self, step: FailingStep, findings: Findings, budget: TrialBudget) -> None:
        self._step, self._findings, self._budget = step, findings, budget
        numerics = not (findings.sound_in_fp32 or findings.verdict == "loss-scale")
        fails = findings.trace.raised is None and not findings.trace.finite and findings.reference.finite
        # If the forward fails, the search looks at it alone.
        self._trials = Trials(step, budget, numerics=numerics, backward=findings.trace.finite, fails=fails)
        self._guilty = findings.guilty or ()
        self._writer = ChangeWriter(
            step.model, step.loss, findings.ops, findings.inside, device=step.mode.autocast_device
        )
        self._verifier = self._new_verifier()
        self._untried = [_CHANGES, _FP32_SETS, _SETTINGS]
        self._tried: list[Fix] = []
        self._from_fp32_sets: list[Fix] = []
        self._varied: list[Counterfactual] = []
        self._fp32_sets: Fp32SetSearch | None = None
        self._later: tuple[Diagnosis, ...] = ()
        self._fp32_error: float | None = None
        self._program_error: str | None = None

    def try_changes(self) -> None:
        """Try what the diagnosis suggests; nothing is tried on an error of the program."""
        self._program_error = find_program_error(self._findings, self._trials)
        if self._program_error is not None:
            self._untried.remove(_CHANGES)
            return
        if self._findings.sound_in_fp32 and self._findings.trace.policy == "none":
            self._try_lines(FP32)  # a few casts where the model computes in half precision itself, and no module
        self._attempt(propose(self._findings, self._trials), self._tried)
        self._untried.remove(_CHANGES)
        if self._findings.verdict == "numerics" and not self._succeeded:
            whole = self._trials.look(UseFormat(format=FP64))
            if whole is not None and whole.finite:
                self._try_lines(FP64)
        if self._findings.verdict == "numerics" and not self._succeeded:
            self._try_later_origins()

    def _try_lines(self, wide: FloatFormat) -> None:
        leads = distinct_leads(self._findings.conclusion, self._step.model)
        found, candidates = list[Fix](), wider_lines(leads, self._findings, wide)
        self._attempt(takewhile(lambda _: not any(fix.verified for fix in found), candidates), found)
        self._tried += [fix for fix in found if fix.verified]

    def _new_verifier(self) -> Verifier:
        # A product that overflows in fp16 is far from fp32's limit, and such networks have the slowest float64 runs.
        # Added to a mask's constant, scores are lost in fp32, as intended; in a fully masked row, float64 keeps them.
        findings, found = self._findings, self._findings.conclusion
        of_mask = any(map(is_mask, found.diagnoses))
        takes_sums = all(suspect.site.op in {*PRODUCTS, *CASTS} for suspect in found.suspects)
        is_far = any(abs(it.origin.would_be or 0.0) >= _LARGEST_NEAR for it in found.diagnoses)
        sites = {suspect.site for suspect in found.suspects}
        ops = findings.ops if self._trials.numerics else ()  # a sound fp32 is what the formula means
        sources, constants = list_sources(sites, ops)
        meaning = Meaning(
            trials=self._trials.with_gradients,
            behind=list_behind(sites, ops),
            sources=sources,
            constants=constants,
            makers=list_makers(sites, ops),
            by_hand=frozenset(op.source for op in findings.inside),
            meets_infinity=any(
                {"+inf", "-inf"} & {*it.origin.elements.kinds} or (it.cause and it.cause.code == _OF_INFINITIES)
                for it in found.diagnoses
            ),
        )
        return Verifier(
            self._trials,
            guilty=self._guilty,
            random=findings.random,
            trusts_fp32=of_mask or (takes_sums and not is_far),
            meaning=meaning,
        )

    def _try_later_origins(self) -> None:
        self._later, candidates = find_later_origins(self._findings, self._trials, self._writer)
        self._attempt(candidates, self._tried)

    def try_fp32_weights(self) -> None:
        """Try the whole model in fp32."""
        self._attempt([(KeepModule(module=""),)], self._tried)
        self._untried.clear()

    def try_fp32_sets(self) -> None:
        """Try minimal sets of modules in fp32, if fp32 does not fail; then later origins, as in the backward pass."""
        findings, trials = self._findings, self._trials
        if findings.sound_in_fp32:
            self._fp32_sets, found = search_fp32_sets(findings, trials, is_fix=self._is_verified)
            self._attempt((self._as_printed(kept) for kept in found if self._is_of_use(kept)), self._from_fp32_sets)
            if not self._succeeded:
                self._try_lines(FP32)
            if self._step.low is FP16 and not self._succeeded:  # the last resort: it costs precision everywhere
                self._attempt([(UseFormat(format=BF16),)], self._tried)
            if self._step.loss is not None and not self._succeeded:
                self._try_later_origins()
        if self._fp32_sets is None or self._fp32_sets.complete:
            self._untried.remove(_FP32_SETS)

    def _is_verified(self, kept: Kept) -> bool:
        return self._is_of_use(kept) and any(fix.verified for fix in self._try(self._as_printed(kept)))

    def _is_of_use(self, kept: Kept) -> bool:
        """Return False for a set that helps only because an input arrives in fp32, if there is a proper fix."""
        return not (self._succeeded and _is_only_upstream(join(kept), self._findings))

    def _as_printed(self, kept: Kept) -> Candidate:
        """Return the set as lines of code, and as modules with everything below them, but never the whole model."""
        lines = by_lines(kept, self._findings, self._step.model)
        whole = tuple(replace(member, children=True) for member in kept)
        paths = [member.module for member in kept if member.module]
        outer = [it for it in whole if not any(it.module != path and is_below(it.module, path) for path in paths)]
        is_another = whole != kept and len(paths) == len(kept)
        return (*lines, refine(kept, self._findings, self._trials), *([join(outer)] if is_another else []))

    def vary_settings(self) -> None:
        """Run variations to show what the failure depends on, and measure whether finite fp32 values are right."""
        self._fp32_error = self._verifier.fp32_error
        for outcome in vary_settings(self._trials, self._guilty, verified=self._succeeded):
            self._varied.append(outcome)
            self._notify()
        self._untried.remove(_SETTINGS)

    def added_to(self, report: Report) -> Report:
        """Return the report with what was found so far."""
        ranked = _rank(self._tried, self._from_fp32_sets, self._findings)
        ops, untried = self._findings.ops, ", ".join(self._untried)
        stopped = f"Interrupted: the search for fixes is not complete. Not or not fully tried: {untried}."
        interrupted = self._step.progress.interrupted
        left = [] if interrupted else self._untried
        found_none = not ranked and _CHANGES not in self._untried and self._program_error is None
        return replace(
            report,
            fixes=tuple(replace(item, rank=rank, cost=cost_of(item.edit, ops)) for rank, item in enumerate(ranked)),
            fp32_sets=self._fp32_sets,
            counterfactuals=tuple(self._varied),
            also=(*report.also, *self._later),
            fp32_error=self._fp32_error,
            search_notes=(
                *([stopped] if interrupted else []),
                *([self._program_error] if self._program_error is not None else []),
                *describe_later(self._later),
                *describe_search(self._findings, ranked, left, out_of_memory=self._budget.out_of_memory),
                *([describe_none(self._findings, self._step.model)] if found_none else []),
                *(self._describe_drift() if ranked else ()),
            ),
        )

    def _describe_drift(self) -> Iterator[str]:
        """Yield a note if the unchanged step gave another output in fp32 than before: some state was not put back."""
        again, before = self._verifier.trials.known_reference, self._findings.reference.output
        values = again.values if again is not None and self._findings.exposed is None else {}
        now = {path.removeprefix("output."): measure_all([("", value)]) for path, value in values.items()}
        pairs = [(now[stats.path], (replace(stats, path=""),)) for stats in before if stats.path in now]
        if any(one[0].finite != other[0].finite or outputs_differ(one, other) for one, other in pairs if one):
            yield (
                "The unchanged step gave another output in the search than before it: it keeps state outside of its "
                "modules (in a file's globals, a cache or an object), which runs do not put back. The fixes may fail."
            )

    @property
    def _succeeded(self) -> bool:
        return any(fix.verified for fix in (*self._tried, *self._from_fp32_sets))

    def _attempt(self, candidates: Iterable[Candidate], tried: list[Fix]) -> None:
        for candidate in candidates:
            start = len(tried)
            tried += self._try(candidate)  # kept if the budget ends while its parts are left out
            self._notify()
            tried[start:] = self._without_idle_parts(tried[start:])

    def _without_idle_parts(self, found: list[Fix]) -> list[Fix]:
        """Return a change of several places without superfluous ones: the change of one may fix another."""
        is_verified = any(fix.verified for fix in found)
        parts = flatten(fix.edit for fix in found if fix.verified or fix.workaround is not None)
        if len(parts) > 1 and not any(isinstance(part, KeepModule) for part in parts):
            for part in parts:
                smaller = self._try((join([other for other in parts if other is not part]),))
                if any(fix.verified or (fix.workaround is not None and not is_verified) for fix in smaller):
                    return self._without_idle_parts(smaller)
        return found

    def _notify(self) -> None:
        self._step.progress.searched(self._budget.num_run, self._budget.max_trials)

    def _try(self, candidate: Candidate) -> list[Fix]:
        """Return the first strength of a change that passes as printed text, else the nearest one."""
        tried = list[Fix]()
        for made in chain.from_iterable(map(self._try_filled, candidate)):
            if made.verified or (made.workaround is not None and self._verifier.meaning.is_lacking):
                return [made]
            tried.append(made)
        return [self._as_workaround(min(tried, key=_shortfall))] if tried else []

    def _try_filled(self, edit: Edit) -> Iterator[Fix]:
        """Yield a change as it was tried; after a guard that is a workaround also that with the formula's limit."""
        if (made := self._try_strength(edit)) is None:
            return
        yield made
        if made.workaround is not None and isinstance(edit, GuardArgument):
            filled = replace(edit, fill=self._verifier.meaning.find_fill(edit))
            if filled != edit and (again := self._try_strength(filled)) is not None:
                yield again

    def _as_workaround(self, fix: Fix) -> Fix:
        """Return a change that is finite but off what the formula gives with all checks: it replaces something."""
        if fix.checks or not fix.outcome.finite or fix.kind == "advice":
            return fix
        written = next(self._writer.write(fix.edit))
        with suppress(BudgetSpent):
            return _make_fix(fix.edit, written, *self._verifier.verify(written, fix.edit))
        return fix

    def _try_strength(self, edit: Edit) -> Fix | None:
        """Run a change, and its texts up to one that passes; None for one without a text.

        If fp32 is sound, the text is run without a probe: its output shows a failure as soon as a probe's would.
        """
        written, made = list(self._writer.write(edit)), None
        if not written and isinstance(edit, Together):  # the place of one may be in a library; another may do for both
            ours = [single for single in edit.edits if any(self._writer.write(single))]
            if 0 < len(ours) < len(edit.edits):
                return self._try_strength(join(ours))
        if not written and is_text_alone(edit):
            return None
        if (self._trials.numerics and not is_text_alone(edit)) or not written:
            probe = self._trials.judge(edit)
            advice = WrittenChange(kind="advice", title=write_title(edit), text="")
            made = _make_fix(edit, next(iter(written), advice), replace(probe, passes=False), ())
            written = written if probe.passes or isinstance(edit, KeepOp) else []
        for text in written:
            proof, checks = self._verifier.verify(text, edit)
            fails_at_once = checks[0].status == "failed"
            made = _make_fix(edit, text, proof, checks)
            if proof.passes or fails_at_once:
                self._trials.note(edit, proof)
            # A probe cannot widen an op that writes to its argument, but another text may.
            if proof.passes or (fails_at_once and not isinstance(edit, KeepOp)):
                break
        return made


def _shortfall(fix: Fix) -> tuple[bool, bool, bool, float]:
    """Return a key that is least for a workaround, then for what is finite, then for a text, then for the nearest."""
    distance = distance_of(fix) if fix.workaround is None else 0.0
    return fix.workaround is None, math.isinf(distance), fix.kind == "advice", distance


def _make_fix(edit: Edit, written: WrittenChange, proof: Judgement, checks: tuple[Check, ...]) -> Fix:
    source = written.change if isinstance(written.change, SourcePatch) and written.kind == "source" else None
    return Fix(
        kind=written.kind,
        edit=edit,
        title=written.title,
        patch=written.text,
        patch_root=None if source is None else source.root,
        files=() if source is None else source.files,
        settings=written.settings,
        verified=proof.passes,
        workaround=proof.workaround,
        checks=checks,
        outcome=proof.outcome,
        rank=0,
    )


def _distinct(tried: Iterable[Fix]) -> list[Fix]:
    """Drop duplicates, and changes of which a part is enough: further edits, or a whole line in fp32.

    Of those that failed, one of each title is kept: two expressions of a line have the same.
    """
    found: dict[object, Fix] = {}
    for item in tried:
        key = (item.kind, item.patch or item.title) if item.verified else item.title
        known = found.get(key)
        if known is None or (item.checks and known.workaround is None):  # one known to fail has no checks
            found[key] = item
    distinct = list(found.values())
    enough = [set(flatten((item.edit,))) for item in distinct if item.verified]
    distinct = [item for item in distinct if not any(edits < set(flatten((item.edit,))) for edits in enough)]
    whole = [item for item in distinct if isinstance(item.edit, KeepOp) and item.edit.is_line]
    parts = {_line_in_fp32(item) for item in distinct if item.verified and item not in whole} - {None}
    return [item for item in distinct if not (item in whole and _line_in_fp32(item) in parts)]


def _line_in_fp32(fix: Fix) -> SourceLine | None:
    source = fix.edit.site.source if isinstance(fix.edit, KeepOp) else None
    return source.whole if source is not None else None


def _size(edit: Edit, findings: Findings) -> int:
    """Return the size of a change, from a number in the code over an op, a line and modules to everything."""
    if isinstance(edit, Together):
        return sum(_size(single, findings) for single in edit.edits)
    if isinstance(edit, KeepModule):
        called = {call.module for call in findings.trace.calls}
        return 5 + (sum(is_below(path, edit.module) for path in called) if edit.children else 1)
    return _CLAMPED if _replaces_sound(edit, findings) else edit.size


def _replaces_sound(edit: Edit, findings: Findings) -> bool:
    """Return True for a clamp or guard where fp32 shows that the values are sound: keeping them is better."""
    return isinstance(edit, ClampArgument | GuardArgument) and findings.verdict in ("precision", "silent")
