"""Put the fixes that were tried into sentences, with their checks and how to apply them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from nandoctor.causes.log_space import STABLE_FORM
from nandoctor.evidence.edits import StableLog, flatten
from nandoctor.evidence.formats import FP64
from nandoctor.evidence.report import Check, Fix, Report, TrialOutcome
from nandoctor.renderers.facts import Fact, command_for
from nandoctor.source_files import PACKAGE_FOLDERS
from nandoctor.text import percent, plural, printable, printable_code, within

VISIBLE_ERROR = 0.01
"""A trial with a larger error against fp32 than a fix may have shows that error."""
_MAX_LISTED = 3
_MAX_PATCH_LINES = 40
_SHOWN_IN_FULL = ("output", "gradients")
"""The other checks, of the loss and of variations of the batch, are only counted."""
_MAX_REASONS = 2
_MAX_ALTERNATIVES = 1
_MAX_PARENT_STEPS = 2
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


FixState = Literal["verified", "off", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFix:
    """A fix as people read it; `patch` holds its lines, and all text is printable.

    `state` is "verified", "off" (finite but not verified: too far from fp32, or never run as text) or "failed";
    `result` is the state in words. `facts` say how to apply it, what was checked and what was not; `checks` has a line
    for each check.
    """

    kind: str
    title: str
    patch: tuple[str, ...]
    state: FixState
    result: str
    outcome: str
    facts: tuple[Fact, ...]
    checks: tuple[Fact, ...]

    @property
    def verified(self) -> bool:
        """True if it passed every check that was made."""
        return self.state == "verified"


def list_fixes(report: Report) -> tuple[ShownFix, ...]:
    """Return the fixes, smallest first: verified, workarounds, those with the right output, those off or failed."""
    shown = [(fix, _show_fix(fix, report)) for fix in sorted(report.fixes, key=lambda fix: fix.rank)]

    def key(pair: tuple[Fix, ShownFix]) -> tuple[bool, bool, bool, int]:
        fix, shown = pair
        return not fix.verified, fix.workaround is None, not _is_output_right(fix), _STATES.index(shown.state)

    shown.sort(key=key)
    return tuple(fix for _, fix in shown)


def _is_output_right(fix: Fix) -> bool:
    """Return True if the output is right with a change, even if another check failed."""
    return any(check.name == "output" and check.status == "passed" for check in fix.checks)


_STATES: tuple[FixState, ...] = ("verified", "off", "failed")


def _show_fix(fix: Fix, report: Report) -> ShownFix:
    state, result = _judge(fix, report)
    return ShownFix(
        kind=fix.kind,
        title=printable(fix.title),
        patch=tuple(printable_code("" if line.isspace() else line) for line in fix.patch.splitlines()),
        state=state,
        result=result,
        outcome=describe_outcome(fix.outcome),
        facts=(*_how_to_apply(fix, report), *check_facts(fix), *reason_facts(fix)),
        checks=tuple(every_check(fix)),
    )


def _judge(fix: Fix, report: Report) -> tuple[FixState, str]:
    if fix.verified or fix.workaround is not None:
        return ("verified", "verified") if fix.verified else ("off", f"workaround: {printable(fix.workaround or '')}")
    error = fix.outcome.max_rel_err
    if not fix.outcome.finite:
        return "failed", f"failed: {describe_outcome(fix.outcome)}"
    failed = next((check for check in fix.checks if check.status == "failed"), None)
    if error is not None and error > VISIBLE_ERROR and (failed is None or failed.name == "output"):
        exact = any(trial.setting.dtype is FP64 and trial.outcome.finite for trial in report.counterfactuals)
        reference = "float64" if exact and report.verdict == "numerics" else "fp32"
        return "off", f"finite, but {percent(error)} off {reference}"
    if failed is not None and failed.name == "output":
        return "off", printable(failed.text)
    if failed is not None:
        return "failed", f"failed: {_describe_check(failed)}"
    return "off", "finite when tried, but not written as code"


def check_facts(fix: Fix) -> Iterator[Fact]:
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


def every_check(fix: Fix) -> Iterator[Fact]:
    """Yield a line for each check: first the failed ones, then the passed ones, then those not made."""
    for status, label in (("failed", "FAILED"), ("passed", "checked"), ("not-checked", "not checked")):
        for check in fix.checks:
            if check.status == status:
                yield Fact(label, _describe_check(check))


def _name_check(check: Check) -> str:
    """Return the check's name, with the number of samples if it did not cover the whole batch."""
    return printable(check.name) + (f" ({plural(len(check.samples), 'sample')})" if check.samples is not None else "")


