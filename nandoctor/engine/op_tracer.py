"""Watches every operation while a model runs: which module called it, on which line, with what.

In: the aten calls of one thread. Out: `OpCall` records, each op as the user wrote it; torch is left as it was.
"""

from __future__ import annotations

import linecache
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from nandoctor.engine.exams import examine
from nandoctor.engine.gradients import GradientTracer
from nandoctor.engine.invocation import Invocation, op_name
from nandoctor.engine.stats import Reading, collect_all, is_finite, measure, numbers_in, unwrap
from nandoctor.engine.tracer import OBSERVER_KEY, Owner, unobserved
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.trace import Exam, OpCall, OpTensor, Phase, SourceLine, TensorStats

_KEY: Any = torch._C._parse_dispatch_key(OBSERVER_KEY)
_KEYS_BELOW = torch._C._dispatch_keyset_full_after(_KEY)
# Composites of which one part or the other is to blame; they are on no autocast list themselves.
_LOOKED_INTO = frozenset({"cross_entropy_loss"})
_SKIPPED_ROOTS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<frozen", "<eval_with_key>")
_RUNNER = str(Path(__file__).with_name("runner.py"))

OnOp = Callable[[int, Invocation, Any], None]
"""Told the order of a recorded op, the arguments as they were before it ran, and what it gave."""

UNREAD = "unread"
"""The kind of a buffer that an op takes and only writes: what it holds does not matter."""

MAX_EXAMS = 64
LOSS_OWNER: Owner = ("<loss>", "", 0)

Name = tuple[str, str]
"""What a tensor from outside is ("weight", "buffer" or "batch") and its name."""


class _Tensor(NamedTuple):
    """A tensor argument as it was before the op ran."""

    name: str
    reading: Reading | None
    producer: int | None
    known_as: Name | None


@dataclass(slots=True, kw_only=True)
class _Recording:
    """An op as it was recorded; the readings stay on the device until they are collected."""

    op: str
    owner: Owner
    nth: int
    phase: Phase
    source: tuple[str, int] | None
    inputs: list[_Tensor]
    outputs: list[Reading]
    scalars: tuple[tuple[str, float], ...]
    exam: Exam | None


