"""Says in one short sentence what a change does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nandoctor.evidence.edits import (
    ClampArgument,
    Edit,
    GuardArgument,
    KeepModule,
    KeepOp,
    OpSite,
    ResetBuffers,
    ScaleFirst,
    SetArgument,
    StableLog,
    Together,
    ZeroWeights,
)
from nandoctor.evidence.formats import LARGEST_EPS
from nandoctor.evidence.trace import LOSS
from nandoctor.ops import CASTS, DIVISIONS
from nandoctor.text import constant

_BINARY = frozenset({"add", "sub", "mul", "div"})


def write_title(edit: Edit) -> str:
    """Describe an edit in one short sentence."""
    if isinstance(edit, Together):
        if all(isinstance(single, KeepModule) for single in edit.edits):
            return f"Keep {len(edit.edits)} modules in fp32: {', '.join(map(_module_name, edit.edits))}"
        return "; ".join(dict.fromkeys(map(write_title, edit.edits)))  # a line may be changed twice alike
    return str(_TITLES[edit.kind](edit))


def _module_name(edit: Any) -> str:
    name = edit.module or "the whole model"
    return name if edit.children else f"{edit.module or 'the model'} without its submodules"


def _title_module(edit: KeepModule) -> str:
    return "Compute the loss in fp32" if edit.module == LOSS else f"Keep {_module_name(edit)} in fp32"


def _title_op(edit: KeepOp) -> str:
    where = _place(edit.site) or f"{edit.site.op} in {edit.site.module or 'the model'}"
    if edit.site.op and edit.site.source is not None and edit.site.source.column is not None:
        where = f"{edit.site.op} in {where}"
    return f"Cast to fp32 in {_place(edit.site)}" if edit.site.op in CASTS else f"Compute {where} in fp32"


def _title_argument(edit: SetArgument) -> str:
    new = "the lowest number of its format" if edit.value is None else constant(edit.value)
    what = "an eps of " if edit.value is not None and 0 < edit.was <= LARGEST_EPS else ""
    return f"Use {what}{new} instead of {constant(edit.was)}{_where(edit.site)}"


def _where(site: OpSite) -> str:
    return f" in {_place(site)}" if site.source else f" in {site.op}"


def _where_if_known(site: OpSite) -> str:
    return _where(site) if site.source else ""


def _clamp_in_words(edit: ClampArgument) -> str:
    what = _argument_in_words(edit)
    if edit.nan and edit.argument:
        return f"Take 0 for NaN in {what} of {edit.site.op}, which a mask leaves out later"
    if edit.nan:
        return f"Take 0 where {edit.site.op} has no value"
    if edit.keeps_sign and edit.low is not None:
        nearer = "" if edit.low == 1 else "nearer to "
        return f"Take {constant(edit.low)} for {what} of {edit.site.op} where it is {nearer}0"
    return f"Clamp {what} of {edit.site.op} to {_bounds_in_words(edit)}"


def _argument_in_words(edit: ClampArgument) -> str:
    if edit.argument == "other":
        return "the divisor" if edit.site.op in ("div", "true_divide") else "the second argument"
    if edit.argument in ("", "self", "input"):
        return "the first argument" if edit.site.op in _BINARY else "the argument"
    return edit.argument


def _bounds_in_words(edit: ClampArgument) -> str:
    low, high = edit.low, edit.high
    if low is not None and high is not None:
        return f"{constant(low)} to {constant(high)}"
    return f"at least {constant(low)}" if low is not None else f"at most {high:g}"


def _title_guard(edit: GuardArgument) -> str:
    ends = {"above": edit.low, "below": edit.high}
    bounds = [f"{side} {constant(end)}" for side, end in ends.items() if end is not None]
    where = f"is not {' and '.join(bounds)}" if bounds else "is 0"
    what = "divisor" if edit.argument == "other" else "argument"
    return f"Give {edit.site.op} the value 0 and no gradient where its {what} {where}{_where_if_known(edit.site)}"


def _title_scale(edit: ScaleFirst) -> str:
    where = _where_if_known(edit.product)
    return f"Scale by {edit.factor:.4g} before {edit.product.op}{where} instead of after it"


def _title_log(edit: StableLog) -> str:
    if edit.site.op == "exp":
        return f"Subtract the largest exponent before exp{_where_if_known(edit.site)}"
    what = "the quotient" if edit.site.op in DIVISIONS else "the logarithms" if edit.everywhere else "the logarithm"
    where = f"of the function at {_place(edit.site)}" if edit.everywhere else f"in {_place(edit.site) or edit.site.op}"
    return f"Compute {what} {where} in log space"


def _title_buffers(edit: ResetBuffers) -> str:
    count = len(edit.names)
    return f"Reset the buffer {edit.names[0]}" if count == 1 else f"Reset {count} non-finite buffers"


def _title_weights(edit: ZeroWeights) -> str:
    names = f"{', '.join(edit.names[:3])}{' ...' if len(edit.names) > 3 else ''}"
    return f"Set what is not finite in {names} to 0, or load the last finite checkpoint"


_TITLES: dict[str, Callable[[Any], str]] = {
    "keep-module": _title_module,
    "keep-op": _title_op,
    "set-attribute": lambda edit: (
        f"Set {edit.name} of {edit.type} to {constant(edit.value)} (was {constant(edit.was)})"
    ),
    "set-argument": _title_argument,
    "set-flag": lambda edit: f"Call {edit.site.op} with {edit.argument}=True{_where_if_known(edit.site)}",
    "clamp": lambda edit: f"{_clamp_in_words(edit)}{_where_if_known(edit.site)}",
    "guard": _title_guard,
    "scale-first": _title_scale,
    "unmask-rows": lambda _: "Unmask the fully masked rows, and set their result to 0",
    "stable-log": _title_log,
    "use-format": lambda edit: f"Run the step under {edit.format.label} autocast",
    "loss-scale": lambda edit: f"Lower the loss scale to {edit.value:g}",
    "reset-buffers": _title_buffers,
    "zero-weights": _title_weights,
    "fill-masked": lambda edit: f"Put 0 into {edit.array} wherever {edit.mask} is 0, before the arithmetic",
    "keep-samples": lambda _: "Leave the affected samples out of the batch",
    "optimizer-eps": lambda edit: f"Give the optimizer an eps of {constant(edit.value)}",
}


def _place(site: OpSite) -> str:
    if site.source is None:
        return ""
    name = site.source.file.replace("\\", "/").rpartition("/")[2]
    return f"line {site.source.line} of {name}"
