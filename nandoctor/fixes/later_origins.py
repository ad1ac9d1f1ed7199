"""Finds origins that show only once the first is fixed: another sample's behind its NaN, or in the backward pass."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from torch import nn

from nandoctor.causes.base import Candidate
from nandoctor.changes.constant import SetArgument
from nandoctor.changes.keep_fp32 import KeepModule, KeepOp
from nandoctor.changes.source_tree import FUNCTIONS, parse_source
from nandoctor.diagnosis.backward import conclude_backward
from nandoctor.diagnosis.conclusion import Conclusion, Findings, Suspect, conclude
from nandoctor.evidence.edits import ChangedFile, Edit, SingleEdit, SourcePatch, flatten
from nandoctor.evidence.report import Diagnosis
from nandoctor.evidence.trace import LOSS, SourceLine
from nandoctor.fixes.candidates import (
    MAX_LEADS,
    distinct_leads,
    is_library,
    join,
    line_of,
    place_in_code,
    together,
)
from nandoctor.fixes.gradient_check import at_scale
from nandoctor.fixes.made_up_loss import surrogate_loss
from nandoctor.fixes.verify import Trials
from nandoctor.fixes.writing import ChangeWriter
from nandoctor.text import file_line, kinds_text, samples_text


def find_later_origins(
    findings: Findings, trials: Trials, writer: ChangeWriter
) -> tuple[tuple[Diagnosis, ...], Iterable[Candidate]]:
    """Change the first origins and find where the step fails then, until all is finite or nothing helps.

    Returns the origins that show after the first, in that order, and the changes that fix all of them.
    """
    model = trials.step.model
    leads = distinct_leads(findings.conclusion, model)
    seen = _places(leads, model)
    chosen: list[Candidate] = []
    later: list[Diagnosis] = []
    while 0 < len(leads) <= MAX_LEADS and len(chosen) < MAX_LEADS:
        options = together([_options(lead, trials) for lead in leads])
        found = _first_that_helps(chosen, options, seen, trials, writer)
        if found is None:
            break
        candidate, conclusion = found
        chosen.append(candidate)
        leads = distinct_leads(conclusion, model)
        seen |= _places(leads, model)
        later += conclusion.diagnoses
    # The change of the last origin may fix those before it: a root that is never 0 is no divisor of 0.
    return tuple(later), dict.fromkeys((*chosen[-1:], *together([[candidate] for candidate in chosen])))


def describe_later(diagnoses: Iterable[Diagnosis]) -> list[str]:
    """Return a sentence for each: where the step fails once the origins before it are changed."""
    again = "Once the first failure is fixed, the step fails again"
    return list(dict.fromkeys(f"{again}: {_describe(found)}." for found in diagnoses))


def _places(leads: Iterable[Suspect], model: nn.Module) -> set[object]:
    return {place_in_code(lead, model) for lead in leads}


def _options(lead: Suspect, trials: Trials) -> list[Candidate]:
    """Return the operation's changes, after fp32 if that does not fail; otherwise fp32 only if there are none."""
    site, changes = lead.site, list(lead.suggestions)
    kept: Edit = KeepOp(site=site)
    if site.module == LOSS or is_library(site, trials.step.model):
        # A line can be changed along with others, a snippet cannot.
        kept = KeepOp(site=line_of(site)) if site.source is not None else KeepModule(module=site.module)
    return changes or [(kept,)] if trials.numerics else [(kept,), *changes]


def _describe(diagnosis: Diagnosis) -> str:
    origin, cause = diagnosis.origin, diagnosis.cause
    where = [file_line(origin.source.file, origin.source.line)] if origin.source else []
    if origin.elements.samples and origin.output is not None:
        where.append(samples_text(origin.elements.samples, origin.output.shape[0]))
    what = cause.headline if cause is not None else ""
    what = what or f"{origin.op or 'an operation'} gives {kinds_text(origin.elements.kinds)}"
    what = f"the{what[3:]}" if what.startswith("The ") else what
    return f"{what} ({', '.join(where)})" if where else what


def _first_that_helps(
    chosen: Sequence[Candidate], options: Iterable[Candidate], seen: set[object], trials: Trials, writer: ChangeWriter
) -> tuple[Candidate, Conclusion] | None:
    """Return the first change after which the step fails elsewhere, or no longer, with the conclusion of that run."""
    for candidate in options:
        edit = join([_strongest(change) for change in (*chosen, candidate)])
        conclusion = _conclude_with(edit, trials, writer)
        if conclusion is not None and seen.isdisjoint(_places(conclusion.suspects, trials.step.model)):
            return candidate, conclusion
    return None


def _strongest(change: Candidate) -> Edit:
    """Return the last strength, or the largest eps: with the smallest one the gradients may still overflow."""
    return max(change, key=lambda edit: (edit.value or 0.0) if isinstance(edit, SetArgument) else change.index(edit))


def _conclude_with(edit: Edit, trials: Trials, writer: ChangeWriter) -> Conclusion | None:
    """Return why the changed step fails, including its backward pass at loss scale 1; None if that is not known."""
    step = trials.with_gradients.step
    needs_text = any(single.is_text_alone and type(single).run is SingleEdit.run for single in flatten((edit,)))
    change = next((written.change for written in writer.write(edit)), None) if needs_text else edit
    traces = trials.with_gradients.trace(*at_scale(change, 1.0)) if change is not None else None
    if traces is None:
        return None
    trace, reference = traces
    if not trace.finite:
        conclusion = conclude(trace, reference, step.low)
    elif trace.bad_gradients:
        conclusion = conclude_backward(trace, reference, step.low)
    else:
        return Conclusion()
    stands_in = step.loss is surrogate_loss and any(lead.site.module == LOSS for lead in conclusion.suspects)
    files = change.files if isinstance(change, SourcePatch) else ()
    sources = [lead.site.source for lead in conclusion.suspects if lead.site.source is not None]
    is_placed = not any(_is_in_changed(file, source) for file in files for source in sources)
    return conclusion if conclusion.suspects and is_placed and not stands_in else None


def _is_in_changed(file: ChangedFile, source: SourceLine) -> bool:
    """Return True if a line is in a function that a patch changes: a trace has its number in the changed file."""
    tree = parse_source(file.after)
    statement = tree.statement_at(source.line) if file.path == source.file else None
    function = tree.function_of(statement) if statement is not None else None
    before = (node for node in ast.walk(ast.parse(file.before)) if isinstance(node, FUNCTIONS))
    return function is not None and ast.dump(function) not in map(ast.dump, before)
