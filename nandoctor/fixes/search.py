"""From a diagnosis to changes that fix the step, each proved by running it.

In: the failing step, the findings and a budget. Out: `FixSearch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from nandoctor.causes.base import Candidate, site_of
from nandoctor.diagnosis.findings import Findings
from nandoctor.evidence.changes import SourcePatch
from nandoctor.evidence.edits import (
    ClampArgument,
    Edit,
    KeepModule,
    KeepOp,
    KeepSamples,
    OpSite,
    ScaleFirst,
    SetOptimizerEps,
    Together,
    UseFormat,
)
from nandoctor.evidence.formats import BF16, FP16
from nandoctor.evidence.report import (
    Check,
    Counterfactual,
    Fix,
    FixSettings,
    Fp32Module,
    Fp32Set,
    Fp32SetSearch,
    TrialOutcome,
)
from nandoctor.evidence.trace import LOSS, SourceLine
from nandoctor.evidence.verdicts import NOTHING_FOUND
from nandoctor.fixes.candidates import guilty_samples, is_below, join, propose, without_guilty
from nandoctor.fixes.counterfactuals import describe_coupling, vary_settings
from nandoctor.fixes.proof import Verifier
from nandoctor.fixes.titles import write_title
from nandoctor.fixes.verify import BudgetSpent, Judgement, TrialBudget, Trials
from nandoctor.fixes.writing import ChangeWriter, WrittenChange
from nandoctor.minimal_sets import find_minimal_sets
from nandoctor.ops import PRODUCTS
from nandoctor.replaying.progress import Listener
from nandoctor.replaying.runner import FailingStep
from nandoctor.text import join_first, plural

_CHANGES = "changes of the operation"
_FOR_THE_REST = 0.2
"""The share of the budget that the search for sets leaves, among thousands of modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixSearch:
    """What was tried, verified fixes first and the smallest of them first; `notes` tell what a budget left untried."""

    fixes: tuple[Fix, ...] = ()
    fp32_sets: Fp32SetSearch | None = None
    counterfactuals: tuple[Counterfactual, ...] = ()
    notes: tuple[str, ...] = ()


def search_fixes(
    step: FailingStep, findings: Findings, budget: TrialBudget, listener: Listener | None = None
) -> FixSearch:
    """Try what the diagnosis suggests, then the smallest sets of modules in fp32, then other settings.

    Nothing is tried for a step that did not fail. `listener` hears how it gets on, and may let an interrupt end it.
    """
    listener = listener or Listener()
    if findings.verdict in NOTHING_FOUND:
        return FixSearch()
    if findings.trace.unread:
        what = join_first(findings.trace.unread, 3)
        return FixSearch(notes=(f"No fix was tried: none can be checked where the output holds {what}.",))
    trials = Trials(
        step,
        budget,
        numerics=findings.verdict not in ("precision", "silent", "loss-scale"),
        backward=findings.trace.finite,  # a forward that fails is searched on by itself
    )
    if _blames_optimizer(findings):
        return FixSearch(fixes=tuple(_fix_optimizer_eps(findings)))
    guilty = guilty_samples(findings)
    attempts = _Attempts(
        trials=trials,
        writer=ChangeWriter(step.model, findings.trace.ops),
        verifier=Verifier(trials, guilty=guilty, random=findings.random),
        told=lambda best: listener.searched(budget.num_run, budget.max_trials, best),
    )
    varied: list[Counterfactual] = []
    search = None
    untried = [_CHANGES, "sets of modules in fp32", "other settings"]
    with suppress(BudgetSpent), _ending_gently(listener):
        attempts.make(propose(findings, trials))
        untried.remove(_CHANGES)
        if findings.verdict == "numerics" and not attempts.succeeded:
            attempts.make(without_guilty(findings, step.num_samples))
        if findings.verdict in ("precision", "silent"):
            with budget.holding_back(_FOR_THE_REST):
                search, found = _search_fp32_sets(findings, trials)
            # What helps by the way, because an input happens to arrive in fp32, is of no use beside a fix of the place.
            of_use = (kept for kept in found if not (attempts.succeeded and _is_only_upstream(join(kept), findings)))
            attempts.make(((_refine(kept, findings, trials),) for kept in of_use), from_fp32_sets=True)
            if step.low is FP16 and not attempts.succeeded:  # the last resort: it costs precision everywhere
                attempts.make([(UseFormat(format=BF16),)])
        if search is None or search.complete:
            untried.remove("sets of modules in fp32")
        for outcome in vary_settings(trials, guilty, random=findings.random):
            varied.append(outcome)
            attempts.tell()
        untried.remove("other settings")
    ranked = _rank(attempts.tried, attempts.from_fp32_sets, findings)
    left = [] if listener.interrupted else untried
    notes = _notes(findings, ranked, left, out_of_memory=budget.out_of_memory)
    return FixSearch(
        fixes=tuple(replace(item, rank=rank) for rank, item in enumerate(ranked)),
        fp32_sets=search,
        counterfactuals=tuple(varied),
        notes=(*_notes_of_interrupt(listener, untried), *notes, *describe_coupling(varied, step)),
    )


