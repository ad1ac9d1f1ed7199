"""The tracers of one run: they watch its modules, and where it asks for them its operations and its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from nandoctor.replaying.module_state import known_tensors
from nandoctor.tracing.gradient_tracer import GradientTracer, open_checkpoints
from nandoctor.tracing.module_tracer import Tracer
from nandoctor.tracing.op_tracer import FunctionTracer, OpTracer

if TYPE_CHECKING:
    from nandoctor.replaying.runner import Batch, FailingStep, Watch


class Observers:
    """The tracers of one run of `step`, made for the `batch` that it takes."""

    def __init__(self, step: FailingStep, watch: Watch, batch: Batch) -> None:
        known = [*known_tensors(step.model, batch)]
        watches_backward = watch.backward and watch.ops
        self.functions = FunctionTracer(OpTracer(known=known, low=step.low)) if watches_backward else None
        self.gradients = GradientTracer(low=step.low, functions=self.functions) if watches_backward else None
        self.ops = (
            OpTracer(known=known, low=step.low, gradients=self.gradients, on_op=watch.on_op) if watch.ops else None
        )
        self.modules = Tracer(
            step.model,
            counts_for=step.low,
            statistics=watch.statistics,
            on_call=step.progress.on_call,
            producer_of=self.ops.producer_of if self.ops else None,
            reading_of=self.ops.reading_of if self.ops else None,
        )

    @contextmanager
    def watching_forward(self) -> Iterator[None]:
        """A context for the forward and the loss."""
        with ExitStack() as stack:
            stack.enter_context(self.modules)
            if self.ops is not None:
                stack.enter_context(self.ops.watching(self.modules.owner))
            if self.gradients is not None:
                stack.enter_context(open_checkpoints())
            yield
