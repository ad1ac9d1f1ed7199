"""The backward pass of a step; in a large model each gradient is read when it is complete, and let go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from nandoctor.errors import LossError
from nandoctor.evidence.trace import TensorStats
from nandoctor.file_memory import map_empty
from nandoctor.machine import memory_of
from nandoctor.tracing.tensor_stats import Reading, collect, is_finite, measure, measure_all

LARGE_NBYTES = 256 << 20
"""Weights from which on memory counts for more than the time that it takes to save it."""


def is_large(model: nn.Module) -> bool:
    """Tell whether the weights on the CPU are worth the trouble."""
    return memory_of(tensor for tensor in model.parameters() if tensor.device.type == "cpu") >= LARGE_NBYTES


def run_backward(
    model: nn.Module, loss: torch.Tensor, *, loss_scale: float, keep: bool
) -> tuple[tuple[TensorStats, ...], Mapping[str, torch.Tensor] | None]:
    """Run the backward pass; the parameters' non-finite gradients, and all of them where they are to be kept.

    None are left on the model. Raises LossError where the loss has no gradient.
    """
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        if not loss.requires_grad:
            raise LossError(
                "The loss has no gradient: it does not depend on a weight that is trained.",
                remedy="Return the tensor that training calls backward() on, not .item(), .detach() or a copy of it; "
                "without --loss the forward alone is judged.",
            )
        if is_large(model):
            released = ReleasedGradients(model, keep=keep, loss_scale=loss_scale)
            with released.watching():
                (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
            return released.nonfinite(), released.kept
        (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
        made = {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
        nonfinite = tuple(stats for stats in measure_all(made.items()) if not stats.finite)
        return nonfinite, {name: gradient.div_(loss_scale) for name, gradient in made.items()} if keep else None
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


class ReleasedGradients:
    """Reads each parameter's gradient when it is complete, and lets it go; `kept` has them in files, at scale 1."""

    def __init__(self, model: nn.Module, *, keep: bool, loss_scale: float) -> None:
        self._readings: dict[str, Reading] = {}
        self._parameters = {name: item for name, item in model.named_parameters() if item.requires_grad}
        self._scale = loss_scale
        self.kept: dict[str, torch.Tensor] | None = {} if keep else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for the backward pass."""
        with ExitStack() as stack:
            for name, parameter in self._parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(self._take(name))  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
            yield

    def nonfinite(self) -> tuple[TensorStats, ...]:
        """The non-finite gradients, by the names of their parameters."""
        return collect([(name, self._readings[name]) for name in self._parameters if name in self._readings])

    def _take(self, name: str) -> Any:
        def take(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            reading = measure(gradient)
            if reading is not None and not is_finite(reading):
                self._readings[name] = reading
            if self.kept is not None:
                before = self.kept.get(name)  # a reentrant checkpoint adds its part by itself
                unscaled = gradient / self._scale
                self.kept[name] = map_empty(unscaled.shape, unscaled.dtype).copy_(
                    unscaled if before is None else unscaled + before
                )

        return take
