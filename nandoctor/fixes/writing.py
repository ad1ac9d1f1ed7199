"""Writes an edit from the search in a form that a person can use: a title, and a patch, a snippet or a setting."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from nandoctor.evidence.edits import (
    ClampArgument,
    Edit,
    FillMasked,
    GuardArgument,
    KeepModule,
    KeepOp,
    KeepSamples,
    OpSite,
    PrintedChange,
    ResetBuffers,
    ScaleFirst,
    SetArgument,
    SetAttribute,
    SetLossScale,
    SingleEdit,
    Snippet,
    SourcePatch,
    StableLog,
    Together,
    UseFormat,
    ZeroWeights,
    flatten,
)
from nandoctor.evidence.formats import BF16, LARGEST_EPS
from nandoctor.evidence.report import ChangeKind, FixSettings
from nandoctor.evidence.trace import LOSS, ModuleCall, OpCall
from nandoctor.fixes.cells import cell_name, known_names, write_snippet
from nandoctor.fixes.constructor_arguments import describe_argument
from nandoctor.fixes.source_changes import PastBound, SourceWriter
from nandoctor.fixes.source_forwards import Forward, find_forward
from nandoctor.ops import CASTS, DIVISIONS
from nandoctor.text import constant

_BINARY = frozenset({"add", "sub", "mul", "div"})
_WIDEN = """def widen(module, args, kwargs):
    def cast(value):
        return value.float() if torch.is_tensor(value) and value.is_floating_point() else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenChange:
    """A change's title and text; `change` is that text in the form that a run takes, None for a setting or advice.

    `settings` are the loss scale or the dtype of autocast, if the change sets one. `at_edge` is the patch with the
    arguments moved to the edge of the domain that it keeps them in, `past_bound` the patches with exponents past its
    bound; None if there is none. `in_backward`: the change is to code of the backward pass, where gradients are the
    values that it computes, and not derivatives of its output.
    """

    kind: ChangeKind
    title: str
    text: str
    change: PrintedChange | None = None
    settings: FixSettings | None = None
    at_edge: SourcePatch | None = None
    past_bound: PastBound | None = None
    in_backward: bool = False


class ChangeWriter:
    """A writer of the changes of one step."""

    def __init__(self, model: nn.Module, loss: Any, ops: Sequence[OpCall], calls: Sequence[ModuleCall] = ()) -> None:
        self._model, self._loss, self._calls = model, loss, calls
        self._low = {path for path, module in model.named_modules() if _is_low(module)}
        self._source = SourceWriter(ops, partial(known_names, model=model, loss=loss), self._forward_of)

    def write(self, edit: Edit) -> Iterator[WrittenChange]:
        """Yield every runnable way to write an edit, the least invasive first; nothing if there is none."""
        singles = flatten((edit,))
        title = write_title(edit)
        patch = self._source.write(singles)
        change = patch if patch is None or patch.root else write_snippet(patch, self._model, self._loss)
        if patch is not None and change is not None:
            yield WrittenChange(
                kind="snippet" if isinstance(change, Snippet) else "source",
                title=write_title(edit, self._source.places),
                text=change.text if isinstance(change, Snippet) else patch.diff,
                change=change,
                at_edge=self._source.at_edge(singles),
                past_bound=self._source.past_bound(singles),
                in_backward=self._source.in_backward(singles),
            )
        if (settings := _settings_of(singles)) is not None:
            yield WrittenChange(kind="setting", title=title, text="", settings=settings)
        if (snippet := self._snippet(singles)) is not None:
            yield WrittenChange(kind=snippet.kind, title=title, text=snippet.text, change=snippet)

    def _forward_of(self, path: str, kept: Set[str]) -> Forward | None:
        """Return a module's forward, None if its weights are stored in low precision and so need widening too."""
        return None if path == LOSS or path in self._low else find_forward(path, self._model, self._calls, kept)

    def _snippet(self, edits: Sequence[SingleEdit]) -> Snippet | None:
        modules = [edit for edit in edits if isinstance(edit, KeepModule) and edit.children and edit.module != LOSS]
        if len(modules) == len(edits):
            return Snippet(kind="snippet", text=self._modules_in_fp32([edit.module for edit in modules]))
        if len(edits) > 1:
            parts = [self._snippet([edit]) for edit in edits]
            texts = [part.text for part in parts if part is not None and part.kind == "snippet"]
            return Snippet(kind="snippet", text="\n".join(texts)) if len(texts) == len(edits) else None
        edit = edits[0]
        if isinstance(edit, SetAttribute):
            return Snippet(kind="snippet", text=_set_attribute(edit) + describe_argument(edit, self._model))
        write = _SNIPPETS.get(edit.kind)
        return write(edit) if write is not None else None

    def _modules_in_fp32(self, paths: Sequence[str]) -> str:
        # The names may come from a stranger's dump: as JSON they are string literals, whatever they contain.
        lines = [
            "import torch\n\n",
            _WIDEN,
            f"\nfor name in {json.dumps(list(paths))}:",
            "    module = model.get_submodule(name)",
            '    module.forward = torch.autocast("cuda", enabled=False)(module.forward)',
            "    module.register_forward_pre_hook(widen, with_kwargs=True)",
        ]
        if self._low.intersection(paths):
            lines.append("    module.float()  # its weights are stored in half precision")
        return "\n".join(lines) + "\n"


def _is_low(module: nn.Module) -> bool:
    return any(tensor.is_floating_point() and tensor.element_size() == 2 for tensor in module.parameters())


