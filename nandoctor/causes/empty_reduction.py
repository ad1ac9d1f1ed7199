"""empty-reduction: a mean or a spread over nothing.

What it is
    The mean of no elements, the standard deviation of one, a loss averaged over labels that are all ignored: 0 / 0.
How nandoctor tells
    A reduction or a loss of finite inputs is NaN, in float64 as well.
Why it happens
    A boolean mask selects nothing in this batch, or every label equals ignore_index. The gradients can be finite, and
    GradScaler then does not skip the step.
Fix
    Skip a batch in which nothing counts, or return zero for it: `loss = (x * mask).sum() / mask.sum().clamp(min=1)`.
    For the spread of one element, use `std(correction=0)`.
When it is wrong
    It shows that the average is empty, not why: check the mask or the labels that select its values.
"""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.causes.base import Candidate, Finding
from nandoctor.causes.sentences import subject
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.places import site_of
from nandoctor.evidence.report import Account, Evidence
from nandoctor.ops import SPREADS, is_average
from nandoctor.text import plural

TITLE = "A reduction over no elements"
PHASES = ("forward",)


def diagnose(finding: Finding) -> Account | None:
    op, num_bad = finding.op.op, finding.analysis.num_bad
    if not is_average(op) or finding.had_inf_input or finding.overflowed or finding.analysis.kinds != ("nan",):
        return None
    lacks, why = "too few values" if op in SPREADS else "nothing to average", ""
    if op.startswith("nll_loss"):
        lacks, why = "no label that counts", " (each is ignore_index, by default -100, or has weight 0)"
    return Account(
        headline=f"{subject(finding.op)} has {lacks}: 0/0 is NaN",
        explanation=f"{op} has {lacks}{why}: its inputs are finite, and even float64 gives NaN.",
        evidence=(Evidence("num_bad", num_bad, f"{plural(num_bad, 'average')} of 0/0"),),
    )


def suggest(finding: Finding) -> Iterator[Candidate]:
    """Count an average over nothing as zero."""
    yield (ClampArgument(site=site_of(finding.op), argument="", nan=True),)
