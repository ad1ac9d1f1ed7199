"""poisoned-input: the batch itself is non-finite.

What it is
    A NaN or an infinity in the image, the table or the signal, before any layer reads it.
How nandoctor tells
    An array that the model was called with is non-finite. Infinities count as intended if the fp32 run is finite in
    spite of them, as with attention masks.
Why it happens
    A corrupt file, a division by the standard deviation of a constant channel, a missing value in a table.
Fix
    Fix the loading and the normalisation; reject such samples when they are loaded.
When it is wrong
    The file does not tell what wrote the value into the batch.
"""

from __future__ import annotations

from nandoctor.causes.base import OutsideTensor, outside_evidence
from nandoctor.causes.sentences import how_nonfinite
from nandoctor.evidence.report import Account
from nandoctor.text import code

TITLE = "The batch already holds NaN or Inf"
PHASES = ("input",)


def diagnose(finding: OutsideTensor) -> Account:
    return Account(
        headline=f"{code(finding.name)} {how_nonfinite(finding.stats)} before any layer reads it",
        explanation=f"The batch's {finding.name} holds non-finite values before any layer reads it.",
        evidence=outside_evidence("array", finding),
    )
