"""Edits to single ops, made as each op is called."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nandoctor.autocast.policy import LOW_DTYPES
from nandoctor.evidence.edits import (
    ClampArgument,
    GuardArgument,
    KeepOp,
    OpSite,
    ScaleFirst,
    SetArgument,
    SetFlag,
    SingleEdit,
    UnmaskRows,
)
from nandoctor.evidence.trace import LOSS, SourceLine
from nandoctor.ops import CASTS
from nandoctor.replaying.kept_memory import written_by
from nandoctor.torch_compat import schema_of, tree_tensors, without_autocast
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, find_place, to_source
from nandoctor.tracing.module_tracer import Owner
from nandoctor.tracing.op_analysis import full_rows
from nandoctor.tracing.tensor_stats import format_of
from nandoctor.trees import tree_map

if TYPE_CHECKING:
    from nandoctor.torch_compat import OpOverload

_AtSite = KeepOp | SetArgument | SetFlag | ClampArgument | GuardArgument | UnmaskRows
_CLOSE = 1e-6


def widen(value: Any) -> Any:
    """Return the value with all low-precision tensors in it in fp32."""

    def widen_leaf(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in LOW_DTYPES else leaf

    return tree_map(widen_leaf, value)


class OpEdits:
    """The edits among `edits` that change single ops; `owner` returns the running module call."""

    def __init__(self, edits: Sequence[SingleEdit], owner: Callable[[], Owner]) -> None:
        self._owner = owner
        self._counts: Counter[tuple[Owner, str]] = Counter()
        self._changes = [(edit, site, change) for edit in edits for site, change in _changes_of(edit)]

    @property
    def asked_for(self) -> bool:
        """True if there are any."""
        return bool(self._changes)

    def handle(self, call: Invocation, proceed: Proceed) -> Any:
        """Run one op, with the edits that apply to it."""
        owner = self._owner()
        run = proceed
        for edit, site, change in self._changes:
            # An in-place op can return neither a tensor of another dtype nor another tensor than its argument.
            possible = not schema_of(call.op).is_mutable or _keeps_target(edit, call.op)
            if possible and self._is_meant(site, call, owner):
                run = partial(change, proceed=run)
        output = run(call)
        # Counted as by the op tracer, which skips ops without a floating-point output.
        if any(format_of(leaf.dtype) for leaf in tree_tensors(output)):
            self._counts[owner, call.name] += 1
        return output

    def _is_meant(self, site: OpSite, call: Invocation, owner: Owner) -> bool:
        if site.op not in ("", call.name):
            return False
        module, type_name, _ = owner
        if site.source is None:
            return site.module == module and self._counts[owner, call.name] == site.nth
        # No module runs while the loss or the backward of a custom Function does.
        is_there = site.module == LOSS or type_name in ("", site.type)
        return is_there and _is_at(site.source)


def _keeps_target(edit: SingleEdit, op: OpOverload) -> bool:
    """Return True if an op with this edit writes to the same tensor: only its values or another argument change.

    Selecting from the result of an op with `out=` would make another tensor.
    """
    if isinstance(edit, GuardArgument) and any(argument.is_out for argument in schema_of(op).arguments):
        return False
    return isinstance(edit, SetArgument) or (isinstance(edit, ClampArgument | GuardArgument) and edit.argument != "")


def _is_at(source: SourceLine) -> bool:
    """Return True if the user's code is at this line and, if the source names one, in this expression."""
    found = to_source(find_place())
    if found is None or (found.file, found.line) != (source.file, source.line):
        return False
    return source.column is None or found == source


def _changes_of(edit: SingleEdit) -> Iterator[tuple[OpSite, Callable[..., Any]]]:
    """Yield the ops that an edit changes, each with `(call, proceed) -> output`, where `proceed` runs an op."""
    if isinstance(edit, ScaleFirst):
        yield edit.product, partial(_scale_first, edit.factor)
        yield edit.scale, lambda call, proceed: next(tensor for _, tensor in call.tensors())
    elif isinstance(edit, _AtSite):
        yield edit.site, partial(_CHANGES[edit.kind], edit)


