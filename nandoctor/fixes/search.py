"""From a diagnosis to changes that cure, each proved by running it.

In: a `Patient`, and the trials of its failing step. Out: `Remedies`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from nandoctor.causes.base import Candidate, site_of
from nandoctor.diagnosis.diagnosis import Conclusion, Lead
from nandoctor.evidence.edits import (
    ClampArgument,
    Edit,
    KeepModule,
    KeepOp,
    KeepSamples,
    OpSite,
    ResetBuffers,
    ScaleFirst,
    SetArgument,
    SetAttribute,
    SetOptimizerEps,
    SingleEdit,
    Together,
    UseFormat,
)
from nandoctor.evidence.formats import BF16, FP16, FloatFormat
from nandoctor.evidence.optimizer import OptimizerSlot
from nandoctor.evidence.report import Counterfactual, Fix, Fp32Set, Fp32SetSearch, TrialOutcome, Verdict
from nandoctor.evidence.trace import LOSS, SourceLine, Trace
from nandoctor.fixes.counterfactuals import Circumstances, TrialsAt, compare_circumstances
from nandoctor.fixes.minimal_sets import find_minimal_sets
from nandoctor.fixes.verify import BudgetSpent, Trials
from nandoctor.remedies.patches import Surroundings, write_patch, write_title
from nandoctor.replaying.interventions import LOW

_CHANGES = "changes of the operation"
MAX_LEADS = 4
"""Independent origins that are cured together; where there are more, only sets of modules are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """A failing step with its diagnosis, and what is needed to think of cures.

    `num_samples` is the batch size, None where it is not known; `has_loss` tells whether there is a loss function,
    `loss_scale` what multiplies it. `random` tells whether the step draws random numbers. `slots` are the
    optimizer's.
    """

    model: nn.Module
    trace: Trace
    reference: Trace
    conclusion: Conclusion
    verdict: Verdict
    low: FloatFormat
    num_samples: int | None
    has_loss: bool
    loss_scale: float | None
    random: bool
    slots: tuple[OptimizerSlot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What was tried, the cures first and the smallest of them first; `notes` tell what a budget left untried."""

    fixes: tuple[Fix, ...] = ()
    fp32_sets: Fp32SetSearch | None = None
    counterfactuals: tuple[Counterfactual, ...] = ()
    notes: tuple[str, ...] = ()


def prescribe(patient: Patient, trials_at: TrialsAt) -> Remedies:
    """Try what the diagnosis suggests, then the smallest sets of modules in fp32, then other circumstances."""
    if _blames_optimizer(patient):
        return Remedies(fixes=tuple(_fix_optimizer_eps(patient)))
    trials = trials_at(patient.trace.training, patient.trace.seed)
    tried: list[Fix] = []
    from_fp32_sets: list[Fix] = []
    circumstances: list[Counterfactual] = []
    search = None
    untried = [_CHANGES, "sets of modules in fp32", "other circumstances"]
    with suppress(BudgetSpent):
        for candidate in _propose(patient, trials):
            tried += _try(candidate, patient, trials)
        untried.remove(_CHANGES)
        if patient.verdict in ("precision", "silent"):
            search, found = _search_fp32_sets(patient, trials)
            for kept in found:
                from_fp32_sets += _try((_refine(kept, patient, trials),), patient, trials)
        if search is None or search.complete:
            untried.remove("sets of modules in fp32")
        for line in compare_circumstances(_circumstances(patient), trials_at):
            circumstances.append(line)
        untried.remove("other circumstances")
    ranked = _rank(tried, from_fp32_sets, patient)
    return Remedies(
        fixes=tuple(replace(item, rank=rank) for rank, item in enumerate(ranked)),
        fp32_sets=search,
        counterfactuals=tuple(circumstances),
        notes=tuple(_notes(patient, ranked, untried)),
    )


def _rank(tried: list[Fix], from_fp32_sets: list[Fix], patient: Patient) -> list[Fix]:
    """Cures first: changes at the origin, then sets found by search, then another format or batch; each by size."""

    def key(item: Fix) -> tuple[bool, bool, bool, int]:
        size = _size(item.edit, patient)
        return not item.verified, size >= _WHOLE, item.patch not in at_origin, size

    at_origin = {item.patch for item in tried}
    return sorted(_distinct([*from_fp32_sets, *tried]), key=key)


def _notes(patient: Patient, ranked: Sequence[Fix], untried: Sequence[str]) -> Iterator[str]:
    if untried:
        yield f"The budget for trials was spent before all was tried of: {', '.join(untried)} (--max-trials, --time)."
    if patient.verdict == "numerics":
        yield "fp32 is non-finite as well, so no precision cures this: what was tried changes the operation itself."
    if ranked and not any(item.verified for item in ranked):
        yield f"None of the {len(ranked)} changes that were tried cures it."
    if not ranked and _CHANGES not in untried:
        yield "No change was found to try."


def _blames_optimizer(patient: Patient) -> bool:
    return any(diagnosis.origin.phase == "optimizer" for diagnosis in patient.conclusion.diagnoses[:1])


def _fix_optimizer_eps(patient: Patient) -> Iterator[Fix]:
    """The eps with which every parameter's step is within its bound, found by taking that step."""
    safe = [slot.safe_eps for slot in patient.slots]
    if safe and all(eps is not None for eps in safe):
        eps = max(eps for eps in safe if eps is not None)
        yield _make_fix(SetOptimizerEps(value=eps), TrialOutcome(finite=True, max_rel_err=None), patient, verified=True)


def _circumstances(patient: Patient) -> Circumstances:
    return Circumstances(
        training=patient.trace.training,
        seed=patient.trace.seed,
        guilty=_guilty(patient),
        num_samples=patient.num_samples,
        loss_scale=patient.loss_scale,
        random=patient.random,
    )


def _guilty(patient: Patient) -> tuple[int, ...]:
    """The samples of the batch to blame, where dimension 0 of what is bad is the batch's."""
    conclusion = patient.conclusion
    origin = conclusion.diagnoses[0].origin if conclusion.diagnoses else None
    places = [(origin.samples, origin.output)] if origin else []
    if conclusion.first_nonfinite and conclusion.first_nonfinite.value.counts:
        places.append((conclusion.first_nonfinite.value.counts.samples, conclusion.first_nonfinite.value))
    for samples, stats in places:
        if samples and stats is not None and stats.shape[:1] == (patient.num_samples,):
            return samples
    return ()


def _try(candidate: Candidate, patient: Patient, trials: Trials) -> list[Fix]:
    """The first strength that cures, else the last."""
    last: list[Fix] = []
    for edit in candidate:
        judgement = trials.judge(edit)
        last = [_make_fix(edit, judgement.outcome, patient, verified=judgement.cures)]
        if judgement.cures:
            break
    return last


def _make_fix(edit: Edit, outcome: TrialOutcome, patient: Patient, *, verified: bool) -> Fix:
    patch = write_patch(edit, _surroundings(patient))
    return Fix(edit=edit, title=write_title(edit), patch=patch, verified=verified, outcome=outcome, rank=0)


def _surroundings(patient: Patient) -> Surroundings:
    def own_lines(path: str) -> list[SourceLine]:
        sources = [op.source for op in patient.trace.ops if op.module == path]
        return sorted({source for source in sources if source is not None}, key=lambda source: source.line)

    def is_called_by_torch(path: str) -> bool:
        parent = patient.model.get_submodule(path.rpartition(".")[0])
        return bool(path) and type(parent).__module__.startswith("torch.")

    def is_low(path: str) -> bool:
        return any(tensor.dtype in LOW for tensor in patient.model.get_submodule(path).parameters())

    return Surroundings(own_lines=own_lines, is_called_by_torch=is_called_by_torch, is_low=is_low)


def _distinct(tried: Iterable[Fix]) -> list[Fix]:
    """One of those that come to the same: a line is the same whichever module it was seen in."""
    return list({item.patch: item for item in tried}.values())


def _propose(patient: Patient, trials: Trials) -> Iterator[Candidate]:
    """The changes worth trying, by the verdict; each in its candidate."""
    leads = _distinct_leads(patient)
    if patient.verdict == "state":
        names = tuple(name for name, buffer in patient.model.named_buffers() if not torch.isfinite(buffer).all())
        yield (ResetBuffers(names=names),) if names else ()
    if patient.verdict == "input":
        yield from _without_guilty(patient)
    if patient.verdict in ("numerics", "loss-scale"):
        yield from _together([_specific(lead, patient) for lead in leads[:MAX_LEADS]])
    if patient.verdict in ("precision", "silent"):
        if len(leads) == 1:
            yield from _specific(leads[0], patient)
            yield from _in_fp32(leads[0], patient, trials)
        elif 1 < len(leads) <= MAX_LEADS:
            yield from _combined(leads, patient, trials)
        if patient.has_loss and any(lead.site.module == LOSS for lead in leads):
            yield (KeepModule(module=LOSS),)
        if patient.low is FP16:
            yield (UseFormat(format=BF16),)


def _distinct_leads(patient: Patient) -> list[Lead]:
    """One lead for each place in the code."""

    def place(site: OpSite) -> object:
        return site if _is_library(site, patient.model) else (site.type, site.op, site.source)

    return list({place(lead.site): lead for lead in reversed(patient.conclusion.leads)}.values())[::-1]


def _specific(lead: Lead, patient: Patient) -> list[Candidate]:
    """The changes of the operation itself; a constant that is an attribute of the module is changed there."""
    return [tuple(_through_attribute(edit, patient.model) for edit in candidate) for candidate in lead.suggestions]


def _through_attribute(edit: Edit, model: nn.Module) -> Edit:
    if not isinstance(edit, SetArgument) or edit.value is None:
        return edit
    for module in model.modules():
        if type(module).__name__ == edit.site.type:
            names = [name for name, value in vars(module).items() if isinstance(value, float) and value == edit.was]
            if names:
                return SetAttribute(type=edit.site.type, name=names[0], was=edit.was, value=edit.value)
    return edit


def _in_fp32(lead: Lead, patient: Patient, trials: Trials) -> Iterator[Candidate]:
    """The op's line in fp32; where that is no cure the block's own ops, or the block."""
    site = lead.site
    if site.module == LOSS:
        return
    if not _is_library(site, patient.model):
        line = KeepOp(site=replace(site, op=""))
        yield (line,)
        if trials.cures(line):
            return
    if _has_children(site.module, patient.trace):
        yield (KeepModule(module=site.module, children=False),)
    elif site.module:
        yield (KeepModule(module=site.module),)


def _is_library(site: OpSite, model: nn.Module) -> bool:
    """Whether torch's own module made the op, so that the source line is its caller's, or there is none."""
    if site.module == LOSS:
        return site.source is None
    return site.source is None or type(model.get_submodule(site.module)).__module__.startswith("torch.")


def _has_children(path: str, trace: Trace) -> bool:
    return any(call.module != path and _is_below(call.module, path) for call in trace.calls)


def _is_below(path: str, ancestor: str) -> bool:
    return not ancestor or path == ancestor or path.startswith(f"{ancestor}.")


def _together(groups: Sequence[list[Candidate]]) -> Iterator[Candidate]:
    """Every origin's first change, second change and so on, at once; each in candidate that are raised together."""
    if len(groups) == 1:
        yield from groups[0]
    elif groups and all(groups):
        for choice in range(max(map(len, groups))):
            chosen = [group[min(choice, len(group) - 1)] for group in groups]
            yield tuple(
                _join([candidate[min(strength, len(candidate) - 1)] for candidate in chosen])
                for strength in range(max(map(len, chosen)))
            )


def _join(edits: Sequence[Edit]) -> Edit:
    singles: list[SingleEdit] = []
    for edit in edits:
        singles += edit.edits if isinstance(edit, Together) else (edit,)
    return Together(edits=tuple(dict.fromkeys(singles))) if len(singles) > 1 else singles[0]


def _combined(leads: Sequence[Lead], patient: Patient, trials: Trials) -> Iterator[Candidate]:
    """For each origin its first change that cures while the others' blocks are in fp32; then all of these at once."""
    strong = [
        KeepModule(module=lead.site.module, children=not _has_children(lead.site.module, patient.trace))
        for lead in leads
    ]
    if not trials.cures(*dict.fromkeys(strong)):
        return
    chosen: list[Edit] = []
    for place, lead in enumerate(leads):
        others = [edit for edit in strong[:place] + strong[place + 1 :] if edit != strong[place]]
        groups = chain(_specific(lead, patient), _in_fp32(lead, patient, trials))
        proposals = (edit for candidate in groups for edit in candidate)
        chosen.append(next((edit for edit in proposals if trials.cures(edit, *others)), strong[place]))
    yield (_join(chosen),)
    yield (_join(list(dict.fromkeys(strong))),)


def _without_guilty(patient: Patient) -> Iterator[Candidate]:
    """The batch without the samples that are bad as they came in."""
    guilty = _guilty(patient)
    kept = tuple(index for index in range(patient.num_samples or 0) if index not in guilty)
    if guilty and kept:
        yield (KeepSamples(samples=kept),)


def _search_fp32_sets(patient: Patient, trials: Trials) -> tuple[Fp32SetSearch, list[tuple[KeepModule, ...]]]:
    """The smallest sets of modules in fp32; a budget may end the search early."""
    members = _find_members(patient)
    blamed = {lead.site.module for lead in patient.conclusion.leads}
    guess = [member for member in members if member.module in blamed]
    before, found, complete = trials.num_judged, [], True

    def cures(kept: tuple[KeepModule, ...]) -> bool:
        return trials.cures(*kept)

    try:
        for kept in find_minimal_sets(members, cures, guess=guess):
            found.append(kept)
    except BudgetSpent:
        complete = False
    search = Fp32SetSearch(
        sets=tuple(Fp32Set(modules=tuple(map(_member_name, kept)), minimal=True) for kept in found),
        num_modules=len(members),
        num_probes=trials.num_judged - before,
        complete=complete,
    )
    return search, found


def _member_name(member: KeepModule) -> str:
    return member.module if member.children else f"{member.module} (own ops)".lstrip()


def _find_members(patient: Patient) -> list[KeepModule]:
    """What may be kept in fp32: modules without children, and the own ops of those that have some, as they ran."""
    traces = (patient.trace, patient.reference)
    calls = {call.module: call for trace in traces for call in trace.calls}
    at_work = {op.module for trace in traces for op in trace.ops}
    order = sorted(calls, key=lambda path: calls[path].enter)
    members = [
        KeepModule(module=path, children=not any(other != path and _is_below(other, path) for other in calls))
        for path in order
        if not at_work or path in at_work
    ]
    return members + ([KeepModule(module=LOSS)] if patient.has_loss else [])


def _refine(kept: tuple[KeepModule, ...], patient: Patient, trials: Trials) -> Edit:
    """The set with "own ops" narrowed down to the fewest source lines, where lines are known and do it."""
    whole = [member for member in kept if member.children]
    owners = {member.module for member in kept if not member.children}
    ops = [op for op in patient.trace.ops if op.module in owners and op.source is not None]
    lines = list(dict.fromkeys(KeepOp(site=replace(site_of(op), op="", nth=0)) for op in ops))
    blamed = [replace(lead.site, op="", nth=0) for lead in patient.conclusion.leads]
    guess = [line for line in lines if line.site in blamed]
    fewest = None
    with suppress(BudgetSpent):  # the set itself stands without it
        sets = find_minimal_sets(lines, lambda chosen: trials.cures(*whole, *chosen), guess=guess)
        fewest = next(sets, None) if lines else None
    return _join([*whole, *fewest]) if fewest else _join(kept)


def _size(edit: Edit, patient: Patient) -> int:
    """How much a change asks for: a number in the code, an op, a line, modules, everything."""
    if isinstance(edit, Together):
        return sum(_size(single, patient) for single in edit.edits)
    if isinstance(edit, KeepModule):
        return 5 + (sum(_is_below(path, edit.module) for path in _called(patient)) if edit.children else 1)
    if isinstance(edit, ClampArgument) and patient.verdict in ("precision", "silent"):
        return 8  # fp32 shows that the values are sound: to keep them is better than to cut them
    return _SIZES.get(type(edit), 1)


_WHOLE = 1000
_SIZES: dict[type, int] = {ClampArgument: 2, ScaleFirst: 2, KeepOp: 4, UseFormat: _WHOLE, KeepSamples: 2 * _WHOLE}


def _called(patient: Patient) -> set[str]:
    return {call.module for call in patient.trace.calls}
