"""Runs a change as it is printed: the patched source, and snippets as they stand.

In: `SourcePatch`es and `Snippet`s. Out: contexts in which the model runs with them, and a changed batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from nandoctor.evidence.changes import PrintedChange, Snippet, SourcePatch
from nandoctor.replaying.code_swap import swapped_code

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
        CannotSwapError: changed source cannot be run in this process.
    """
    with ExitStack() as stack:
        stack.enter_context(swapped_code([file for c in changes if isinstance(c, SourcePatch) for file in c.files]))
        snippets = [change for change in changes if isinstance(change, Snippet) and change.kind != "data"]
        if snippets:
            stack.enter_context(_model_kept(model))
        for snippet in snippets:
            exec(compile(snippet.text, "<fix>", "exec"), {"model": model, "torch": torch})
        yield


def changed_batch(changes: Sequence[PrintedChange], batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch after the snippets that change the data."""
    made = dict(batch)
    for change in changes:
        if isinstance(change, Snippet) and change.kind == "data":
            exec(compile(change.text, "<fix>", "exec"), {"batch": made, "torch": torch})
    return made


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
