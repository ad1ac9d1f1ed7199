"""Writes the notes of a search: what was not tried, why nothing helped, what to do by hand; errors of the program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import nn

from nandoctor.causes.candidates import STABLE_FORM
from nandoctor.causes.registry import find_page
from nandoctor.causes.sentences import operand, subject
from nandoctor.changes.setting import UseFormat
from nandoctor.diagnosis.conclusion import Findings
from nandoctor.diagnosis.growth import key_of
from nandoctor.evidence.formats import FP32, FP64
from nandoctor.evidence.report import Fix
from nandoctor.evidence.trace import OpCall
from nandoctor.fixes.candidates import MAX_LEADS, distinct_leads
from nandoctor.fixes.verify import Trials
from nandoctor.ops import DOMAINS
from nandoctor.text import number


def describe_search(
    findings: Findings, ranked: Sequence[Fix], untried: Sequence[str], *, out_of_memory: bool
) -> Iterator[str]:
    """Yield sentences on what was not tried, what could not be run, and why no change is a fix."""
    if untried and out_of_memory:
        yield f"Not tried, because memory ran out: the rest of {', '.join(untried)}. Run it with more memory."
    elif untried:
        yield f"The trial budget was spent. Not or not fully tried: {', '.join(untried)} (--max-trials, --time)."
    if findings.verdict == "numerics":
        tried = ": what was tried changes the operation itself" if ranked else ""
        yield f"fp32 is non-finite as well, so casts to fp32 fix nothing{tried}."
    verified = [item for item in ranked if item.verified]
    workaround = next((item for item in ranked if item.workaround is not None), None)
    if workaround is not None and not verified:
        yield "No change that was tried keeps what the formula means."
        yield f"A workaround (`--pick 1` of `nandoctor fix`): {workaround.title}. But {workaround.workaround}."
    if ranked and not verified and (advice := by_hand(findings)):
        yield advice


def distance_of(fix: Fix) -> float:
    """Return the output's error with a change, infinite if it is not finite."""
    error = fix.outcome.max_rel_err
    return error if fix.outcome.finite and error is not None else math.inf


def describe_none(findings: Findings, model: nn.Module) -> str:
    """Describe why there was no change to try, with what the page of the cause advises to do by hand."""
    cause = next((diagnosis.cause for diagnosis in findings.conclusion.diagnoses[:1]), None)
    reason = cause.code if cause is not None else "for an unknown cause"
    if findings.verdict == "state":
        why = "only a checkpoint, or the code that builds the model, knows what belongs there"
    elif len(distinct_leads(findings.conclusion, model)) > MAX_LEADS:
        why = f"non-finite values are made in more than {MAX_LEADS} places of the code"
    else:
        why = f"no change of this code is known that keeps its meaning ({reason})"
    return f"No change was found to try: {why}. {by_hand(findings)}".rstrip()


def by_hand(findings: Findings) -> str:
    """Return what the cause's page advises, without fp32 if that fails too; "" if the cause has better advice."""
    cause = next((diagnosis.cause for diagnosis in findings.conclusion.diagnoses[:1]), None)
    if cause is None or any(item.name == STABLE_FORM for item in cause.evidence):
        return ""
    sentences = dict(find_page(cause.code).sections)["Fix"].removesuffix(".").split(". ")
    of_use = [text for text in sentences if findings.verdict != "numerics" or str(FP32) not in text]
    return f"By hand: {'. '.join(of_use)}." if of_use else ""


_LEAST_LEFT = 1e-3
"""The share of the distance outside that is left in float64 if rounding did not make it; of rounding 2e-9 is."""


def find_program_error(findings: Findings, trials: Trials) -> str | None:
    """Describe by how much an argument is outside its domain if no rounding explains that; None if one may.

    Where output and loss are finite all the same, the code leaves such values out.
    """
    if findings.trace.finite:
        return None
    first = next(iter(findings.conclusion.diagnoses), None)
    if not trials.numerics or first is None or first.cause is None or first.cause.code != "invalid-domain":
        return None
    made = findings.reference.by_key.get(key_of(first.origin))
    if made is None or not _outside(made) or (traces := trials.trace(UseFormat(format=FP64))) is None:
        return None
    exact = traces[0].by_key.get(made.key)
    if exact is None or _outside(exact) <= _LEAST_LEFT * _outside(made):
        return None
    name = DOMAINS[exact.op].argument
    taken = operand(exact, name) or f"the argument of {exact.op}"
    is_data = getattr(exact.find_input(name), "origin", "") == "batch"
    return (
        f"The {'batch' if is_data else 'program'} is wrong here: {taken} is outside the domain of {subject(exact)} by "
        f"{number(_outside(exact))} in float64 too, so no rounding made it. A clamp would only hide that"
        f"{': repair or skip such samples' if is_data else ''}."
    )


def _outside(op: OpCall) -> float:
    """Return how far the furthest element of the op's argument is outside its domain, 0 if all are inside."""
    domain = DOMAINS.get(op.op)
    taken = op.find_input(domain.argument) if domain is not None else None
    stats = taken.stats if taken is not None else None
    if domain is None or stats is None or stats.min is None or stats.max is None:
        return 0.0
    return max(domain.low - stats.min, stats.max - domain.high, 0.0)
