"""Runs a change as it is printed: the patched source, and snippets as they stand.

In: `SourcePatch`es and `Snippet`s. Out: contexts in which the model runs with them, and a changed batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from nandoctor.evidence.changes import PrintedChange, Snippet, SourcePatch
from nandoctor.replaying.code_swap import CannotRunError, swapped_code

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextmanager
def printed_changes(changes: Sequence[PrintedChange], model: nn.Module) -> Iterator[None]:
    """Run with `changes` made to the source and the model, and leave both as they were.

    Raises:
        CannotRunError: changed source cannot be run in this process, or a snippet raised.
    """
    with ExitStack() as stack:
        files = [file for change in changes if isinstance(change, SourcePatch) for file in change.files]
        stack.enter_context(swapped_code(files, model))
        snippets = [change for change in changes if isinstance(change, Snippet) and change.kind != "data"]
        if snippets:
            stack.enter_context(_model_kept(model))
        for snippet in snippets:
            _execute(snippet, {"model": model})
        yield


def changed_batch(changes: Sequence[PrintedChange], batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch after the snippets that change the data."""
    made = dict(batch)
    for change in changes:
        if isinstance(change, Snippet) and change.kind == "data":
            _execute(change, {"batch": made})
    return made


def _execute(snippet: Snippet, scope: dict[str, Any]) -> None:
    try:
        exec(compile(snippet.text, "<fix>", "exec"), {"torch": torch, **scope})
    except Exception as error:
        raise CannotRunError(f"The snippet raised {type(error).__name__}: {error}") from error


@contextmanager
def _model_kept(model: nn.Module) -> Iterator[None]:
    """Put back the hooks and the storage of the weights; a run restores attributes and buffers by itself."""
    hooks = [(vars(module)[name], dict(vars(module)[name])) for module in model.modules() for name in _HOOKS]
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    finally:
        for registry, saved in hooks:
            registry.clear()
            registry.update(saved)
        for parameter, data in weights:
            parameter.data = data
