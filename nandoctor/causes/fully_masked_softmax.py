"""fully-masked-softmax: all positions of a row are masked, so softmax has no finite score left.

What it is
    A row of scores is entirely -inf, so softmax divides zero by zero and the row is NaN. One finite score in the row is
    enough to prevent it.
How nandoctor tells
    A softmax or an attention has rows that are entirely -inf, and NaN in its output.
Why it happens
    A sample is all padding, or a causal mask and a padding mask together leave no position.
Fix
    Unmask at least one position of such rows, or skip them. `torch.nan_to_num` after the softmax hides the NaN in the
    forward only: if the mask was added to the scores, their gradients are NaN all the same.
When it is wrong
    A row that is masked on purpose and whose NaN is replaced later is not reported: only NaNs that reach the output,
    the loss or a gradient are.
"""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.causes.base import Candidate, Finding
from nandoctor.causes.sentences import subject
from nandoctor.changes.places import site_of
from nandoctor.changes.softmax_rows import UnmaskRows
from nandoctor.evidence.report import Account, Evidence
from nandoctor.ops import SOFTMAXES
from nandoctor.text import are, plural

TITLE = "Every position of a softmax is masked"
PHASES = ("forward",)


def diagnose(finding: Finding) -> Account | None:
    rows = finding.analysis.num_full_rows
    if finding.op.op not in SOFTMAXES or not rows:
        return None
    masked = f"{plural(rows, 'row')} of the scores {are(rows)} entirely"
    return Account(
        headline=f"{masked} -Inf, so {subject(finding.op)} divides 0 by 0",
        explanation=f"{masked} -inf (every position masked), so {finding.op.op} is 0/0.",
        evidence=(Evidence("num_full_rows", rows, f"{plural(rows, 'row')} with every position masked"),),
    )


def suggest(finding: Finding) -> Iterator[Candidate]:
    """Let such rows attend evenly, and use zeros as their result."""
    yield (UnmaskRows(site=site_of(finding.op)),)
