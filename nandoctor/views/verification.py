"""The documents of `nandoctor verify` and `nandoctor fix`: whether the step is fixed, or a change that fixes it."""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.evidence.report import Report
from nandoctor.evidence.verification import CodeState, FixChoice, Verification, VerificationOutcome
from nandoctor.text import brief, file_line, join_first, percent
from nandoctor.views.blocks import Block, Fact, Facts, Headline, Section, Tone
from nandoctor.views.fixes import checked_first, code_of_fix, every_check, how_to_apply, reason_facts, step_facts

_SHOWN: dict[VerificationOutcome, tuple[str, Tone]] = {
    "fixed": ("FIXED:", "good"),
    "passes": ("PASSES:", "good"),
    "still-fails": ("STILL FAILS:", "failed"),
    "cannot-tell": ("CANNOT TELL:", "unclear"),
}
_MAX_CHANGES = 4
_MAX_OTHERS = 3


def verification_document(verification: Verification) -> Iterator[Block]:
    """Yield the outcome, what has changed, what was checked, and what to do next."""
    word, tone = _SHOWN[verification.outcome]
    yield Headline(verification.headline, word=word, tone=tone)
    yield Facts(list(_facts(verification)))


def _facts(verification: Verification) -> Iterator[Fact]:
    yield from (Fact("because", reason) for reason in verification.reasons[1:])
    if verification.failure is not None:
        yield Fact("failed", verification.failure)
    if verification.code.changed or verification.outcome == "fixed":
        yield Fact("changed", describe_changes(verification.code))
    origin, first = verification.origin, verification.first_nonfinite
    if origin is not None:
        source = origin.source
        line = (file_line(source.file, source.line), brief(source.text)) if source else (origin.phase,)
        yield Fact("where", f"{': '.join(filter(None, line))}, in {origin.place.in_words}")
    elif first is not None:
        yield Fact("where", first.place.with_type)
    if verification.cause is not None:
        yield Fact("cause", f"{verification.cause.code}: {verification.cause.explanation}")
    if verification.output is not None and verification.output.finite:
        error = verification.output.max_rel_err
        far = "" if error is None else ", equal to fp32" if error == 0 else f", {percent(error)} off fp32"
        yield Fact("output", f"finite {verification.under}{far}")
    for check in (check for check in verification.checks if check.name == "gradients"):
        skipped = "not checked: " if check.status == "not-checked" else ""
        yield Fact("gradients", f"{skipped}{check.text.removeprefix('gradients ')}")
    if verification.run is not None:
        yield Fact("replayed", f"in {verification.run}")
    yield from (Fact("note", note) for note in verification.notes)
    yield from step_facts(verification.next_steps)


def describe_changes(code: CodeState) -> str:
    """Return what is known to have changed: "train.py since the dump was written"."""
    texts = [brief(change.file) for change in code.changes]
    if not (texts or code.settings):
        return "unknown: the dump has no hashes of the code"
    since = [f"{join_first(texts, _MAX_CHANGES)} since the dump was written"] if texts else []
    return "; ".join([*since, *code.settings])


def fix_document(choice: FixChoice, report: Report) -> Iterator[Block]:
    """Yield the chosen change, and the next best ones in a line each."""
    yield Headline(choice.headline)
    of = f"Fix {choice.pick} of {choice.num_verified}, verified" if choice.fix.verified else "Workaround"
    yield Section(f"{of}: {choice.fix.title}", [code_of_fix(choice.fix), Facts(list(_fix_facts(choice, report)))])
    if choice.verification is not None:
        yield from verification_document(choice.verification)


def _fix_facts(choice: FixChoice, report: Report) -> Iterator[Fact]:
    chosen = choice.fix
    if chosen.workaround is not None:
        yield Fact("replaces", chosen.workaround)
    yield from every_check(chosen)
    yield from reason_facts(chosen)
    if choice.verification is None:
        yield from how_to_apply(chosen, report)
    verified = (item for item in report.fixes if item.verified)
    for place, other in list(enumerate(verified, 1))[:_MAX_OTHERS]:
        if other is not chosen:
            yield Fact(f"--pick {place}", f"{other.title}: {checked_first(other)}")
