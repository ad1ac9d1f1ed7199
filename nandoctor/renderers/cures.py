"""What was tried on the failing step, in sentences: cures, other circumstances, fp32 islands, small constants.

In: a `Report`. Out: `Cure` records and `Fact`s; nothing where nothing was tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nandoctor.evidence.report import Counterfactual, EpsUse, IslandSearch, Prescription, Report, TrialOutcome
from nandoctor.renderers.story import Fact
from nandoctor.renderers.words import join_first, number, printable, shorten
from nandoctor.rules.alignment import WRONG

_NAME_WIDTH = 64
_MAX_LISTED = 3
_MAX_PATCH_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """A prescription as people read it; `patch` holds its lines, and all text is printable."""

    title: str
    patch: tuple[str, ...]
    outcome: str
    verified: bool


def list_cures(report: Report) -> tuple[Cure, ...]:
    """What cures first, the smallest change before larger ones; then what was tried in vain."""
    ordered = sorted(report.prescriptions, key=lambda prescription: (not prescription.verified, prescription.rank))
    return tuple(map(_to_cure, ordered))


def _to_cure(prescription: Prescription) -> Cure:
    return Cure(
        title=printable(prescription.title),
        patch=tuple(printable(line.rstrip()) for line in prescription.patch.expandtabs(4).splitlines()),
        outcome=describe_outcome(prescription.outcome),
        verified=prescription.verified,
    )


def describe_outcome(outcome: TrialOutcome) -> str:
    """What a trial gave: "finite, within 0.06 % of fp32"."""
    if not outcome.finite:
        return "still non-finite"
    if outcome.max_rel_err is None:
        return "finite, nothing to compare with fp32"
    return f"finite, within {number(100 * outcome.max_rel_err)} % of fp32"


def tell_cures(report: Report) -> list[Fact]:
    """The first cure with its patch in full, and a line each for whatever else is known.

    Constants that are lost are told where the cause is another one: it tells its own.
    """
    facts = list(_tell_first(report))
    if report.island_search is not None and report.island_search.islands:
        facts.append(Fact(label="fp32 in", text=describe_islands(report.island_search)))
    if report.counterfactuals:
        facts.append(Fact(label="trials", text=describe_trials(report.counterfactuals)))
    told = report.cause is not None and "eps" in report.cause.code
    if lost := [use for use in report.eps_audit if use.effect == "zero" and not told]:
        facts.append(Fact(label="eps", text=join_first([describe_eps(use) for use in lost], 1)))
    return facts


def _tell_first(report: Report) -> Iterator[Fact]:
    cures = list_cures(report)
    verified = [cure for cure in cures if cure.verified]
    if not verified:
        if cures:
            yield Fact(label="cure", text=f"none of {len(cures)} tried held: {join_first([c.title for c in cures], 2)}")
        return
    first, *others = verified
    yield Fact(label="cure", text=f"{first.title}: tried, {first.outcome}")
    yield from tell_patch(first.patch)
    if others:
        more = f"; {len(others) - 1} more in the report (-o report.html)" if len(others) > 1 else ""
        yield Fact(label="or", text=f"{others[0].title}: {others[0].outcome}{more}")


def tell_patch(patch: Sequence[str]) -> Iterator[Fact]:
    """One line each, the label beside the first."""
    for place, line in enumerate(patch[:_MAX_PATCH_LINES]):
        yield Fact(label="" if place else "patch", text=line)
    if len(patch) > _MAX_PATCH_LINES:
        yield Fact(label="", text=f"... {len(patch) - _MAX_PATCH_LINES} more lines in the report (-o report.html)")


def describe_islands(search: IslandSearch) -> str:
    """The smallest sets of modules that cure when kept in fp32."""
    sets = [join_first([_name(module) for module in island.modules], _MAX_LISTED) for island in search.islands]
    proved = "none can be left out" if all(island.minimal for island in search.islands) else "perhaps not the smallest"
    ending = "" if search.complete else ", search cut short"
    return f"{'; or in '.join(sets)} ({proved}; {search.num_modules} modules, {search.num_probes} runs{ending})"


def describe_trials(trials: Sequence[Counterfactual]) -> str:
    """Under which circumstances the step is finite, under which finite and far from fp32, and under which it fails."""
    sound = [_describe_setting(trial) for trial in trials if trial.outcome.finite and not _is_wrong(trial.outcome)]
    wrong = [_describe_setting(trial) for trial in trials if _is_wrong(trial.outcome)]
    failing = [_describe_setting(trial) for trial in trials if not trial.outcome.finite]
    parts = [f"finite with {join_first(sound, _MAX_LISTED)}"] if sound else []
    parts += [f"finite and far from fp32 with {join_first(wrong, _MAX_LISTED)}"] if wrong else []
    parts += [f"still fails with {join_first(failing, _MAX_LISTED)}"] if failing else []
    return "; ".join(parts)


def _is_wrong(outcome: TrialOutcome) -> bool:
    return outcome.finite and (outcome.max_rel_err or 0.0) > WRONG


def _describe_setting(trial: Counterfactual) -> str:
    setting = _name(trial.setting)
    return setting if trial.group in ("precision", "mode") else f"{trial.group.replace('-', ' ')} {setting}"


def describe_eps(use: EpsUse) -> str:
    """A small constant and what is left of it: "norm.eps = 1e-08 is zero in fp16"."""
    place = _name(".".join(part for part in (use.module, use.op if use.place == "op" else None, use.name) if part))
    return f"{place} = {number(use.value)} {describe_effect(use)}"


def describe_effect(use: EpsUse) -> str:
    """What the format that it was used in makes of a small constant."""
    if use.dtype is None:
        return "was not seen in use"
    absorbed = ""
    if use.absorbed_share:
        absorbed = f", and is absorbed by {number(100 * use.absorbed_share)} % of what it is added to"
    if use.effect == "zero":
        return f"is zero in {use.dtype}{absorbed}"
    if use.effect == "subnormal":
        wrong = f" and {number(100 * use.rel_err)} % off" if use.rel_err is not None else ""
        return f"is subnormal in {use.dtype}{wrong}{absorbed}"
    return f"is kept in {use.dtype}{absorbed}"


def _name(name: str) -> str:
    return shorten(printable(name), _NAME_WIDTH)