@contextmanager
def _ending_gently(listener: Listener) -> Iterator[None]:
    """Let an interrupt end what is inside, where the listener wants the rest of the report."""
    try:
        yield
    except KeyboardInterrupt:
        if not listener.stops_gently:
            raise
        listener.interrupted = True


def _notes_of_interrupt(listener: Listener, untried: Sequence[str]) -> Iterator[str]:
    if listener.interrupted:
        yield f"Interrupted: the search for fixes is not complete. Not or not fully tried: {', '.join(untried)}."


def _rank(tried: list[Fix], from_fp32_sets: list[Fix], findings: Findings) -> list[Fix]:
    """Verified fixes first: changes at the origin, then sets found by search, then another format; by size.

    Then comes what leaves the origin as it is, and helps because its input happens to arrive in fp32. Last come samples
    left out, which is of use to this batch alone.
    """

    def key(item: Fix) -> tuple[bool, bool, bool, bool, bool, int]:
        size = _size(item.edit, findings)
        only_upstream = _is_only_upstream(item.edit, findings)
        of_batch = item.kind == "data"
        return not item.verified, of_batch, only_upstream, size >= _WHOLE, item.patch not in at_origin, size

    at_origin = {item.patch for item in tried}
    return sorted(_distinct([*from_fp32_sets, *tried]), key=key)


def _is_only_upstream(edit: Edit, findings: Findings) -> bool:
    """Tell whether all that a change does is to keep other modules in fp32 than those that the failure starts in."""
    blamed = {suspect.site.module for suspect in findings.conclusion.suspects}
    singles = edit.edits if isinstance(edit, Together) else (edit,)
    kept = [single for single in singles if isinstance(single, KeepModule)]
    if len(kept) < len(singles):
        return False
    return not any(is_below(path, single.module) for path in blamed for single in kept)


def _notes(findings: Findings, ranked: Sequence[Fix], untried: Sequence[str], *, out_of_memory: bool) -> Iterator[str]:
    if untried and out_of_memory:
        yield f"Not tried, because memory ran out: the rest of {', '.join(untried)}. Run it where there is more."
    elif untried:
        yield f"The budget for trials was spent before all was tried of: {', '.join(untried)} (--max-trials, --time)."
    if findings.verdict == "numerics":
        yield "fp32 is non-finite as well, so no precision fixes this: what was tried changes the operation itself."
    if ranked and not any(item.verified for item in ranked):
        yield f"No change helped: {plural(len(ranked), 'change')} tried."
    if not ranked and _CHANGES not in untried:
        yield "No change was found to try."


def _blames_optimizer(findings: Findings) -> bool:
    return any(diagnosis.origin.phase == "optimizer" for diagnosis in findings.conclusion.diagnoses[:1])


def _fix_optimizer_eps(findings: Findings) -> Iterator[Fix]:
    """The eps with which every parameter's step is within its bound, found by taking that step."""
    safe = [slot.safe_eps for slot in findings.slots]
    if safe and all(eps is not None for eps in safe):
        eps = max(eps for eps in safe if eps is not None)
        edit = SetOptimizerEps(value=eps)
        written = WrittenChange(
            kind="setting", title=write_title(edit), text="", settings=FixSettings(optimizer_eps=eps)
        )
        proof = Judgement(outcome=TrialOutcome(finite=True, max_rel_err=None), passes=True)
        stepped = Check(name="optimizer step", status="passed", text="finite and within its bound for every parameter")
        yield _make_fix(edit, written, proof, (stepped,))


