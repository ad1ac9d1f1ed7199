"""Writes an edit that the search tried as what a person can use: a patch, a snippet, a setting.

Each text is run before it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from nandoctor.evidence.edits import (
    Edit,
    FillMasked,
    KeepModule,
    KeepSamples,
    PrintedChange,
    ResetBuffers,
    SetAttribute,
    SetLossScale,
    SingleEdit,
    Snippet,
    SourcePatch,
    UseFormat,
    ZeroWeights,
    flatten,
)
from nandoctor.evidence.formats import BF16
from nandoctor.evidence.report import FixSettings
from nandoctor.evidence.trace import LOSS, OpCall
from nandoctor.fixes.source_changes import PastBound, SourceWriter
from nandoctor.fixes.titles import write_title
from nandoctor.text import constant

ChangeKind = Literal["source", "snippet", "setting", "data", "state", "advice"]
_WIDEN = """def widen(module, args, kwargs):
    def cast(value):
        return value.float() if torch.is_tensor(value) and value.is_floating_point() else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenChange:
    """A change in words and as text; `change` is that text as a run takes it, None for a setting and for advice.

    `settings` are the loss scale and the dtype of autocast, where the change is one of them. `at_edge` is the patch
    with the arguments that it keeps within a domain put on the edge, `past_bound` those with exponents past the bound
    that it sets; None where it keeps none so.
    """

    kind: ChangeKind
    title: str
    text: str
    change: PrintedChange | None = None
    settings: FixSettings | None = None
    at_edge: SourcePatch | None = None
    past_bound: PastBound | None = None


class ChangeWriter:
    """Writes the changes of one step."""

    def __init__(self, model: nn.Module, ops: Sequence[OpCall]) -> None:
        self._low = {path for path, module in model.named_modules() if _is_low(module)}
        self._source = SourceWriter(ops)

    def write(self, edit: Edit) -> Iterator[WrittenChange]:
        """Every way to write an edit that a program can run, the one that asks for least first; none for the rest."""
        singles = flatten((edit,))
        title = write_title(edit)
        patch = self._source.write(singles)
        if patch is not None:
            yield WrittenChange(
                kind="source",
                title=title,
                text=patch.diff,
                change=patch,
                at_edge=self._source.at_edge(singles),
                past_bound=self._source.past_bound(singles),
            )
        settings = _settings_of(singles)
        if settings is not None:
            yield WrittenChange(kind="setting", title=title, text="", settings=settings)
        snippet = self._snippet(singles)
        if snippet is not None:
            yield WrittenChange(kind=snippet.kind, title=title, text=snippet.text, change=snippet)

    def _snippet(self, edits: Sequence[SingleEdit]) -> Snippet | None:
        modules = [edit for edit in edits if isinstance(edit, KeepModule) and edit.children and edit.module != LOSS]
        if len(modules) == len(edits):
            return Snippet(kind="snippet", text=self._modules_in_fp32([edit.module for edit in modules]))
        if len(edits) == 1:
            return _snippet_of(edits[0])
        parts = [self._snippet([edit]) for edit in edits]
        texts = [part.text for part in parts if part is not None and part.kind == "snippet"]
        return Snippet(kind="snippet", text="\n".join(texts)) if len(texts) == len(edits) else None

    def _modules_in_fp32(self, paths: Sequence[str]) -> str:
        # The names may be a stranger's: as JSON they are string literals, whatever is in them.
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


def _snippet_of(edit: SingleEdit) -> Snippet | None:
    if isinstance(edit, SetAttribute):
        return Snippet(kind="snippet", text=_set_attribute(edit))
    if isinstance(edit, ResetBuffers):
        return Snippet(kind="state", text=_RESET_BUFFERS)
    if isinstance(edit, ZeroWeights):
        return Snippet(kind="state", text=_ZERO_WEIGHTS)
    if isinstance(edit, FillMasked):
        array, mask = map(json.dumps, (edit.array, edit.mask))
        return Snippet(kind="data", text=f"batch[{array}] = batch[{array}].masked_fill(batch[{mask}] == 0, 0.0)\n")
    if isinstance(edit, KeepSamples):
        return Snippet(kind="data", text=_keep_samples(edit), takes_samples=True)
    return None


def _set_attribute(edit: SetAttribute) -> str:
    return (
        "for module in model.modules():\n"
        f"    if type(module).__name__ == {edit.type!r} and module.{edit.name} == {constant(edit.was)}:\n"
        f"        module.{edit.name} = {constant(edit.value)}\n"
    )


_RESET_BUFFERS = """for name, buffer in model.named_buffers():
    if not buffer.isfinite().all():
        buffer.data.fill_(1.0 if "var" in name.rpartition(".")[2] else 0.0)
# a few batches in train mode, without an optimizer step, give the statistics back
"""


_ZERO_WEIGHTS = """for name, weight in model.named_parameters():
    if not weight.isfinite().all():
        weight.data = weight.data.nan_to_num(0.0, 0.0, 0.0)
# the optimizer may hold the same values: load its last sound state, or make it anew
"""


def _keep_samples(edit: KeepSamples) -> str:
    return (
        f"kept = {list(edit.samples)}\n"
        "size = max(len(value) for value in batch.values() if value.dim())\n"
        "for name, value in batch.items():\n"
        "    if value.dim() and len(value) == size:\n"
        "        batch[name] = value[kept]\n"
    )
