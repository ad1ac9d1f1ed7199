"""poisoned-input: the batch itself is non-finite.

In: an array of the batch. Out: a `Cause`, or None.

What it is
    A NaN or an infinity in the image, the table or the signal, before any layer sees it.
Evidence it needs
    A non-finite array among those that the model was called with. Infinities that a finite fp32 run lives with
    (attention masks) are meant.
Why it happens
    A corrupt file, a division by the standard deviation of a constant channel, a missing value in a table.
Fix
    PassingCase the loading and the normalisation; refuse such samples where they are loaded.
Known problems
    None.
"""

from __future__ import annotations

from nandoctor.evidence.report import Cause, Evidence
from nandoctor.evidence.trace import TensorStats

CODE = "poisoned-input"
TITLE = "The batch is bad already"


def diagnose(name: str, stats: TensorStats) -> Cause | None:
    """An input that is bad before anything runs."""
    if stats.finite:
        return None
    return Cause(
        code=CODE,
        title=TITLE,
        explanation=f"The batch's {name} holds non-finite values before any layer sees it.",
        evidence=(Evidence(name="array", value=name, text=f"{name} {list(stats.shape)} is non-finite"),),
    )