class _Writer(NamedTuple):
    """Who wrote a tensor last, at which version, and what was read of it."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    order: int | None
    reading: Reading | None


_active = threading.local()
_registration = threading.RLock()


def _observe(keys: torch._C.DispatchKeySet, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    if op_name(op) in _LOOKED_INTO:
        return op.redispatch(keys & _KEYS_BELOW, *args, **kwargs)
    with unobserved():
        return _active.tracer.observe(Invocation(op=op, args=args, kwargs=kwargs))


class OpTracer:
    """Records the ops of the current thread while `watching()` is open.

    `names` maps the id of a weight, a buffer or an array of the batch to what it is. An op that makes non-finite values
    is examined on the spot, overflow judged against `low`. `gradients` is shown every output, to find the graph nodes
    of the op, `on_op` every op with its tensors.
    """

    def __init__(
        self,
        *,
        names: Mapping[int, Name],
        low: FloatFormat,
        gradients: GradientTracer | None = None,
        on_op: OnOp | None = None,
    ) -> None:
        self.phase: Phase = "forward"
        self._find_owner: Callable[[], Owner] = lambda: ("", "", 0)
        self._names = names
        self._low = low
        self._gradients = gradients
        self._on_op = on_op
        self._recordings: list[_Recording] = []
        self._counts: Counter[tuple[Owner, str]] = Counter()
        self._writers: dict[int, _Writer] = {}
        self._storage_writers: dict[int, int] = {}
        self._num_exams = 0

    @contextmanager
    def watching(self, owner: Callable[[], Owner]) -> Iterator[None]:
        """Record every op that this thread calls until the context is left; `owner` tells which module call runs."""
        self._find_owner = owner
        with ExitStack() as stack:
            stack.enter_context(_registration)
            library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
            stack.callback(library._destroy)
            library.fallback(_observe, OBSERVER_KEY, with_keyset=True)  # type: ignore[no-untyped-call]
            _active.tracer = self
            stack.callback(delattr, _active, "tracer")
            stack.enter_context(torch._C._IncludeDispatchKeyGuard(_KEY))
            yield

    def producer_of(self, tensor: torch.Tensor) -> int | None:
        """The order of the recorded op that wrote `tensor` last, None where it is not known."""
        writer = self._writers.get(id(tensor))
        if writer is not None and writer.tensor() is tensor and writer.version == _version(tensor):
            return writer.order
        return self._storage_writers.get(_storage(tensor)) if _version(tensor) > 0 else None

    def calls(self) -> tuple[OpCall, ...]:
        """The ops so far, in order."""
        inputs = [[(tensor.name, tensor.reading) for tensor in r.inputs if tensor.reading] for r in self._recordings]
        outputs = [[("", reading) for reading in recording.outputs] for recording in self._recordings]
        stats = collect_all(inputs + outputs)
        pairs = zip(self._recordings, stats, stats[len(inputs) :], strict=False)
        return tuple(_to_call(order, recording, taken, given) for order, (recording, taken, given) in enumerate(pairs))

    def observe(self, call: Invocation) -> Any:
        """Run one op and record it. Ops without floating-point output are run and forgotten."""
        inputs = [self._identify(name, unwrap(tensor)) for name, tensor in call.tensors()]
        before = call.kept()
        rng_state = torch.get_rng_state() if call.is_random else None
        output = call.run()
        leaves = [unwrap(leaf) for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        readings = [measure(leaf) for leaf in leaves]
        if not any(readings):
            return output
        exam = None
        if self._num_exams < MAX_EXAMS and _makes_bad(inputs, readings):
            # An infinity that the code wrote down is a mask most of the time: every layer may have one.
            self._num_exams += not any(math.isinf(value) for _, value in call.scalars())
            exam = self._examine(before, leaves, rng_state)
        self._record(call, inputs, readings, exam)
        order = len(self._recordings) - 1
        if self._gradients is not None:
            recording = self._recordings[order]
            self._gradients.claim(leaves, order, recording.op, recording.owner)
        for leaf, reading in zip(leaves, readings, strict=True):
            self._remember(leaf, order, reading)
            if call.op._schema.is_mutable:
                self._storage_writers[_storage(leaf)] = order
        if self._on_op is not None:
            self._on_op(order, before, output)
        return output

    def _identify(self, name: str, tensor: torch.Tensor) -> _Tensor:
        known_as = self._names.get(id(tensor))
        if known_as is not None and known_as[0] == UNREAD:
            return _Tensor(name, None, None, known_as)
        writer = self._writers.get(id(tensor))
        if writer is None or writer.tensor() is not tensor or writer.version != _version(tensor):
            reading = measure(tensor)
            if known_as is not None and not is_finite(reading):
                reading = measure(tensor, census_for=self._low)
            writer = self._remember(tensor, self.producer_of(tensor), reading)
        return _Tensor(name, writer.reading, writer.order, known_as)

    def _remember(self, tensor: torch.Tensor, order: int | None, reading: Reading | None) -> _Writer:
        writer = _Writer(weakref.ref(tensor), _version(tensor), order, reading)
        self._writers[id(tensor)] = writer
        return writer

    def _record(
        self, call: Invocation, inputs: list[_Tensor], readings: list[Reading | None], exam: Exam | None
    ) -> None:
        owner = LOSS_OWNER if self.phase == "loss" else self._find_owner()
        if self._gradients is not None and not torch.is_grad_enabled():
            self._gradients.owner_inside = owner
        self._recordings.append(
            _Recording(
                op=call.name,
                owner=owner,
                nth=self._counts[owner, call.name],
                phase=self.phase,
                source=_find_source(sys._getframe(1)),
                inputs=inputs,
                outputs=[reading for reading in readings if reading is not None],
                scalars=tuple(call.scalars()),
                exam=exam,
            )
        )
        self._counts[owner, call.name] += 1

    def _examine(self, call: Invocation, leaves: list[torch.Tensor], rng_state: torch.Tensor | None) -> Exam:
        made = (values for leaf in leaves if (values := numbers_in(leaf)) is not None)
        worst = next(values for values in made if not torch.isfinite(values).all())
        after = torch.get_rng_state()
        try:
            if rng_state is not None:
                torch.set_rng_state(rng_state)
            return examine(call, worst, low=self._low)
        finally:
            torch.set_rng_state(after)


def _makes_bad(inputs: list[_Tensor], outputs: list[Reading | None]) -> bool:
    """Whether the op turned finite inputs into non-finite output, or infinities into NaN."""
    after = [reading.limits for reading in outputs if reading is not None]
    if all(bool(torch.isfinite(limits).all()) for limits in after):
        return False
    before = [tensor.reading.limits for tensor in inputs if tensor.reading is not None]
    if any(bool(torch.isnan(limits).any()) for limits in after):
        return not any(bool(torch.isnan(limits).any()) for limits in before)
    return all(bool(torch.isfinite(limits).all()) for limits in before)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _storage(tensor: torch.Tensor) -> int:
    """Views share their storage, so a write through one of them is found from all."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -1


def _find_source(frame: FrameType | None) -> tuple[str, int] | None:
    """The innermost line of the user's code; None where torch's own modules call each other throughout."""
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED_ROOTS):
        if frame.f_code.co_filename == _RUNNER:
            return None  # further out is whoever called nandoctor
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _to_call(
    order: int, recording: _Recording, inputs: tuple[TensorStats, ...], outputs: tuple[TensorStats, ...]
) -> OpCall:
    stats = {taken.path: taken for taken in inputs}
    module, type_name, call = recording.owner
    return OpCall(
        op=recording.op,
        order=order,
        module=module,
        type=type_name,
        call=call,
        nth=recording.nth,
        phase=recording.phase,
        source=_to_source(recording.source),
        inputs=tuple(_to_tensor(tensor, stats.get(tensor.name)) for tensor in recording.inputs),
        outputs=outputs,
        scalars=recording.scalars,
        exam=recording.exam,
    )


def _to_tensor(tensor: _Tensor, stats: TensorStats | None) -> OpTensor:
    kind, path = tensor.known_as or ("unknown" if tensor.producer is None else "op", "")
    return OpTensor(
        name=tensor.name,
        stats=stats,
        producer=tensor.producer,
        origin=kind,  # type: ignore[arg-type]
        path=path,
    )


def _to_source(source: tuple[str, int] | None) -> SourceLine | None:
    if source is None:
        return None
    file, line = source
    return SourceLine(file=file, line=line, text=linecache.getline(file, line).strip())
