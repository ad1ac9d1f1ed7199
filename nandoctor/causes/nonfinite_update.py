"""nonfinite-update: an update by the optimizer, or by the training loop itself, makes weights non-finite.

What it is
    Forward, loss and gradients of the step are finite, but the weights are not once the optimizer has written them.
How nandoctor tells
    The recorder checks the gradients before each update and the weights after it. The dump holds the step as it was
    before the update, with the optimizer's settings and the names of the weights that became non-finite. The replay
    computes the gradients, runs the optimizer's step on them and looks for the operation that made the values.
Why it happens
    A schedule made the learning rate infinite or NaN (a division by a number of steps that is zero), an optimizer
    divided by a norm that is zero, or an update carried half-precision weights past 65504.
Fix
    If a setting is reported as non-finite, fix the schedule that sets it. In an optimizer of your own, guard the
    division: `gradient / (norm + 1e-8)`. Keep the weights in fp32 and let autocast make the low-precision copies.
When it is wrong
    The optimizer starts from its state after the failed update, since that from before it is not kept. No operation is
    named where the same weights stay finite then, or where the replay may not run the optimizer's code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from nandoctor.causes.base import UpdateFinding
from nandoctor.evidence.dump_summary import OptimizerUpdate
from nandoctor.evidence.report import Account, Evidence
from nandoctor.text import are, number, part_of

TITLE = "An update makes weights non-finite"
PHASES = ("update",)


def diagnose(finding: UpdateFinding) -> Account:
    update, made = finding.update, finding.made
    who = update.optimizer or "the training loop itself"
    first, more = next(iter(update.parameters)), len(update.parameters) - 1
    spoiled = f"{first} and {more} more" if more else first
    wrong = [f"{name} is {value:g}" for name, value in update.settings.items() if not math.isfinite(value)]
    known = ", from finite gradients" if update.largest_gradient is not None else ""
    why = f": its {' and '.join(wrong)}" if wrong else f": {made.headline}" if made and made.headline else known
    return Account(
        headline=f"{who[0].upper()}{who[1:]} makes {spoiled} non-finite{why}",
        explanation=f"The update by {who} made {spoiled} non-finite{why}.",
        evidence=(*(made.evidence if made else ()), *_evidence(update)),
        source=made.source if made else None,
    )


def _evidence(update: OptimizerUpdate) -> Iterator[Evidence]:
    for name, value in update.settings.items():
        if not math.isfinite(value):
            yield Evidence(name, str(value), f"the optimizer's {name} is {value:g}")
    for name, (num_bad, numel) in update.parameters.items():
        text = f"{part_of(num_bad, numel, 'value')} of {name} {are(num_bad)} non-finite after the update"
        yield Evidence("weight", name, text)
    if update.largest_gradient is not None:
        text = f"the largest gradient before the update is {number(update.largest_gradient)}"
        yield Evidence("largest_gradient", update.largest_gradient, text)
