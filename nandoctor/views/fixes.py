"""What to do: the fixes that were tried, with their checks and how to apply them, and the commands to type next."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nandoctor.causes.candidates import STABLE_FORM
from nandoctor.changes.log_space import StableLog
from nandoctor.dumps.recorded_format import as_option, names_object
from nandoctor.evidence.edits import SourcePatch, flatten
from nandoctor.evidence.report import Check, Fix, FixSettings, Report
from nandoctor.source_files import PACKAGE_FOLDERS
from nandoctor.step.settings import OPTIONS
from nandoctor.text import constant, join_words, percent, plural, printable
from nandoctor.views.blocks import Block, Fact, Facts, Level, Patch, Section

VISIBLE_ERROR = 0.01
"""A trial with a larger error against fp32 than a fix may have shows that error."""
_MAX_LISTED = 3
_MAX_OPEN = 2
_SHOWN_IN_FULL = ("output", "gradients")
"""The other checks, of the loss and of variations of the batch, are only counted."""
_MAX_REASONS = 2


def fix_section(report: Report, level: Level) -> Section | None:
    """Return the fixes as the search ranked them, or why none is verified; None if there was no search."""
    verified = [fix for fix in report.fixes if fix.verified]
    others = [fix for fix in report.fixes if not fix.verified]
    if level == "page":
        return _all_fixes(report, verified, others)
    return _first_fix(report, verified) if verified else _no_fix(report, others)


def _first_fix(report: Report, verified: Sequence[Fix]) -> Section:
    """Return the first verified fix for a screen, and what is verified besides."""
    first, *others = verified
    of = f" 1 of {len(verified)}" if others else ""
    facts = [*how_to_apply(first, report), *_check_facts(first), *reason_facts(first), *_better_facts(report)]
    if others:
        more = f"; {len(others) - 1} more in the report" if len(others) > 1 else ""
        facts.append(Fact("or", f"{others[0].title} ({checked_first(others[0])}){more}"))
    return Section(f"Fix{of}, verified: {first.title}", [code_of_fix(first, brief=True), Facts(facts)])


def _no_fix(report: Report, fixes: Sequence[Fix]) -> Section | None:
    """Return for a screen what was tried, why none of it is a fix, and a workaround; None if there was no search."""
    heading = no_fix_heading(report)
    if not heading:
        return None
    tried = [Fact("tried", f"{fix.title} ({describe_result(fix)})") for fix in fixes[:_MAX_LISTED]]
    more = f", of {plural(len(fixes), 'change')}" if len(fixes) > _MAX_LISTED else ""
    blocks: list[Block] = [Facts([*tried, *(Fact("why", note) for note in report.search_notes)])]
    if fixes and fixes[0].workaround is not None and fixes[0].patch:
        blocks += [code_of_fix(fixes[0], brief=True), Facts([*how_to_apply(fixes[0], report)])]
    return Section(f"{heading}{more}", blocks)


def _all_fixes(report: Report, verified: Sequence[Fix], others: Sequence[Fix]) -> Section | None:
    """Return all of them for a page: what was verified with its checks, the rest folded."""
    title = "Fixes, each run on this step as it is printed" if verified else no_fix_heading(report)
    if not title:
        return None
    shown = [_whole_fix(fix, number, report) for number, fix in enumerate(verified, 1)]
    failed = [Section(f"{fix.title} ({describe_result(fix)})", [code_of_fix(fix)]) for fix in others]
    more = plural(len(shown) - _MAX_OPEN, "more verified fix", "more verified fixes")
    rest = plural(len(failed), "change that was not verified", "changes that were not verified")
    folds = [Section(more, shown[_MAX_OPEN:], folded=True), Section(rest, failed, folded=True)]
    why: list[Block] = [] if verified else [Facts([Fact("why", note) for note in report.search_notes])]
    return Section(title, [*why, *shown[:_MAX_OPEN], *(fold for fold in folds if fold.blocks)])


def _whole_fix(fix: Fix, number: int, report: Report) -> Section:
    """Return a verified fix with all its checks."""
    facts = [*how_to_apply(fix, report), *_check_facts(fix), *reason_facts(fix)]
    blocks: list[Block] = [code_of_fix(fix), Facts(facts)]
    if fix.checks:
        blocks.append(Section(plural(len(fix.checks), "check"), [Facts(every_check(fix))], folded=True))
    return Section(f"{number}. {fix.title}", blocks)


def no_fix_heading(report: Report) -> str:
    """Return the heading of the section of fixes if none is verified; "" if there was no search."""
    return "No fix was verified" if report.fixes else "No fix was found" if report.search_notes else ""


def _better_facts(report: Report) -> Iterator[Fact]:
    """Yield what to write by hand if no verified fix joins a logarithm with its probability."""
    joined = any(isinstance(edit, StableLog) for fix in report.fixes if fix.verified for edit in flatten((fix.edit,)))
    found = report.cause.evidence if report.cause is not None and not joined else ()
    yield from (Fact("better", item.text) for item in found if item.name == STABLE_FORM)


def checked_first(fix: Fix) -> str:
    """Return the finding of the first check, on the output: "finite, 0.06 % off fp32"."""
    return fix.checks[0].text if fix.checks else "unchecked"


def describe_result(fix: Fix) -> str:
    """Return what came of a fix, in words: "verified", "failed: still non-finite", "finite, 4.7 % off fp32"."""
    if fix.verified or fix.workaround is not None:
        return "verified" if fix.verified else f"workaround: {fix.workaround}"
    if not fix.outcome.finite:
        return f"failed: {'still non-finite' if fix.outcome.ran else 'the step cannot be run with it'}"
    failed = next((check for check in fix.checks if check.status == "failed"), None)
    if failed is not None:
        return failed.text if failed.name == "output" else f"failed: {_describe_check(failed)}"
    return "finite when tried, but not written as code"


def _check_facts(fix: Fix) -> Iterator[Fact]:
    """Yield what was checked and what was not, one line each; `every_check` has the rest."""
    passed = [check for check in fix.checks if check.status == "passed"]
    skipped = [check for check in fix.checks if check.status == "not-checked"]
    if passed:
        texts = [_describe_check(check, " ").partition("; ")[0] for check in passed if check.name in _SHOWN_IN_FULL]
        others = [check for check in passed if check.name not in _SHOWN_IN_FULL]
        more = f"{len(others)} more checks" if len(others) > 1 else "".join(map(_name_check, others))
        yield Fact("checked", "; ".join(filter(None, [*texts, more])))
    if skipped:
        texts = [_describe_check(check) for check in skipped[:_MAX_REASONS]]
        names = ", ".join(map(_name_check, skipped[_MAX_REASONS:]))
        yield Fact("not checked", "; ".join(filter(None, [*texts, names])))


def every_check(fix: Fix) -> list[Fact]:
    """Return a line for each finding of checks: those of failed ones, then of passed ones, then of those not made."""
    labels = {"failed": "FAILED", "passed": "checked", "not-checked": "not checked"}
    alike: dict[Check, list[str]] = {}
    for check in sorted(fix.checks, key=lambda check: [*labels].index(check.status)):
        alike.setdefault(replace(check, name=""), []).append(check.name)
    return [
        Fact(labels[it.status], _describe_check(replace(it, name=join_words(names)))) for it, names in alike.items()
    ]


def _name_check(check: Check) -> str:
    """Return the check's name, with the number of samples if it did not cover the whole batch."""
    return check.name + (f" ({plural(len(check.samples), 'sample')})" if check.samples is not None else "")