def _run_in_fp32(edit: KeepOp, call: Invocation, proceed: Proceed) -> Any:
    """Run the op on wide operands; a composite op passes its operand's dtype on, as cross_entropy to log_softmax."""
    wide = call.mapped(widen)
    if call.name not in CASTS and dict(call.arguments()).get("dtype") in LOW_DTYPES:
        wide = wide.with_argument("dtype", torch.float32)
    with without_autocast():
        made = proceed(wide)
    if call.name in CASTS and isinstance(made, torch.Tensor) and made.dtype in LOW_DTYPES:
        _, taken = next(call.tensors())  # the cast itself is the failing op
        return taken.to(device=made.device, dtype=torch.float32)
    return made


def _set_argument(edit: SetArgument, call: Invocation, proceed: Proceed) -> Any:
    was = dict(call.scalars()).get(edit.argument)
    if was is None or not math.isclose(was, edit.was, rel_tol=_CLOSE):
        return proceed(call)
    # A number in an op has the format of the op's first floating-point tensor.
    dtypes = (tensor.dtype for _, tensor in call.tensors() if tensor.is_floating_point() and tensor.dim())
    value = torch.finfo(next(dtypes, torch.float32)).min if edit.value is None else edit.value
    return proceed(call.with_argument(edit.argument, value))


def _clamp_argument(edit: ClampArgument, call: Invocation, proceed: Proceed) -> Any:
    """Run the op with an argument clamped, or with its result clamped if the edit names no argument."""
    if not edit.argument:
        hides = edit.nan and any(bool(torch.isnan(taken).any()) for _, taken in call.tensors())
        return proceed(call) if hides else tree_map(partial(_clamp, edit), proceed(call))
    given = dict(call.arguments()).get(edit.argument)
    return proceed(_with_values(call, edit.argument, _clamp(edit, given)) if given is not None else call)


def _with_values(call: Invocation, argument: str, value: Any) -> Invocation:
    """Return the call with other values for an argument; a tensor that the op writes to is given them in place."""
    given = dict(call.arguments())[argument]
    if argument not in written_by(call.op) or not isinstance(given, torch.Tensor):
        return call.with_argument(argument, value)
    given.copy_(value)
    return call


def _clamp(edit: ClampArgument, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
        return value
    if edit.keeps_sign and edit.low is not None:
        return torch.where(value.abs() < edit.low, edit.low, value)
    if not value.is_floating_point():
        return value.clamp(edit.low, edit.high)
    if edit.nan:
        value = torch.where(torch.isnan(value), edit.fill, value)
    # A bound that the format cannot hold never binds; torch refuses it.
    limit = torch.finfo(value.dtype).max
    low, high = (bound if bound is not None and abs(bound) <= limit else None for bound in (edit.low, edit.high))
    return value if low is None and high is None else value.clamp(low, high)


def _guard_argument(edit: GuardArgument, call: Invocation, proceed: Proceed) -> Any:
    given = dict(call.arguments()).get(edit.argument)
    if not isinstance(given, torch.Tensor):
        return proceed(call)
    outside = given == 0 if edit.low is None and edit.high is None else torch.zeros_like(given, dtype=torch.bool)
    outside = outside if edit.low is None else outside | (given <= edit.low)
    outside = outside if edit.high is None else outside | (given >= edit.high)
    made = proceed(_with_values(call, edit.argument, torch.where(outside, edit.safe, given)))
    return (
        made.masked_fill_(outside, edit.fill)
        if schema_of(call.op).is_mutable
        else torch.where(outside, edit.fill, made)
    )


def _scale_first(factor: float, call: Invocation, proceed: Proceed) -> Any:
    name, tensor = next(call.tensors())
    return proceed(call.with_argument(name, tensor * factor))


def _run_unmasked(edit: UnmaskRows, call: Invocation, proceed: Proceed) -> Any:
    """Run the softmax or attention with its fully masked rows unmasked, and return zeros there."""
    closed = full_rows(call)
    if closed is None:
        return proceed(call)
    name = "attn_mask" if call.name == "scaled_dot_product_attention" else "self"
    given = dict(call.arguments())[name]
    opened = given | closed if given.dtype == torch.bool else given.masked_fill(closed, 0.0)
    return proceed(call.with_argument(name, opened)).masked_fill(closed, 0.0)


_CHANGES: Mapping[str, Callable[..., Any]] = {
    "keep-op": _run_in_fp32,
    "set-argument": _set_argument,
    "set-flag": lambda edit, call, proceed: proceed(call.with_argument(edit.argument, True)),
    "clamp": _clamp_argument,
    "guard": _guard_argument,
    "unmask-rows": _run_unmasked,
}
"""The function that runs the op at an edit's site, by the kind of the edit."""