def _describe_check(check: Check, between: str = ": ") -> str:
    """Return the check's finding, prefixed with its name unless the sentence begins with it."""
    name, text = _name_check(check), printable(check.text)
    return text if text.startswith(name) else f"{name}{between}{text}"


def _how_to_apply(fix: Fix, report: Report) -> Iterator[Fact]:
    if not fix.verified or not fix.patch:
        return
    if fix.kind == "source":
        number_of = sum(other.verified and other.rank <= fix.rank for other in report.fixes)
        pick = () if number_of == 1 else (f"--pick {number_of}",)
        command = command_for("fix", report, *pick, *write_flags(fix))
        with_git = f"git apply, in {printable(_from_here(fix.patch_root) if fix.patch_root else 'your project')}"
        yield Fact("apply it", command or with_git, is_command=command is not None)
    elif fix.kind in WHERE_TO_RUN:
        yield Fact("apply it", WHERE_TO_RUN[fix.kind])


_MIN_COST = 0.05
"""A cost below this share of the step is not mentioned."""
_WHY = {
    "guard": "The argument is made safe before the op and its result selected after it: either one alone leaves NaN "
    "in the gradient.",
    "scale-first": "The product is the same, and no intermediate result is larger than it.",
    "stable-log": "The result is computed without the number that rounds to 0 or overflows.",
    "unmask-rows": "A softmax over nothing but -Inf has no value: these rows get equal weights, and the result "
    "is set to 0.",
}


def reason_facts(fix: Fix) -> Iterator[Fact]:
    """Yield why a verified fix is written as it is, and what it costs."""
    if not fix.verified:
        return
    if reasons := dict.fromkeys(_WHY[edit.kind] for edit in flatten((fix.edit,)) if edit.kind in _WHY):
        yield Fact("why", " ".join(reasons))
    if cost := _describe_cost(fix):
        yield Fact("cost", cost)


def _describe_cost(fix: Fix) -> str:
    if fix.settings is not None and fix.settings.amp_dtype is not None:
        return "8 bits of precision in place of fp16's 11, everywhere; bf16 needs a GPU from 2020 or later"
    if fix.cost is None:
        return ""
    shares = (
        (fix.cost.products_in_fp32, "of the forward's multiply-adds in fp32"),
        (fix.cost.more_activations, "more memory for activations"),
    )
    return ", ".join(f"{percent(share)} {what}" for share, what in shares if share >= _MIN_COST)


def write_flags(fix: Fix) -> tuple[str, ...]:
    """Return the flags of `nandoctor fix` that write the change, if need be to files of an installed package."""
    names = re.findall(r"^\+\+\+ b/(.*)$", fix.patch, re.MULTILINE)
    installed = any(PACKAGE_FOLDERS.intersection(Path(fix.patch_root or "", name).parts) for name in names)
    return ("--write", "--allow-installed") if installed else ("--write",)


def git_flags(fix: Fix) -> tuple[str, ...]:
    """Return the flags of `nandoctor fix` and the pipe with which git applies the change in the patch's own folder."""
    folder = _from_here(fix.patch_root) if fix.patch_root else "."
    place = () if folder == "." else ("-C", shlex.quote(printable(folder)))
    return "--diff", "| git", *place, "apply"


def _from_here(folder: str) -> str:
    """Return the folder relative to the working directory if it is near, otherwise as is."""
    near = os.path.relpath(folder) if Path(folder).is_dir() else folder
    return folder if near.count("..") > _MAX_PARENT_STEPS else near


WHERE_TO_RUN = {
    "snippet": "run these lines where your model is called `model`, once it is built and its weights are loaded",
    "state": "run these lines once, where your model is called `model`, after its weights are loaded",
    "data": "run these lines before the step; they were tried on this batch only, and the next may fail again",
    "setting": "set it in the training loop",
    "advice": "no code to run: change it by hand",
}


def describe_outcome(outcome: TrialOutcome) -> str:
    """Return a trial's outcome in words: "finite, within 0.06 % of fp32"."""
    if not outcome.finite:
        return "still non-finite" if outcome.ran else "the step cannot be run with it"
    if outcome.max_rel_err is None:
        return "finite, nothing to compare with fp32"
    if outcome.max_rel_err == 0:
        return "finite, equal to fp32"
    return f"finite, {within(outcome.max_rel_err)} of fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixSummary:
    """The fixes on one screen: a heading, the lines of the first one, and facts about it and the others."""

    heading: str
    patch: tuple[str, ...]
    facts: tuple[Fact, ...]


