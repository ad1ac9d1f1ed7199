"""The document of a report: the answer, the fixes, the evidence, what else was tried, the layers, the file, notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from nandoctor.evidence.formats import FP32, FP64
from nandoctor.evidence.report import EpsUse, Origin, Report, StepSetting
from nandoctor.evidence.trace import LOSS, describe_run
from nandoctor.source_files import PACKAGE_FOLDERS
from nandoctor.text import (
    constant,
    file_line,
    join_first,
    kinds_text,
    nonfinite_part,
    ordinal,
    percent,
    samples_text,
)
from nandoctor.views.blocks import Block, Excerpt, Fact, Facts, Headline, Level, Plot, Section
from nandoctor.views.evidence import (
    MEANINGS,
    describe_reproduction,
    evidence_facts,
    list_operands,
    note_facts,
    short_name,
    short_place,
    tone_of,
)
from nandoctor.views.fixes import VISIBLE_ERROR, command_for, fix_section, next_facts
from nandoctor.views.inspect_dump import file_blocks
from nandoctor.views.layers import every_layer, layers_near

_MAX_NOTES = 4
_MAX_CONSTANTS = 200
_HIDDEN_BESIDE_FIXES = frozenset({"path"})  # all has to fit on one screen
_HIDDEN_BESIDE_VERIFIED = _HIDDEN_BESIDE_FIXES | {"cause", "extent"}


def report_document(report: Report, level: Level = "screen") -> Iterator[Block]:
    """Yield the headline, then sections: what to read first, the fixes, and as much of the rest as the level has."""
    yield Headline(report.headline, tone=tone_of(report.verdict))
    yield answer_section(report, level)
    if report.fp32_error is not None:
        wrong = f"fp32's own output is wrong, {percent(report.fp32_error)} off float64"
        yield Facts([Fact("fp32", wrong)])
    if (fixes := fix_section(report, level)) is not None:
        yield fixes
    yield from _rest_of_screen(report) if level == "screen" else _rest_of_page(report)


def answer_section(report: Report, level: Level) -> Section:
    """Return what is known before any search for fixes: the place, the verdict, and how well the replay agrees."""
    excerpt = report.excerpt
    place = f"{_in_package(excerpt.path)}:{excerpt.line}" if excerpt is not None else ""
    path = Path(excerpt.file if excerpt is not None else "")
    source = Excerpt(
        place=place,
        link=path.as_uri() if path.is_absolute() else "",
        where=_describe_where(report),
        source=excerpt,
        remark=_remark(report),
        context=1 if level == "screen" else 3,
    )
    facts = [Fact(report.verdict, describe_verdict(report)), Fact("replay", describe_reproduction(report.reproduction))]
    return Section("", [source, Facts(facts)])


def _in_package(path: str) -> str:
    """Return the path from an installed package on, since the whole does not fit into a line; other paths as is."""
    names = path.replace("\\", "/").split("/")
    places = [index for index, name in enumerate(names) if name in PACKAGE_FOLDERS]
    return "/".join(names[places[-1] + 1 :]) if places else path


def describe_verdict(report: Report) -> str:
    """Return the verdict's meaning, with the formats of this replay."""
    run = report.runs.autocast if report.runs is not None else None
    under = "in the replay" if run is None or run.dtype == FP32 else describe_run(run.policy, run.dtype)
    kinds = kinds_text(report.origin.elements.kinds) if report.origin is not None else ""
    return MEANINGS[report.verdict].format(under=under, kinds=f"{_whose(report.origin)}{kinds or 'non-finite'}")


def _whose(origin: Origin | None) -> str:
    """Return what to put before values that are those of a gradient, and not of the line that is shown."""
    return "gradient: " if origin is not None and origin.phase == "backward" else ""


def _describe_where(report: Report) -> str:
    """Return function, module, call and samples: "ChannelNorm.forward (2nd call of norm, sample 2)"."""
    origin = report.origin
    if origin is None:
        return ""
    place, samples, notes = origin.place, origin.elements.samples, list[str]()
    owner = report.excerpt.function if report.excerpt is not None else ""
    if owner:
        name = "the loss" if place.module == LOSS else short_name(place.module)
        notes.append(f"{ordinal(place.call + 1)} call of {name or 'the model'}" if place.call else name)
    else:
        owner = "the batch" if origin.phase == "input" else short_place(place).with_type
    if samples:
        notes.append(samples_text(samples, origin.elements.batch_size))
    details = ", ".join(filter(None, notes))
    return f"{owner} ({details})" if details else owner


def _remark(report: Report) -> str:
    """Return the text beside the caret: the cause's own remark, else how many values are non-finite."""
    if report.cause is not None and report.cause.source is not None:
        return report.cause.remark
    if report.origin is None or not report.origin.elements.kinds:
        return ""
    found = report.origin.elements
    return _whose(report.origin) + nonfinite_part(found.kinds, found.num_bad, found.numel, "value")


