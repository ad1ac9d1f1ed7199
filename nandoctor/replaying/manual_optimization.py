"""A `training_step` of Lightning that optimizes manually, run up to its first `manual_backward` without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from torch import nn


def optimizes_manually(model: nn.Module) -> bool:
    """Tell whether this is a module of Lightning whose `training_step` calls its optimizers itself."""
    return getattr(model, "automatic_optimization", True) is False and hasattr(model, "manual_backward")


def call_up_to_backward(model: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The loss that the method calls `manual_backward` with first; what it returns where it never does.

    What it asks of its Trainer until then (optimizers, schedules, toggling) does nothing: no update comes before a
    backward pass.
    """
    idle = _Idle()
    count = _count_optimizers(model)
    stand_ins = {
        "manual_backward": _stop,
        "optimizers": lambda *_, **__: idle if count == 1 else [idle] * count,
        **dict.fromkeys(("lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "clip_gradients"), idle),
        "toggled_optimizer": idle,
    }
    vars(model).update(stand_ins)
    try:
        return method(*args, **kwargs)
    except _BackwardReached as reached:
        return reached.loss
    finally:
        for name in stand_ins:
            vars(model).pop(name, None)


class _BackwardReached(BaseException):  # no `except Exception` of the training's may take it
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def _stop(loss: Any, *_: Any, **__: Any) -> None:
    raise _BackwardReached(loss)


def _count_optimizers(model: Any) -> int:
    """How many `self.optimizers()` gives; 1 where that cannot be known without a Trainer."""
    made: Any = None
    with suppress(Exception):
        made = model.configure_optimizers()
    if isinstance(made, (list, tuple)):
        return len(made[0]) if made and isinstance(made[0], (list, tuple)) else len(made)
    return 1


class _Idle:
    """Stands for an optimizer or a schedule: whatever is asked of it does nothing, but closures are called."""

    def __getattr__(self, name: str) -> _Idle:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Idle:
        for given in (*args, *kwargs.values()):
            if callable(given) and not isinstance(given, (_Idle, nn.Module)):
                given()
        return self

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, _: object) -> _Idle:
        return self

    def __setitem__(self, _: object, __: object) -> None:
        return None