def summarize_fixes(report: Report) -> FixSummary | None:
    """Return the first verified fix, or what was tried and why none was found; None if there was no search."""
    fixes = list_fixes(report)
    verified = [fix for fix in fixes if fix.verified]
    if not verified:
        tried = tuple(Fact("tried", f"{fix.title} ({fix.result})") for fix in fixes[:_MAX_LISTED])
        more = f", of {plural(len(fixes), 'change')}" if len(fixes) > _MAX_LISTED else ""
        heading = no_fix_heading(report)
        return FixSummary(heading=f"{heading}{more}", patch=(), facts=(*tried, *why_facts(report))) if heading else None
    first, *others = verified
    of = f" 1 of {len(verified)}" if others else ""
    what = "Workaround" if first.kind == "data" and report.verdict == "numerics" else "Fix"
    where = " on this batch alone" if first.kind == "data" else ""
    beside = [f"{fix.title} ({fix.outcome})" for fix in others[:_MAX_ALTERNATIVES]]
    beside += [f"{len(others) - len(beside)} more in the report"] if len(others) > len(beside) else []
    alternatives = [Fact("or", "; ".join(beside))] if others else []
    untaken = fixes[len(verified) :][:_MAX_ALTERNATIVES] if all(fix.kind == "data" for fix in verified) else ()
    refused = tuple(Fact("not verified", f"{fix.title} ({fix.result})") for fix in untaken)
    patch, left = _shorten_patch(first)
    command = command_for("fix", report) if left else None
    rest = [Fact("all of it", command, is_command=True)] if command else []
    return FixSummary(
        heading=f"{what}{of}, verified{where}: {first.title}",
        patch=patch,
        facts=(*rest, *first.facts, *_better_facts(report), *alternatives, *refused),
    )


def no_fix_heading(report: Report) -> str:
    """Return the heading of the section of fixes if none is verified; "" if there was no search."""
    return "No fix was verified" if report.fixes else "No fix was found" if report.search_notes else ""


def _better_facts(report: Report) -> Iterator[Fact]:
    """Yield what to write by hand if no verified fix joins a logarithm with its probability."""
    joined = any(isinstance(edit, StableLog) for fix in report.fixes if fix.verified for edit in flatten((fix.edit,)))
    found = report.cause.evidence if report.cause is not None and not joined else ()
    yield from (Fact("better", printable(item.text)) for item in found if item.name == STABLE_FORM)


def why_facts(report: Report) -> Iterator[Fact]:
    """Yield the reasons why there is no verified fix."""
    yield from (Fact("why", printable(note)) for note in report.search_notes)


def _shorten_patch(fix: ShownFix) -> tuple[tuple[str, ...], int]:
    """Return the lines of a fix that fit on a screen, and how many are left out."""
    lines = list(_trim_context(fix.patch))
    left = max(len(lines) - _MAX_PATCH_LINES, 0)
    more = [f"... {plural(left, 'more line')}"] if left else []
    return (*lines[:_MAX_PATCH_LINES], *more), left


def _trim_context(patch: Sequence[str]) -> Iterator[str]:
    """Yield the patch with one line of context around the changes, which is all that `git apply` needs."""
    starts = [place for place, line in enumerate(patch) if _HUNK.match(line)]
    limits = [*starts, len(patch)]
    yield from patch[: limits[0]]
    for start, end in pairwise(limits):
        yield from _trim_hunk(patch[start], patch[start + 1 : end])


def _trim_hunk(header: str, body: Sequence[str]) -> Iterator[str]:
    found = _HUNK.match(header)
    changed = [place for place, line in enumerate(body) if line.startswith(("+", "-"))]
    if found is None or not changed or any(line.startswith(("\\", "--- ", "diff ")) for line in body):
        yield from (header, *body)
        return
    first = max(changed[0] - 1, 0)
    kept = body[first : changed[-1] + 2]
    old, new = (sum(not line.startswith(other) for line in kept) for other in "+-")
    yield f"@@ -{int(found[1]) + first},{old} +{int(found[2]) + first},{new} @@"
    yield from kept