def _describe_check(check: Check, between: str = ": ") -> str:
    """Return the check's finding, prefixed with its name unless the sentence begins with it."""
    name = _name_check(check)
    return check.text if check.text.startswith(name) else f"{name}{between}{check.text}"


def how_to_apply(fix: Fix, report: Report) -> Iterator[Fact]:
    """Yield the command that makes the change, or where its lines are to be run."""
    if fix.kind == "source" and fix.patch:
        verified = [other for other in report.fixes if other.verified]
        chosen = [*verified, *(other for other in report.fixes if other.workaround is not None)].index(fix) + 1
        pick = () if chosen == 1 and fix.verified else (f"--pick {chosen}",)
        names = re.findall(r"^\+\+\+ b/(.*)$", fix.patch, re.MULTILINE)
        of_package = any(PACKAGE_FOLDERS.intersection(Path(fix.patch_root or "", name).parts) for name in names)
        command = command_for("fix", report, *pick, "--write", *(["--allow-installed"] if of_package else []))
        yield Fact("apply it", command or f"git apply, in {fix.patch_root}", is_command=command is not None)
    elif fix.patch or fix.settings is not None:
        yield Fact("apply it", WHERE_TO_RUN[fix.kind])


_MIN_COST = 0.05
"""A cost below this share of the step is not mentioned."""


