"""Adapt DeepSpeed's engine, which has its own `step`, gradients, master weights, loss scale and counters."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from nandoctor.capture.async_flags import Flag
from nandoctor.errors import NanDoctorError
from nandoctor.torch_compat import read_loss_scale


class DeepSpeedEngine:
    """An adapter that presents an engine as the optimizer of its module's parameters and as its loss scaler."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.model: nn.Module = engine.module
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The module's parameters, with the settings of the optimizer's first group, which holds flat weights."""
        return [{**self._engine.optimizer.param_groups[0], "params": self._parameters}]

    def state_dict(self) -> dict[str, Any]:
        """Return the settings in the form of an optimizer's state dict; the state belongs to flat weights: left out."""
        [group] = self.param_groups
        return {"state": {}, "param_groups": [{**group, "params": list(range(len(group["params"])))}]}

    @property
    def scales(self) -> bool:
        """True if the loss is scaled."""
        return bool(self._engine.fp16_enabled())

    @property
    def scale(self) -> float:
        """The loss scale."""
        return float(self._engine.optimizer.cur_scale)

    def count(self) -> tuple[int, int]:
        """Return the number of the next update, and that of the next micro-batch in it."""
        every = self._engine.gradient_accumulation_steps()
        return self._engine.global_steps, self._engine.micro_steps % every

    @property
    def skipped(self) -> bool:
        """True if the engine skipped the last update because of its gradients."""
        return bool(getattr(self._engine.optimizer, "overflow", False))

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all ranks' gradients at the last update, inf if it was skipped; None if it was not computed."""
        norm = self._engine.get_global_grad_norm()
        if self.skipped:
            return math.inf
        return None if norm is None else float(norm)

    def wrap_step(self, before: Callable[[Any], object], after: Callable[[Any], object]) -> Callable[[], None]:
        """Call `before` and `after` with this adapter around each update; return a function that undoes it."""
        engine, own = self._engine, vars(self._engine).get("step")
        step = engine.step

        def call(*args: Any, **kwargs: Any) -> Any:
            if not engine.is_gradient_accumulation_boundary():
                return step(*args, **kwargs)
            before(self)
            answer = step(*args, **kwargs)
            after(self)
            return answer

        def put_back() -> None:
            vars(engine).pop("step", None)
            vars(engine).update({} if own is None else {"step": own})

        engine.step = call
        return put_back


def read_scale(scaler: Any) -> tuple[Flag | None, int | None]:
    """Return the loss scale as a flag, and how often the scaler was updated; None where that is unknown."""
    if scaler is None:
        return None, None
    if isinstance(scaler, DeepSpeedEngine):
        return Flag(scaler.scale), scaler.count()[0]
    scale, version = read_loss_scale(scaler)
    return None if scale is None else Flag(scale), version


def find_engine(model: nn.Module) -> DeepSpeedEngine | None:
    """Return the adapter of `model` if it is a DeepSpeed engine, else None.

    Raises:
        NanDoctorError: the engine keeps the weights in pieces (ZeRO-3).
    """
    module = sys.modules.get("deepspeed.runtime.engine")
    if module is None or not isinstance(model, module.DeepSpeedEngine):
        return None
    engine: Any = model
    if engine.zero_optimization_stage() > 2:
        raise NanDoctorError(
            "ZeRO-3 keeps weights in flat pieces on each rank, from which a replay cannot build a model.",
            remedy='Record the same training with ZeRO-2: `"zero_optimization": {"stage": 2}`.',
        )
    return DeepSpeedEngine(engine)
