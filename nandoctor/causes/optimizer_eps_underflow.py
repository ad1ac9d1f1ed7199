"""optimizer-eps-underflow: the optimizer's eps rounds to zero in the weights' format, and so does what it is added to.

What it is
    Adam divides by sqrt(v) + eps, where v is the running mean of squared gradients. In pure fp16 the default eps of
    1e-8 is zero, and in the first step so is v = 0.001 * gradient^2 for any gradient below 5.4e-3. The step is then
    0/0, or another number divided by zero.
How nandoctor tells
    The optimizer's state in the file has exact zeros among its second moments, in a format that rounds its eps to zero.
Why it happens
    The weights themselves are fp16 (`model.half()`), not fp32 under autocast, and a dead unit or an unseen word has no
    gradient. Forward, loss and gradients are finite, so GradScaler does not skip the step.
Fix
    `Adam(..., eps=1e-4)`; better, keep the weights in fp32 and let autocast make the fp16 copies. A fused optimizer
    computes its step in fp32.
When it is wrong
    A file without optimizer state, or from before the first step, cannot show it.
"""

from __future__ import annotations

from nandoctor.evidence.dump_summary import OptimizerSlot
from nandoctor.evidence.report import Account, Evidence
from nandoctor.text import are, constant, number, part_of

TITLE = "The optimizer's eps rounds to zero"
PHASES = ("optimizer",)


def diagnose(slot: OptimizerSlot) -> Account | None:
    counts, dtype = slot.moment.counts, slot.moment.dtype
    if counts is None or not counts.num_zero or dtype.round(slot.eps) != 0:
        return None
    zeros = part_of(counts.num_zero, slot.moment.numel, "second moment")
    is_zero = f"eps of {constant(slot.eps)} rounds to 0 in {dtype}" if slot.eps else "eps is 0"
    return Account(
        headline=f"The optimizer's {is_zero}, so its step divides by 0",
        explanation=f"The optimizer's {is_zero}, and {zeros} of {slot.parameter or 'a parameter'} "
        f"{are(counts.num_zero)} 0 too: its step divides by zero there.",
        evidence=(
            Evidence("eps", slot.eps, f"the {is_zero}"),
            Evidence("num_zero", counts.num_zero, f"{zeros} {are(counts.num_zero)} exactly zero"),
            Evidence("smallest", counts.smallest, f"the smallest of the others is {number(counts.smallest)}"),
        ),
    )