def reason_facts(fix: Fix) -> Iterator[Fact]:
    """Yield why a verified fix is written as it is, and what it costs."""
    if not fix.verified:
        return
    if reasons := dict.fromkeys(edit.why for edit in flatten((fix.edit,)) if edit.why):
        yield Fact("why", " ".join(reasons))
    if fix.settings is not None and fix.settings.amp_dtype is not None:
        lost = "8 bits of precision in place of fp16's 11, everywhere; bf16 needs a GPU from 2020 or later"
        yield Fact("cost", lost)
    elif fix.cost is not None:
        products = (fix.cost.products_in_fp32, "of the forward's multiply-adds in fp32")
        shares = (products, (fix.cost.more_activations, "more memory for activations"))
        if costs := [f"{percent(share)} {what}" for share, what in shares if share >= _MIN_COST]:
            yield Fact("cost", ", ".join(costs))


WHERE_TO_RUN = {
    "cell": "make this change in the notebook, and run the cell and those that use it again",
    "snippet": "run these lines where your model is called `model`, once it is built and its weights are loaded",
    "state": "run these lines once, where your model is called `model`, after its weights are loaded",
    "setting": "set it in the training loop",
    "advice": "no code to run: change it by hand",
}


def code_of_fix(fix: Fix, *, brief: bool = False) -> Patch:
    """Return the change as a diff or as code, including the code that makes a setting.

    A brief diff has one line around each change.
    """
    if not fix.patch:
        return Patch(list(_settings_as_code(fix.settings or FixSettings())), is_diff=False)
    text = SourcePatch(root=fix.patch_root or ".", files=fix.files).diff(1) if brief and fix.files else fix.patch
    lines = ["" if line.isspace() else line for line in text.splitlines()]
    return Patch(lines, is_diff=fix.kind in ("source", "cell"))


def _settings_as_code(settings: FixSettings) -> Iterator[str]:
    if settings.amp_dtype is not None:
        yield f'with torch.autocast("{settings.device}", dtype=torch.{settings.amp_dtype}):'
    if settings.loss_scale is not None:
        yield f'scaler = torch.amp.GradScaler("{settings.device}", init_scale={constant(settings.loss_scale)})'
    if settings.optimizer_eps is not None:
        yield "for group in optimizer.param_groups:"
        yield f'    group["eps"] = {constant(settings.optimizer_eps)}'


_COMMAND = re.compile(r"(.*?)(?:(?:^|(?<=:) )(nandoctor [a-z]+ .+))?$", re.DOTALL)


def command_arguments(dump: Path, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a person types to replay the dump with these settings: its path, then the flags.

    Return () if a setting is an object that a command line cannot name.
    """
    arguments = [str(dump)]
    for name, value in given.items():
        option = OPTIONS[name]
        if value is None or option.group not in ("model", "step"):
            continue
        if isinstance(value, Mapping):
            texts = {key: item if names_object(item) else as_option(item) for key, item in value.items()}
            if None in texts.values():
                return ()
            for key, text in texts.items():
                arguments += [option.flag, f"{key}={text}"]
        elif isinstance(value, bool):
            arguments += [option.flag] if value != option.flag.startswith("--no-") else []
        elif isinstance(value, str | int | float | os.PathLike):
            arguments += [option.flag, str(value)]
        elif isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            arguments += [option.flag, ",".join(value)]
        else:
            return ()
    return tuple(arguments)


def command_for(verb: str, report: Report, *rest: str) -> str | None:
    """Return the command for another verb on the report's dump, with `rest` at the end; None if none can express it."""
    if not report.arguments:
        return None
    return " ".join(["nandoctor", verb, *(shlex.quote(printable(word)) for word in report.arguments), *rest])


def next_facts(report: Report) -> list[Fact]:
    """Return what to do and type next, besides applying a fix."""
    facts = list(step_facts(report.next_steps))
    explain = f"nandoctor explain {report.cause.code}" if report.cause is not None else None
    commands = filter(None, (explain, command_for("replay", report, "-o report.html")))
    return [*facts, *(Fact("more", command, is_command=True) for command in commands)]


def step_facts(steps: Sequence[str]) -> Iterator[Fact]:
    """Yield the next steps; a command at the end of a sentence becomes a fact of its own, to be copied."""
    for step in steps:
        sentence, command = _COMMAND.match(printable(step)).groups()  # type: ignore[union-attr]
        if sentence:
            yield Fact("next", sentence)
        if command:
            yield Fact("next", command, is_command=True)
