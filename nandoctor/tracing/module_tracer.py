"""Records every module call while a model runs."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from nandoctor.evidence.trace import ModuleCall, Place
from nandoctor.torch_compat import plain_torch, version_of
from nandoctor.tracing.tensor_stats import Reading, Readings, add_counts, collect_all, is_finite, measure, walk_tensors

if TYPE_CHECKING:
    from nandoctor.tracing.op_tracer import OpTracer

NOWHERE = Place(module="", type="", call=0)
"""Outside of all module calls."""

Statistics = Literal["none", "ranges", "counts"]
"""What is read of a tensor: nothing (quicker if only the output matters), its limits, or exact counts too if it is
non-finite."""


@dataclass(slots=True, kw_only=True)
class _OpenCall:
    """A call, and what was read of its tensors so far; `handling` is the exception that its caller was handling."""

    module: nn.Module
    call: ModuleCall
    handling: BaseException | None
    inputs: Readings = field(default_factory=list)
    outputs: Readings = field(default_factory=list)


class Tracer:
    """A context in which every call of every module of `model` is recorded.

    `on_call` gets the number of returned calls after each. `ops` knows which traced op made a tensor, and what was read
    of it there. A shared module goes by its first name.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        statistics: Statistics = "ranges",
        on_call: Callable[[int], None] | None = None,
        ops: OpTracer | None = None,
    ) -> None:
        self._model = model
        self._statistics = statistics
        self._on_call = on_call
        self._ops = ops
        self._calls: list[_OpenCall] = []
        self._open: list[_OpenCall] = []
        self._num_calls: Counter[str] = Counter()
        self._num_returned = 0
        self._ticks = itertools.count()
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int | None, Reading | None]] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Tracer:
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                # A ScriptModule refuses hooks, which its graph could not keep; Module's own methods add them for calls
                # from Python. Ours comes first: what other hooks compute (spectral norm) is in the call.
                pre_hook, hook = nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook
                hooks.callback(pre_hook(module, partial(self._on_entry, name), prepend=True).remove)
                hooks.callback(pre_hook(module, self._on_arguments, with_kwargs=True).remove)
                hooks.callback(hook(module, self._on_return, always_call=True).remove)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._hooks.close()
        self._seen.clear()

    def read(self, *values: Any, counts: bool = False, attributes: bool = True) -> Readings:
        """Measure every tensor in `values`; one that was measured before and not written to since costs nothing.

        `attributes` as in `walk_tensors`.
        """
        with plain_torch():
            found = itertools.chain.from_iterable(walk_tensors(value, attributes=attributes) for value in values)
            return [(path, reading) for path, tensor in found if (reading := self._measure_once(tensor, counts))]

    def reading_of(self, tensor: torch.Tensor) -> Reading | None:
        """Return a traced op's reading of the tensor in its present state, else measure it."""
        return (self._ops.reading_of(tensor) if self._ops is not None else None) or measure(tensor)

    def calls(self) -> tuple[ModuleCall, ...]:
        """Return the calls so far, in the order in which they were entered."""
        stats = iter(collect_all([readings for it in self._calls for readings in (it.inputs, it.outputs)]))
        read = zip(self._calls, stats, stats, strict=True)
        return tuple(replace(it.call, inputs=taken, outputs=given) for it, taken, given in read)

    def _on_entry(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        is_script = isinstance(module, torch.jit.ScriptModule)  # made from another class
        call = ModuleCall(
            module=name,
            type=str(module.original_name) if is_script else type(module).__name__,
            call=self._num_calls[name],
            depth=len(self._open),
            enter=next(self._ticks),
        )
        self._num_calls[name] += 1
        self._open.append(_OpenCall(module=module, call=call, handling=sys.exc_info()[1]))
        self._calls.append(self._open[-1])

    def _on_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the arguments as other hooks left them."""
        if self._open and self._open[-1].module is module and self._statistics != "none":
            # An object among the arguments may refer to the whole model, and the module made none of that.
            self._open[-1].inputs = self.read(args, kwargs, attributes=False)

    def _on_return(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._open or self._open[-1].module is not module:
            return  # a hook for all modules raised, so this call was never opened
        ended = self._open.pop()
        if sys.exc_info()[1] is not ended.handling:
            return  # the forward raised; its caller may catch that and go on
        ended.call = replace(ended.call, leave=next(self._ticks))
        ended.outputs = self.read(output) if self._statistics != "none" else []
        self._num_returned += 1
        if self._on_call is not None:
            self._on_call(self._num_returned)

    def owner(self) -> Place:
        """Return the module call that is running, NOWHERE before the first and after the last."""
        return self._open[-1].call.place if self._open else NOWHERE

    def _measure_once(self, tensor: torch.Tensor, counts: bool) -> Reading | None:
        if tensor.is_inference():  # inference tensors count no versions, so a write to one could not be noticed
            return self._measure(tensor, counts)
        known = self._seen.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version_of(tensor):
            reading = known[2]
            # A traced op may have written to it since, also through `.data`.
            is_current = reading is None or self._ops is None or reading.producer == self._ops.producer_of(tensor)
            if reading is None or ((reading.counts or not counts) and is_current):
                return reading
        reading = self._measure(tensor, counts)
        self._seen[id(tensor)] = (weakref.ref(tensor), version_of(tensor), reading)
        return reading

    def _measure(self, tensor: torch.Tensor, counts: bool) -> Reading | None:
        reading = self.reading_of(tensor)
        if reading is None:
            return None
        if counts or (self._statistics == "counts" and reading.counts is None and not is_finite(reading)):
            reading = add_counts(reading, tensor)
        return reading if self._ops is None else reading._replace(producer=self._ops.producer_of(tensor))
