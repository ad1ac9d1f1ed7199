"""Render `nandoctor verify` and `nandoctor fix`: whether the step is fixed, or a change that fixes it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from nandoctor.evidence.report import Fix, FixSettings, Report
from nandoctor.evidence.verification import CodeState, FixChoice, Verification, VerificationOutcome
from nandoctor.renderers.console import CodeLine, diff_style, fact_rows, literal, print_parts, spaced
from nandoctor.renderers.facts import Fact, command_for, step_facts
from nandoctor.renderers.fix_facts import (
    WHERE_TO_RUN,
    describe_outcome,
    every_check,
    git_flags,
    reason_facts,
    write_flags,
)
from nandoctor.renderers.verdicts import FAILED, GOOD, UNCLEAR, Tone
from nandoctor.text import brief, constant, file_line, join_first, percent, plural, printable

_SHOWN: dict[VerificationOutcome, tuple[str, Tone]] = {
    "fixed": ("FIXED", GOOD),
    "passes": ("PASSES", GOOD),
    "still-fails": ("STILL FAILS", FAILED),
    "cannot-tell": ("CANNOT TELL", UNCLEAR),
}
_MAX_CHANGES = 4
_MAX_OTHERS = 3


def print_verification(verification: Verification, console: Console) -> None:
    """Print the outcome, what has changed, what was checked, and what to do next."""
    word, tone = _SHOWN[verification.outcome]
    badge = Text(f"{word}:", style=f"{tone.text} bold")
    headline = Text.assemble(badge, " ", literal(verification.headline))
    facts = fact_rows(list(_facts(verification)))
    print_parts(spaced([headline], [*facts]), console, crop=False)


def short_story(verification: Verification) -> str:
    """Return everything that is printed, as plain text."""
    word, _ = _SHOWN[verification.outcome]
    facts = [f"  {fact.label:<11} {fact.text}" for fact in _facts(verification)]
    return "\n".join([f"{word}: {printable(verification.headline)}", *facts])


def _facts(verification: Verification) -> Iterator[Fact]:
    yield from (Fact("because", printable(reason)) for reason in verification.reasons[1:])
    if verification.failure is not None:
        yield Fact("failed", printable(verification.failure))
    if verification.code.changed or verification.outcome == "fixed":
        yield Fact("changed", printable(describe_changes(verification.code)))
    yield from _place(verification)
    if verification.output is not None and verification.output.finite:
        error = verification.output.max_rel_err
        far = "" if error is None else ", equal to fp32" if error == 0 else f", {percent(error)} off fp32"
        far += " of the unchanged code" if far and verification.reference == "unchanged" else ""
        yield Fact("output", f"finite {verification.under}{far}")
    for check in (check for check in verification.checks if check.name == "gradients"):
        skipped = "not checked: " if check.status == "not-checked" else ""
        yield Fact("gradients", f"{skipped}{printable(check.text.removeprefix('gradients '))}")
    if verification.run is not None:
        yield Fact("replayed", printable(f"in {verification.run}"))
    yield from (Fact("note", printable(note)) for note in verification.notes)
    yield from step_facts(verification.next_steps)


def describe_changes(code: CodeState) -> str:
    """Return what is known to have changed: "train.py:45 (1 line) since the dump was written"."""
    texts = []
    for change in code.changes:
        name = brief(change.file)
        place = name if change.line is None else f"{name}:{change.line}"
        texts.append(f"{place} ({plural(change.num_lines, 'line')})" if change.num_lines else place)
    if not (texts or code.settings):
        return "unknown: the dump has no hashes of the code"
    since = [f"{join_first(texts, _MAX_CHANGES)} since the dump was written"] if texts else []
    return "; ".join([*since, *code.settings])


def _place(verification: Verification) -> Iterator[Fact]:
    """Yield where it still fails, and why."""
    origin = verification.origin
    if origin is not None:
        where = printable(origin.place.in_words)
        source = origin.source
        place = (file_line(source.file, source.line), brief(source.text)) if source else (origin.phase,)
        yield Fact("where", f"{': '.join(filter(None, place))}, in {where}")
    elif verification.first_nonfinite is not None:
        yield Fact("where", printable(verification.first_nonfinite.place.with_type))
    if verification.cause is not None:
        yield Fact("cause", f"{verification.cause.code}: {printable(verification.cause.explanation)}")


def print_fix(choice: FixChoice, report: Report, console: Console) -> None:
    """Print the chosen change, and the next best ones in a line each."""
    of = f"Fix {choice.pick} of {choice.num_verified}, verified" if choice.fix.verified else "Workaround"
    title = literal(f"{of}: {choice.fix.title}", "bold")
    is_diff = choice.fix.kind == "source"
    code = [CodeLine(line, diff_style(line) if is_diff else "") for line in code_of_fix(choice.fix).splitlines()]
    facts = fact_rows(list(_fix_facts(choice, report)))
    print_parts(spaced([literal(choice.headline, "bold")], [title, *code], [*facts]), console, crop=False)


def code_of_fix(fix: Fix) -> str:
    """Return the change as a diff or as code, including the code that makes a setting."""
    return fix.patch or "\n".join(_settings_as_code(fix.settings or FixSettings()))


def _settings_as_code(settings: FixSettings) -> Iterator[str]:
    if settings.amp_dtype is not None:
        yield f'with torch.autocast("cuda", dtype=torch.{settings.amp_dtype}):'
    if settings.loss_scale is not None:
        yield f'scaler = torch.amp.GradScaler("cuda", init_scale={constant(settings.loss_scale)})'
    if settings.optimizer_eps is not None:
        yield "for group in optimizer.param_groups:"
        yield f'    group["eps"] = {constant(settings.optimizer_eps)}'


def _fix_facts(choice: FixChoice, report: Report) -> Iterator[Fact]:
    chosen = choice.fix
    yield Fact("result", describe_outcome(chosen.outcome))
    if chosen.workaround is not None:
        yield Fact("replaces", printable(chosen.workaround))
    yield from every_check(chosen)
    yield from reason_facts(chosen)
    if chosen.kind != "source":
        yield Fact("where", WHERE_TO_RUN[chosen.kind])
    elif choice.verification is None:
        pick = () if choice.pick == 1 else (f"--pick {choice.pick}",)
        for label, flags in (("apply it", write_flags(chosen)), ("or", git_flags(chosen))):
            if command := command_for("fix", report, *pick, *flags):
                yield Fact(label, command, is_command=True)
    verified = (item for item in report.fixes if item.verified)
    for place, other in list(enumerate(verified, 1))[:_MAX_OTHERS]:
        if other is not chosen:
            yield Fact(f"--pick {place}", f"{printable(other.title)}: {describe_outcome(other.outcome)}")
