"""Opens reentrant checkpoints, so that what they compute is watched like any other code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nandoctor.process_wide import PerThread, Shared, held, patched
from nandoctor.torch_compat import CHECKPOINT_APPLY

_checkpoints = PerThread(opened=False)
"""`opened` is True while this thread's reentrant checkpoints run as plain calls."""


@contextmanager
def open_checkpoints() -> Iterator[None]:
    """Run this thread's reentrant checkpoints as plain calls while the context is open.

    Their backward recomputes the block in a graph of its own, and would show all of it as one CheckpointFunction.
    A block without an input that needs a gradient is left alone: the checkpoint gives it none.
    """
    with held((_checkpoints, "opened", True)), _checkpoint_patch:
        yield


def _apply_opened(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        needs_gradient = any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args)
        if needs_gradient and _checkpoints.opened:
            return function(*args)
        return checkpoint(function, preserve_rng_state, *args)

    return apply


_checkpoint_patch = Shared(lambda: patched([(CHECKPOINT_APPLY, _apply_opened)]))