def _settings_of(edits: Sequence[SingleEdit]) -> FixSettings | None:
    settings = FixSettings()
    for edit in edits:
        if isinstance(edit, UseFormat) and edit.format is BF16:
            settings = replace(settings, amp_dtype="bfloat16")
        elif isinstance(edit, SetLossScale):
            settings = replace(settings, loss_scale=edit.value)
        else:
            return None
    return settings


def _set_attribute(edit: SetAttribute) -> str:
    return (
        "for module in model.modules():\n"
        f"    if type(module).__name__ == {edit.type!r} and module.{edit.name} == {constant(edit.was)}:\n"
        f"        module.{edit.name} = {constant(edit.value)}\n"
    )


def _reset_buffers(edit: ResetBuffers) -> Snippet:
    """Write a reset of buffers by name, unless they are running statistics: another non-finite one may be a mask."""
    if all(name.rpartition(".")[2].startswith("running_") for name in edit.names):
        which = '"running_" in name and not buffer.isfinite().all()'
        then = "a few batches in train mode, without an optimizer step, restore the statistics"
    else:
        which = f"name in {list(edit.names)}"
        then = "0 is a placeholder for what the model's code, or a checkpoint, puts there"
    text = (
        "for name, buffer in model.named_buffers():\n"
        f"    if {which}:\n"
        '        buffer.data.fill_(1.0 if "var" in name.rpartition(".")[2] else 0.0)\n'
        f"# {then}\n"
    )
    return Snippet(kind="state", text=text)


_ZERO_WEIGHTS = """for name, weight in model.named_parameters():
    if not weight.isfinite().all():
        weight.data = weight.data.nan_to_num(0.0, 0.0, 0.0)
# the optimizer may hold the same values: load its last sound state, or create it again
"""


def _keep_samples(edit: KeepSamples) -> Snippet:
    text = (
        f"kept = {list(edit.samples)}\n"
        "size = max(len(value) for value in batch.values() if value.dim())\n"
        "for name, value in batch.items():\n"
        "    if value.dim() and len(value) == size:\n"
        "        batch[name] = value[kept]\n"
    )
    return Snippet(kind="data", text=text, takes_samples=True)


def _fill_masked(edit: FillMasked) -> Snippet:
    array, mask = map(json.dumps, (edit.array, edit.mask))
    return Snippet(kind="data", text=f"batch[{array}] = batch[{array}].masked_fill(batch[{mask}] == 0, 0.0)\n")


_SNIPPETS: dict[str, Callable[[Any], Snippet]] = {
    "reset-buffers": _reset_buffers,
    "zero-weights": lambda _: Snippet(kind="state", text=_ZERO_WEIGHTS),
    "fill-masked": _fill_masked,
    "keep-samples": _keep_samples,
}
"""By the kind of an edit, the snippet that does the same; edits that only a change of the source can make have none."""


def write_title(edit: Edit, places: Mapping[SingleEdit, Set[object]] | None = None) -> str:
    """Describe an edit in one short sentence; `places` are the expressions that its patch changes for each part."""
    if isinstance(edit, Together) and all(isinstance(single, KeepModule) for single in edit.edits):
        return f"Keep {len(edit.edits)} modules in fp32: {', '.join(map(_module_name, edit.edits))}"
    found: dict[str, set[object]] = {}  # parts with the same title are listed once
    for single in flatten((edit,)):
        found.setdefault(_TITLES[single.kind](single), set()).update((places or {}).get(single, ()))
    return "; ".join(f"{title} ({len(nodes)} places)" if len(nodes) > 1 else title for title, nodes in found.items())


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
    return f"Use {what}{new} instead of {constant(edit.was)} in {_place(edit.site) or edit.site.op}"


def _where(site: OpSite) -> str:
    return f" in {_place(site)}" if site.source else ""


def _clamp_in_words(edit: ClampArgument) -> str:
    what = _argument_in_words(edit)
    if edit.nan and edit.argument:
        return f"Use 0 for NaN in {what} of {edit.site.op}, which a mask leaves out later"
    if edit.nan:
        return f"Use 0 where {edit.site.op} has no value"
    if edit.keeps_sign and edit.low is not None:
        if edit.low == 1:
            return f"Replace {what} of {edit.site.op} by 1 where it is 0"
        return f"Keep {what} of {edit.site.op} at least {constant(edit.low)} away from 0"
    return f"Clamp {what} of {edit.site.op} to {_bounds_in_words(edit)}"


def _argument_in_words(edit: ClampArgument) -> str:
    if edit.argument == "other":
        return "the divisor" if edit.site.op in ("div", "true_divide") else "the second argument"
    if edit.argument in ("", "self", "input"):
        return "the first argument" if edit.site.op in _BINARY else "the argument"
    return f"the {edit.argument}" if edit.argument == "exponent" else edit.argument


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
    return f"Give {edit.site.op} the value {edit.fill:g} and no gradient where its {what} {where}{_where(edit.site)}"


def _title_scale(edit: ScaleFirst) -> str:
    where = _where(edit.product)
    return f"Scale by {edit.factor:.4g} before {edit.product.op}{where} instead of after it"


def _title_log(edit: StableLog) -> str:
    if edit.site.op == "exp":
        return f"Subtract the largest exponent before exp{_where(edit.site)}"
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
    "set-flag": lambda edit: f"Call {edit.site.op} with {edit.argument}=True{_where(edit.site)}",
    "clamp": lambda edit: f"{_clamp_in_words(edit)}{_where(edit.site)}",
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
    return f"line {site.source.line} of {cell_name(site.source.file)}"