@dataclass(slots=True, kw_only=True)
class _Attempts:
    """The changes that were tried; `told` hears the title of the best after each."""

    trials: Trials
    writer: ChangeWriter
    verifier: Verifier
    told: Callable[[str], None]
    tried: list[Fix] = field(default_factory=list)
    from_fp32_sets: list[Fix] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        """Tell whether a fix was verified."""
        return any(fix.verified for fix in (*self.tried, *self.from_fp32_sets))

    def make(self, candidates: Iterable[Candidate], *, from_fp32_sets: bool = False) -> None:
        """Try one candidate after the other; raises BudgetSpent where nothing more may be run."""
        attempted = self.from_fp32_sets if from_fp32_sets else self.tried
        for candidate in candidates:
            attempted += self._try(candidate)
            self.tell()

    def tell(self) -> None:
        """Tell the title of the first fix that was verified, "" before there is one."""
        self.told(next((fix.title for fix in (*self.tried, *self.from_fp32_sets) if fix.verified), ""))

    def _try(self, candidate: Candidate) -> list[Fix]:
        """The first strength that passes as a probe and again as the text that is printed; else the last one tried."""
        last: list[Fix] = []
        for edit in candidate:
            probe = self.trials.judge(edit)
            written = list(self.writer.write(edit))
            last = [_make_fix(edit, next(iter(written), _advice(edit)), replace(probe, passes=False), ())]
            # The probe cannot widen an op that writes to its argument; the text can.
            for text in written if probe.passes or isinstance(edit, KeepOp) else ():
                proof, checks = self.verifier.verify(text, edit)
                last = [_make_fix(edit, text, proof, checks)]
                if proof.passes:
                    return last
        return last


def _advice(edit: Edit) -> WrittenChange:
    return WrittenChange(kind="advice", title=write_title(edit), text="")


def _make_fix(edit: Edit, written: WrittenChange, proof: Judgement, checks: tuple[Check, ...]) -> Fix:
    root = written.change.root if isinstance(written.change, SourcePatch) else None
    return Fix(
        kind=written.kind,
        edit=edit,
        title=written.title,
        patch=written.text,
        patch_root=root,
        settings=written.settings,
        verified=proof.passes,
        checks=checks,
        outcome=proof.outcome,
        rank=0,
    )


def _distinct(tried: Iterable[Fix]) -> list[Fix]:
    """One of those that come to the same, without a whole line in fp32 where a part of it is enough."""
    distinct = list({(item.kind, item.patch, item.title): item for item in tried}.values())
    parts = {_line_in_fp32(item) for item in distinct if item.verified and not _is_whole_line(item)} - {None}
    return [item for item in distinct if not (_is_whole_line(item) and _line_in_fp32(item) in parts)]


def _line_in_fp32(fix: Fix) -> SourceLine | None:
    source = fix.edit.site.source if isinstance(fix.edit, KeepOp) else None
    return source.whole if source is not None else None


def _is_whole_line(fix: Fix) -> bool:
    return isinstance(fix.edit, KeepOp) and fix.edit.site.source is not None and fix.edit.site.source.column is None


def _search_fp32_sets(findings: Findings, trials: Trials) -> tuple[Fp32SetSearch, list[tuple[KeepModule, ...]]]:
    """The smallest sets of modules in fp32; a budget may end the search early."""
    members = _find_members(findings, has_loss=trials.step.loss is not None)
    blamed = {lead.site.module for lead in findings.conclusion.suspects}
    products = _overflowing_products(findings)
    guesses = [
        [member for member in members if member.module in blamed],
        [member for member in members if member.module in blamed | products],
        [member for member in members if member.module in blamed or _exceeds(member, findings)],
    ]
    before, found, complete = trials.num_judged, [], True

    def passes(kept: tuple[KeepModule, ...]) -> bool:
        return trials.passes(*kept)

    try:
        enough = guesses[0] and passes(tuple(guesses[0]))
        for kept in find_minimal_sets(members, passes, guesses=guesses[:1] if enough else guesses):
            found.append(kept)
    except BudgetSpent:
        complete = False
    search = Fp32SetSearch(
        sets=tuple(Fp32Set(modules=tuple(map(_to_record, kept)), minimal=True) for kept in found),
        num_modules=len(members),
        num_probes=trials.num_judged - before,
        complete=complete,
    )
    return search, found


