"""poisoned-buffers: a buffer that this forward reads is non-finite, but the weights are fine.

What it is
    BatchNorm updates running_mean and running_var in every training forward, also in one that overflows and whose step
    GradScaler skips. From then on evaluation is NaN, while training looks healthy.
How nandoctor tells
    A buffer that the module reads in the mode of the replay is non-finite. In train mode a BatchNorm does not read its
    own.
Why it happens
    One batch overflowed: the running average of anything with NaN is NaN for good.
Fix
    Call `bn.reset_running_stats()` and run some forwards in train mode to fill them again; then fix the overflow
    itself. If the model's own code fills a buffer with infinities, such as 1 / torch.arange(n), fix that code.
When it is wrong
    A file that was written after the failing forward has poisoned buffers too; a replay in train mode tells them apart.
"""

from __future__ import annotations

from nandoctor.causes.base import OutsideTensor, outside_evidence
from nandoctor.causes.sentences import how_nonfinite
from nandoctor.evidence.report import Account
from nandoctor.text import code

TITLE = "The buffers already hold NaN or Inf"
PHASES = ("buffer",)


def diagnose(finding: OutsideTensor) -> Account:
    when = "as the model's own code builds it" if finding.built else "before the forward starts"
    by = " (set by the code that builds the model, not by training)" if finding.built else ""
    return Account(
        headline=f"The buffer {code(finding.name)} {how_nonfinite(finding.stats)} {when}",
        explanation=f"The buffer {finding.name} holds non-finite values{by}, and so does everything computed from it.",
        evidence=outside_evidence("buffer", finding),
    )
