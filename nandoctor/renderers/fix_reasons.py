"""Why a fix works, where the change does not say so by itself, and what it costs, where that matters."""

from __future__ import annotations

from collections.abc import Iterator

from nandoctor.evidence.edits import flatten
from nandoctor.evidence.report import Fix
from nandoctor.renderers.facts import Fact
from nandoctor.text import percent

_WORTH_TELLING = 0.05
"""The share of the step that has to be widened for a line about it."""
_WHY = {
    "guard": "The argument is made safe before the op and its result selected after it: one of them alone leaves NaN "
    "in the gradient.",
    "scale-first": "The product is the same, and no intermediate result is larger than it.",
    "stable-log": "The result is computed without the number that rounds to 0 or overflows.",
    "unmask-rows": "A softmax over nothing but -Inf has no value: these rows attend evenly, and their result is 0.",
}


def reason_facts(fix: Fix) -> Iterator[Fact]:
    """A sentence for each of the two; none of a fix that was not verified."""
    edits = flatten((fix.edit,))
    reasons = dict.fromkeys(_WHY[edit.kind] for edit in edits if edit.kind in _WHY)
    if fix.verified and reasons:
        yield Fact(label="why", text=" ".join(reasons))
    if fix.verified and (cost := _describe_cost(fix)):
        yield Fact(label="cost", text=cost)


def _describe_cost(fix: Fix) -> str:
    if fix.settings is not None and fix.settings.amp_dtype is not None:
        return "8 bits of precision in place of fp16's 11, everywhere; bf16 takes a GPU of 2020 or later"
    if fix.cost is None or max(fix.cost.products_in_fp32, fix.cost.more_activations) < _WORTH_TELLING:
        return ""
    shares = (
        (fix.cost.products_in_fp32, "of the forward's multiply-adds in fp32"),
        (fix.cost.more_activations, "more memory for activations"),
    )
    return ", ".join(f"{percent(share)} {what}" for share, what in shares if share >= _WORTH_TELLING)