def _overflowing_products(findings: Findings) -> set[str]:
    """The modules with a product, which autocast computes in low precision, that passes the format's limit in fp32."""
    ops = (op for op in findings.reference.ops if op.op in PRODUCTS)
    return {op.module for op in ops if any((stats.absmax or 0.0) > findings.trace.format.max for stats in op.outputs)}


def _exceeds(member: KeepModule, findings: Findings) -> bool:
    """Tell whether fp32 passes the format's limit in what a module takes or gives."""
    calls = [call for call in findings.reference.calls if call.module == member.module]
    taken = [stats.absmax for call in calls for stats in (*call.inputs, *call.outputs)]
    return any(absmax is not None and absmax > findings.trace.format.max for absmax in taken)


def _to_record(member: KeepModule) -> Fp32Module:
    return Fp32Module(module=member.module, children=member.children)


def _find_members(findings: Findings, *, has_loss: bool) -> list[KeepModule]:
    """What may be kept in fp32, as it ran: modules without children, and the forwards alone of the others."""
    traces = (findings.trace, findings.reference)
    calls = {call.module: call for trace in traces for call in trace.calls}
    at_work = {op.module for trace in traces for op in trace.ops}
    order = sorted(calls, key=lambda path: calls[path].enter)
    parents = {parent for path in calls for parent in _ancestors(path)}
    members = [
        KeepModule(module=path, children=path not in parents) for path in order if not at_work or path in at_work
    ]
    return members + ([KeepModule(module=LOSS)] if has_loss else [])


def _ancestors(path: str) -> Iterator[str]:
    """The paths of the modules that hold this one, the root last; none for the root itself."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _refine(kept: tuple[KeepModule, ...], findings: Findings, trials: Trials) -> Edit:
    """The set with forwards narrowed down to the fewest source lines, where lines are known and do it."""
    whole = [member for member in kept if member.children]
    owners = {member.module for member in kept if not member.children}
    ops = [op for op in findings.trace.ops if op.module in owners and op.source is not None]
    lines = list(dict.fromkeys(KeepOp(site=_line_of(site_of(op))) for op in ops))
    blamed = [_line_of(lead.site) for lead in findings.conclusion.suspects]
    guesses = [[line for line in lines if line.site in blamed]]
    fewest = None
    with suppress(BudgetSpent):  # the set itself stands without it
        sets = find_minimal_sets(lines, lambda chosen: trials.passes(*whole, *chosen), guesses=guesses)
        fewest = next(sets, None) if lines else None
    return join([*whole, *fewest]) if fewest else join(kept)


def _line_of(site: OpSite) -> OpSite:
    return replace(site, op="", nth=0, source=site.source.whole if site.source is not None else None)


def _size(edit: Edit, findings: Findings) -> int:
    """How much a change asks for: a number in the code, an op, a line, modules, everything."""
    if isinstance(edit, Together):
        return sum(_size(single, findings) for single in edit.edits)
    if isinstance(edit, KeepModule):
        return 5 + (sum(is_below(path, edit.module) for path in _called(findings)) if edit.children else 1)
    if isinstance(edit, ClampArgument) and findings.verdict in ("precision", "silent"):
        return 8  # fp32 shows that the values are sound: to keep them is better than to cut them
    return _SIZES.get(type(edit), 1)


_WHOLE = 1000
_SIZES: dict[type, int] = {ClampArgument: 2, ScaleFirst: 2, KeepOp: 4, UseFormat: _WHOLE, KeepSamples: 2 * _WHOLE}


def _called(findings: Findings) -> set[str]:
    return {call.module for call in findings.trace.calls}
