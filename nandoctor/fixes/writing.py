"""Writes an edit from the search in a form that a person can use: a title, and a patch, a snippet or a setting."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from nandoctor.changes.editor import Library
from nandoctor.changes.keep_fp32 import KeepModule, modules_in_fp32
from nandoctor.changes.source_writer import Probed, SourceWriter, past_bound, to_edges
from nandoctor.engine.interventions import reachable
from nandoctor.evidence.edits import (
    Edit,
    PrintedChange,
    SingleEdit,
    Snippet,
    Together,
    flatten,
    unified_diff,
)
from nandoctor.evidence.report import ChangeKind, FixSettings
from nandoctor.evidence.trace import LOSS, OpCall
from nandoctor.text import file_name


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenChange:
    """A change's title and text; `change` is that text in the form that a run takes, None for a setting or advice.

    `settings` are the loss scale or the dtype of autocast, if the change sets one. `at_edge` are the patches
    with the arguments moved to the edge of the domain that it keeps them in, `past_bound` those with exponents past its
    bound; None if there are none.
    """

    kind: ChangeKind
    title: str
    text: str
    change: PrintedChange | None = None
    settings: FixSettings | None = None
    at_edge: Probed | None = None
    past_bound: Probed | None = None


class ChangeWriter:
    """A writer of the changes of one step."""

    def __init__(
        self, model: nn.Module, loss: Any, ops: Sequence[OpCall], inside: Sequence[OpCall] = (), *, device: str = "cuda"
    ) -> None:
        self._model, self._device = model, device
        self._low = {
            path
            for path, module in model.named_modules()
            if any(weight.is_floating_point() and weight.element_size() == 2 for weight in module.parameters())
        }
        names_in = partial(_known_names, model=model, loss=loss)
        self._source = SourceWriter(ops, replace(_TORCH, device=device), names_in, inside=inside)

    def write(self, edit: Edit) -> Iterator[WrittenChange]:
        """Yield every runnable way to write an edit, the least invasive first; nothing if there is none."""
        singles = flatten((edit,))
        title = write_title(edit)
        patch = self._source.write(singles)
        if patch is not None:
            cells = "".join(unified_diff(file, file_name(file.path), file_name(file.path)) for file in patch.files)
            yield WrittenChange(
                kind="source" if patch.root else "cell",
                title=write_title(edit, self._source.places),
                text=patch.diff() if patch.root else cells,
                change=patch,
                at_edge=self._source.probe(singles, to_edges),
                past_bound=self._source.probe(singles, past_bound),
            )
        settings: FixSettings | None = FixSettings(device=self._device)
        for single in singles:
            settings = single.set_in(settings) if settings is not None else None
        if settings is not None:
            yield WrittenChange(kind="setting", title=title, text="", settings=settings)
        if (snippet := self._snippet(singles)) is not None:
            yield WrittenChange(kind=snippet.kind, title=title, text=snippet.text, change=snippet)

    def _snippet(self, edits: Sequence[SingleEdit]) -> Snippet | None:
        modules = [edit for edit in edits if isinstance(edit, KeepModule) and edit.children and edit.module != LOSS]
        if len(modules) == len(edits):
            paths = [edit.module for edit in modules]
            return modules_in_fp32(paths, has_low_weights=not self._low.isdisjoint(paths), device=self._device)
        if len(edits) == 1:
            return edits[0].snippet(self._model)
        parts = [self._snippet([edit]) for edit in edits]
        texts = [part.text for part in parts if part is not None and part.kind == "snippet"]
        return Snippet(kind="snippet", text="\n".join(texts)) if len(texts) == len(edits) else None


def _known_names(file: str, model: nn.Module, loss: Any) -> frozenset[str]:
    """Return the names of modules and classes that code without a file can use: another cell may have imported them."""
    space = next((function.__globals__ for function in reachable(file, model, loss)), {})
    return frozenset(name for name, value in space.items() if isinstance(value, ModuleType | type))


def write_title(edit: Edit, places: Mapping[SingleEdit, Set[object]] | None = None) -> str:
    """Describe an edit in one short sentence; `places` are the expressions that its patch changes for each part."""
    singles = flatten((edit,))
    modules = [single.name for single in singles if isinstance(single, KeepModule)]
    if isinstance(edit, Together) and len(modules) == len(singles):
        return f"Keep {len(modules)} modules in fp32: {', '.join(modules)}"
    found: dict[str, set[object]] = {}  # parts with the same title are listed once
    for single in singles:
        found.setdefault(single.title, set()).update((places or {}).get(single, ()))
    return "; ".join(f"{title} ({len(nodes)} places)" if len(nodes) > 1 else title for title, nodes in found.items())


def _default_eps(name: str) -> float | None:
    """Return the default eps of a function of torch.nn.functional; None if it has none."""
    function = getattr(nn.functional, name, None)
    try:
        eps = inspect.signature(function).parameters.get("eps") if callable(function) else None
    except ValueError:  # a function written in C++
        return None
    return eps.default if eps is not None and isinstance(eps.default, float) else None


_TORCH = Library(
    has_module=partial(hasattr, torch.nn), has_method=partial(hasattr, torch.Tensor), default_eps=_default_eps
)