def _rest_of_screen(report: Report) -> Iterator[Block]:
    """Yield evidence and what to do next, without what a fix makes superfluous; the layers if no fix was verified."""
    solved = any(fix.verified for fix in report.fixes)
    left_out = _HIDDEN_BESIDE_VERIFIED if solved else _HIDDEN_BESIDE_FIXES if report.fixes else ()
    notes = note_facts(report)
    if len(notes) > _MAX_NOTES:
        notes[_MAX_NOTES:] = [Fact("note", f"{len(notes) - _MAX_NOTES} more in the report (-o report.json)")]
    evidence = [fact for fact in (*evidence_facts(report), *trial_facts(report)) if fact.label not in left_out]
    last = [*notes, *next_facts(report)]
    if solved or (table := layers_near(report)) is None:
        yield Facts([*evidence, *last])
    else:
        yield from (Facts(evidence), table, Facts(last))


def _rest_of_page(report: Report) -> Iterator[Block]:
    facts = [*evidence_facts(report)]
    if report.cause is not None:
        facts += [Fact("evidence", text) for text in dict.fromkeys(item.text for item in report.cause.evidence)]
    if report.origin is not None:
        facts += list_operands(report.origin)
    if facts:
        yield Section("Evidence", [Facts(facts)])
    if trials := trial_facts(report):
        yield Section("What else was tried", [Facts(trials)], folded=True)
    if (layers := every_layer(report)) is not None:
        yield Section("Every layer", [layers], folded=True)
        hint = f"ranges: {command_for('plot', report) or 'on the page (report.html)'}"
        yield Section("Plot", [Plot(report, hint)], folded=True)
    if constants := [Fact(constant(use.value), describe_use(use)) for use in report.eps_audit[:_MAX_CONSTANTS]]:
        title = "Eps constants, and what the format made of them"
        yield Section(title, [Facts(constants)], folded=True)
    yield Section("In the file", file_blocks(report.dump), folded=True)
    versions = Facts([Fact(name.replace("_", " "), text) for name, text in asdict(report.environment).items() if text])
    notes = Facts([*note_facts(report), *next_facts(report)])
    yield Section("Notes", [notes, Section("Versions", [versions], folded=True)])


_MAX_LISTED = 3


def trial_facts(report: Report) -> list[Fact]:
    """Return what else was tried."""
    return [*fp32_facts(report), *_variation_facts(report)]


def fp32_facts(report: Report) -> Iterator[Fact]:
    """Yield the smallest sets of modules that make the step finite when kept in fp32.

    They are not fixes unless such a change was verified.
    """
    search = report.fp32_sets
    if search is None or not search.sets:
        return
    verified = any(fix.verified and fix.kind in ("source", "cell", "snippet") for fix in report.fixes)
    enough = "enough" if verified else "finite then, though not verified as a fix"
    doubt = "" if search.complete else " (the search was cut short)"
    sets = []
    for found in search.sets:
        alone = [(it, "" if it.children else " without its submodules") for it in found.modules]
        names = [f"{short_name(it.module or 'the model')}{without}" for it, without in alone]
        sets.append(f"{join_first(names, _MAX_LISTED)}{' together' if len(names) > 1 else ''}")
    yield Fact("keep in fp32", f"{enough}: {'; or '.join(sets)}{doubt}")


def _variation_facts(report: Report) -> Iterator[Fact]:
    """Yield the settings with which the step is finite or fails, for kinds of setting that made a difference."""
    trials = report.counterfactuals
    groups = {trial.group for trial in trials if trial.outcome.finite}
    if trials and not groups:
        yield Fact("variations", "the step fails in all of them")
    varied = [trial for trial in trials if trial.group in groups]
    failing = [describe_setting(trial.setting) for trial in varied if not trial.outcome.finite]
    finite = []
    for trial in (trial for trial in varied if trial.outcome.finite):
        error = trial.outcome.max_rel_err or 0.0
        off = f" ({percent(error)} off fp32)" if error > VISIBLE_ERROR else ""
        finite.append(f"{describe_setting(trial.setting)}{off}")
    if finite:
        fails = f"; fails: {', '.join(failing)}" if failing else ""
        run = report.runs.autocast if report.runs is not None else None
        # If output or loss fail, the variations run without a backward pass.
        part = "step" if run is not None and run.finite and report.verdict != "silent" else "forward"
        yield Fact("variations", f"{part} finite: {', '.join(finite)}{fails}")


def describe_setting(setting: StepSetting) -> str:
    """Return the setting in words: "bf16", "eval mode", "sample 2 alone", "without sample 2"."""
    if setting.dtype is not None:
        return "float64" if setting.dtype is FP64 else setting.dtype.label
    if setting.training is not None:
        return f"{'train' if setting.training else 'eval'} mode"
    if setting.only is not None:
        return f"{samples_text(setting.only)} alone"
    return f"without {samples_text(setting.without or ())}"


def describe_use(use: EpsUse) -> str:
    """Return where a small constant is, and what is left of it: "norm (net.py:45), used by add, is zero in fp16"."""
    line = f" ({file_line(use.source.file, use.source.line)})" if use.source else ""
    used = f", used by {use.op}," if use.op else ""
    owner = short_name(use.module or "the model")
    if use.place == "optimizer":
        owner = "the optimizer"
    elif use.num_uses > 1:
        owner += f" and {use.num_uses - 1} more"
    if use.dtype is None:
        return f"{owner}{line}{used} was not seen in use"
    effect = use.effect if use.effect in ("zero", "subnormal") else "kept"
    off = f" and {percent(use.rel_err)} off" if effect == "subnormal" and use.rel_err is not None else ""
    return f"{owner}{line}{used} is {effect} in {use.dtype}{off}"
