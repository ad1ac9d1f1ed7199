"""Edits to single ops, made as each op is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nandoctor.autocast.policy import LOW_DTYPES
from nandoctor.evidence.edits import OpSite, SingleEdit
from nandoctor.evidence.trace import LOSS, Place, SourceLine
from nandoctor.ops import CASTS, UNFILLED
from nandoctor.torch_compat import tree_tensors, without_autocast
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, find_lines
from nandoctor.tracing.op_analysis import full_rows
from nandoctor.tracing.tensor_stats import format_of
from nandoctor.trees import tree_map


def widen(value: Any) -> Any:
    """Return the value with all low-precision tensors in it in fp32."""
    return tree_map(lambda it: it.float() if isinstance(it, torch.Tensor) and it.dtype in LOW_DTYPES else it, value)


class OpEdits:
    """The edits among `edits` that change single ops; `owner` returns the running module call."""

    def __init__(self, edits: Sequence[SingleEdit], owner: Callable[[], Place]) -> None:
        self._owner = owner
        self._counts: Counter[tuple[Place, str]] = Counter()
        self.changes = [(edit, site) for edit in edits for site in edit.sites]

    def handle(self, call: Invocation, proceed: Proceed) -> Any:
        """Run one op, with the edits that apply to it."""
        owner = self._owner()
        run = proceed
        for edit, site in self.changes:
            # An in-place op can return neither a tensor of another dtype nor another tensor than its argument.
            possible = not call.signature.is_mutable or edit.works_in_place(has_out=bool(call.signature.written))
            if possible and self._is_meant(site, call, owner):
                run = partial(_run_changed, edit, proceed=run)
        output = run(call)
        # Counted as by the op tracer, which skips ops without a floating-point output.
        if any(format_of(leaf.dtype) for leaf in tree_tensors(output)):
            self._counts[owner, call.name] += 1
        return output

    def _is_meant(self, site: OpSite, call: Invocation, owner: Place) -> bool:
        if site.op not in ("", call.name):
            return False
        if site.source is None:
            return site.module == owner.module and self._counts[owner, call.name] == site.nth
        # No module runs while the loss or the backward of a custom Function does.
        is_there = site.module == LOSS or owner.type in ("", site.type)
        return is_there and _is_at(site.source)


def _run_changed(edit: SingleEdit, call: Invocation, proceed: Proceed) -> Any:
    return edit.run(_Running(call, proceed))


def _is_at(source: SourceLine) -> bool:
    """Return True if the user's code is at this line and, if the source names one, in this expression."""
    found = find_lines().source
    if found is None or (found.file, found.line) != (source.file, source.line):
        return False
    return source.column is None or found == source


class _Running:
    """A `RunningOp`: an op that has been called; `proceed` runs it, with the edits that come after this one."""

    def __init__(self, call: Invocation, proceed: Proceed) -> None:
        self.name, self.is_mutable = call.name, call.signature.is_mutable
        self._call, self._proceed = call, proceed

    def argument(self, name: str) -> Any:
        return dict(self._call.arguments()).get(name)

    def number(self, name: str) -> float | None:
        return dict(self._call.scalars()).get(name)

    def tensors(self) -> list[tuple[str, Any]]:
        return list(self._call.tensors())

    def lowest(self) -> float:
        dtypes = (tensor.dtype for _, tensor in self.tensors() if tensor.is_floating_point() and tensor.dim())
        return torch.finfo(next(dtypes, torch.float32)).min

    def run(self, /, **arguments: Any) -> Any:
        call = self._call
        for name, value in arguments.items():
            given = self.argument(name)
            if name in call.signature.changed and isinstance(given, torch.Tensor):
                given.copy_(value)
            else:
                call = call.with_argument(name, value)
        return self._proceed(call)

    def run_in_fp32(self) -> Any:
        """A composite op passes its operand's dtype on, as cross_entropy does to log_softmax.

        Memory keeps its format: `torch.tensor` asks for it, and then writes numbers of that format into it.
        """
        wide = self._call.mapped(widen)
        if self.name not in CASTS | UNFILLED and self.argument("dtype") in LOW_DTYPES:
            wide = wide.with_argument("dtype", torch.float32)
        with without_autocast():
            return self._proceed(wide)

    def full_rows(self) -> Any:
        return full_rows(self._call)
