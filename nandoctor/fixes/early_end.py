"""Ends a trial where nothing is left to learn from it: all that the rest of the forward computes with is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from nandoctor.diagnosis.conclusion import Findings
from nandoctor.evidence.trace import ModuleCall
from nandoctor.ops import MAXIMA, MINIMA, SELECTIONS
from nandoctor.torch_compat import plain_torch
from nandoctor.tracing.tensor_tree import walk_tensors

Call = tuple[str, int]
"""The path of a module, and the number of the call, counted from 0."""


class TrialEnded(BaseException):
    """A module call gave nothing but NaN; the user's code must not catch it as an error."""


def find_lost_call(findings: Findings) -> Call | None:
    """The first module call after which the failing step had nothing but NaN left; None where that is not sure.

    Its output is NaN throughout, it lies on the way from the only origin to the output, and no op on the rest of that
    way selects values: with as many NaN again the step ends in NaN again, whatever was changed before.
    """
    trace, conclusion = findings.trace, findings.conclusion
    if findings.verdict != "precision" or len(conclusion.suspects) != 1 or len(conclusion.diagnoses) != 1:
        return None
    rest = takewhile(lambda link: link.op not in SELECTIONS | MAXIMA | MINIMA, reversed(conclusion.chain))
    keys = {link.place.key for link in rest}
    lost = [call for call in trace.calls if call.leave is not None and call.key in keys and _gave_nan(call)]
    return min(lost, key=lambda call: call.leave or 0).key if lost else None


def _gave_nan(call: ModuleCall) -> bool:
    counts = [(stats.counts.num_nan if stats.counts else 0, stats.numel) for stats in call.outputs]
    return bool(counts) and all(0 < num_nan == numel for num_nan, numel in counts)


@contextmanager
def ending_where_lost(model: nn.Module, lost_at: Call | None) -> Iterator[None]:
    """A context in which TrialEnded is raised where this call gives nothing but NaN; it is for one run."""
    if lost_at is None:
        yield
        return
    path, number = lost_at
    num_returned = 0

    def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal num_returned
        num_returned += 1
        if num_returned == number + 1 and _all_nan(output):
            raise TrialEnded

    # Module's own method: a ScriptModule refuses hooks, which its graph could not keep.
    handle = nn.Module.register_forward_hook(dict(model.named_modules())[path], end)
    try:
        yield
    finally:
        handle.remove()


def _all_nan(output: Any) -> bool:
    with plain_torch():
        tensors = [tensor for _, tensor in walk_tensors(output)]
        return bool(tensors) and all(
            tensor.is_floating_point() and tensor.numel() > 0 and bool(torch.isnan(tensor).all()) for tensor in tensors
        )
