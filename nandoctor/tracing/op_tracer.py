"""Records every op that a run calls, with its line and tensors, and analyses those that made a non-finite value."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from nandoctor.autocast.literals import FP64_FOR_ALL, recast
from nandoctor.evidence.formats import FP64
from nandoctor.evidence.trace import LOSS, OpAnalysis, OpCall, Operand, OpTensor, Phase, Place
from nandoctor.ops import POINTWISE, PRODUCTS, UNFILLED, num_terms
from nandoctor.process_wide import held
from nandoctor.torch_compat import (
    answers_itself,
    num_nodes_made,
    plain_torch,
    running_node,
    tree_tensors,
    unwrap,
    version_of,
    without_autocast,
)
from nandoctor.tracing.dispatch_hook import Invocation, Proceed, find_lines, intercepting
from nandoctor.tracing.module_tracer import NOWHERE
from nandoctor.tracing.tensor_stats import (
    Reading,
    all_finite,
    collect_all,
    count_exactly,
    find_largest,
    find_nonfinite,
    format_of,
    is_finite,
    is_unreadable,
    limits_of,
    measure,
    numbers_in,
    plain_part,
)

if TYPE_CHECKING:
    from nandoctor.tracing.gradient_tracer import GradientTracer


OnOp = Callable[[OpCall, Invocation, Any], None]
"""Called with a recorded op, still without its tensors, its arguments as they were before it ran, and the output."""

MAX_ANALYSES = 64
IN_LOSS = Place(module=LOSS, type="", call=0)

TensorKind = Literal["weight", "buffer", "unread", "batch", "unknown"]
"""The kind of a tensor from outside, unknown for an attribute. Ops only write to an unread buffer: its content does not
matter."""

Known = tuple[TensorKind, str, torch.Tensor]
"""A tensor from outside, with its kind and its name."""

Input = tuple[OpTensor, Reading | None]
"""A tensor argument, without its statistics, and what was read of it before the op ran."""


class Recording(NamedTuple):
    """A recorded op without its tensors, and these; their readings stay on the device until they are collected."""

    call: OpCall
    inputs: list[Input]
    outputs: list[Reading]


def collect_calls(recordings: Sequence[Recording]) -> tuple[OpCall, ...]:
    """Return the recorded ops with their tensors; the statistics of inputs go by their arguments' names."""
    stats = collect_all(
        [[(tensor.name, reading) for tensor, reading in it.inputs if reading] for it in recordings]
        + [[("", reading) for reading in it.outputs] for it in recordings]
    )
    calls = []
    for recording, taken, given in zip(recordings, stats, stats[len(recordings) :], strict=False):
        read = iter(taken)
        inputs = (replace(tensor, stats=next(read)) if reading else tensor for tensor, reading in recording.inputs)
        calls.append(replace(recording.call, inputs=tuple(inputs), outputs=given))
    return tuple(calls)


class _Writer(NamedTuple):
    """The last known write to a tensor: the op's order, the tensor's version then, and what was read of it."""

    tensor: weakref.ref[torch.Tensor]
    version: int | None
    order: int | None
    reading: Reading | None


class _Storage(NamedTuple):
    """A storage: a living tensor in it, the last op that wrote there, and the last one whose NaN or Inf may be left."""

    tensor: weakref.ref[torch.Tensor]
    order: int | None
    nonfinite: int | None = None


class OpTracer:
    """A recorder of the ops that the current thread calls while `watching()` is open.

    `known` lists the tensors from outside, with their names. An op that makes non-finite values is analysed on the
    spot. `gradients` gets every output, to claim the op's graph nodes; `on_op` gets every op with its tensors.
    """

    def __init__(
        self,
        *,
        known: Iterable[Known],
        phase: Phase = "forward",
        gradients: GradientTracer | None = None,
        on_op: OnOp | None = None,
    ) -> None:
        self.phase = phase
        self._find_owner: Callable[[], Place] = lambda: NOWHERE
        self._names: dict[int, tuple[TensorKind, str]] = {}
        self._gradients = gradients
        self._on_op = on_op
        self._recordings: list[Recording] = []
        self._counts: Counter[tuple[Place, str]] = Counter()
        self._writers: dict[int, _Writer] = {}
        self._storages: dict[int, _Storage] = {}
        self._num_analyses = 0
        self._num_nodes: list[int] = []  # after each recorded op
        for kind, name, tensor in known:
            plain = plain_part(tensor)
            self._names[id(plain)] = kind, name
            if _has_memory(plain) and plain.data_ptr():  # of others that share it, such as `weight.data`
                self._names[plain.data_ptr()] = kind, name
                self._storages[_address(plain)] = _Storage(weakref.ref(plain), None)

    @contextmanager
    def watching(self, owner: Callable[[], Place]) -> Iterator[None]:
        """Record every op that this thread calls while the context is open; `owner` returns the running module call."""
        # `owner` may belong to the module tracer, which refers to this one. A lasting cycle would keep both, and code
        # that they saw, until the next garbage collection, and `printed_changes` would search for holders of that code.
        with held((self, "_find_owner", owner)), intercepting(self._observe):
            yield

    def producer_of(self, tensor: torch.Tensor) -> int | None:
        """Return the order of the recorded op that wrote `tensor` last, or None if it is not known."""
        tensor = plain_part(tensor)
        if (writer := self._find_current(tensor)) is not None:
            return writer.order
        storage = self._find_storage(tensor)
        if storage is None or storage.nonfinite is None or is_finite(measure(tensor)):
            return None if storage is None else storage.order
        return storage.nonfinite

    def reading_of(self, tensor: torch.Tensor) -> Reading | None:
        """Return what was read of `tensor` in its present state, or None if nothing was."""
        writer = self._find_current(plain_part(tensor))
        return None if writer is None else writer.reading

    def calls(self) -> tuple[OpCall, ...]:
        """Return the ops so far, in order."""
        return collect_calls(self._recordings)

    def _observe(self, call: Invocation, proceed: Proceed) -> Any:
        """Run one op and record it, unless it has no floating-point output or one that is still to be filled."""
        inputs = self._identify_all(call)
        before = call.mapped(_copy) if call.signature.is_mutable else call
        rng_state = torch.get_rng_state() if call.signature.is_random else None
        try:
            output = proceed(call)
        except RuntimeError as error:
            # In the op's format the number is an infinity, and the step ends here because of it.
            if (meant := call.refused_fill(error)) is not None:
                self._note(before, inputs, meant.run(), rng_state)
            raise
        self._note(before, inputs, output, rng_state)
        return output

    def _note(self, call: Invocation, inputs: list[Input], output: Any, rng_state: torch.Tensor | None) -> None:
        """Record an op that has run; `call` has the arguments as they were before."""
        made = list(map(unwrap, tree_tensors(output)))
        leaves = [plain_part(leaf) for leaf in made]
        readings = [measure(leaf) for leaf in leaves]
        if not any(readings) or call.name in UNFILLED:
            return
        analysis = None
        is_known = self._num_analyses < MAX_ANALYSES and not any(is_unreadable(tensor) for _, tensor in call.tensors())
        fails = is_known and not all(map(is_finite, readings))
        if fails and (_makes_nonfinite(inputs, readings) or _makes_of_finite(call, leaves)):
            # An infinity in the code is usually a mask, and every layer may have one: do not count it.
            self._num_analyses += not any(math.isinf(value) for _, value in call.scalars())
            with torch.random.fork_rng(devices=[]):
                if rng_state is not None:
                    torch.set_rng_state(rng_state)
                analysis = _examine(call, leaves)
        if call.signature.is_elementwise and len(leaves) == 1 and not is_finite(readings[0]):
            inputs = _mark_absorbed(call, inputs, leaves[0])
        recorded = self._describe(call, analysis)
        self._recordings.append(Recording(recorded, inputs, [reading for reading in readings if reading is not None]))
        self._num_nodes.append(num_nodes_made())
        if self._gradients is not None:
            self._gradients.claim(made, recorded)
        for leaf, reading in zip(leaves, readings, strict=True):
            self._remember(leaf, recorded.order, reading, wrote=call.signature.is_mutable)
        if self._on_op is not None:
            self._on_op(recorded, call, output)

    def _identify_all(self, call: Invocation) -> list[Input]:
        """Return the tensors that an op reads; edits go unseen, so a tensor made by one has the original's origin."""
        found = [self._identify(name, plain_part(tensor)) for name, tensor in call.tensors()]
        if call.original is None:
            return found
        meant = {tensor.name: tensor for tensor, _ in self._identify_all(call.original)}
        return [(meant.get(it.name, it) if it.origin == "unknown" else it, reading) for it, reading in found]

    def _identify(self, name: str, tensor: torch.Tensor) -> Input:
        known_as = self._names.get(id(tensor))
        if known_as is None and _has_memory(tensor) and self.producer_of(tensor) is None:
            known_as = self._names.get(tensor.data_ptr())  # shares the memory of a tensor from outside
        if known_as is not None and known_as[0] == "unread":
            reading = producer = None
        elif (writer := self._find_current(tensor)) is not None:
            reading, producer = writer.reading, writer.order
        else:
            reading, producer = measure(tensor), self.producer_of(tensor)
            if producer is None and not is_finite(reading):
                reading = measure(tensor, counts=True)
            self._remember(tensor, producer, reading)
        kind, path = known_as or ("unknown" if producer is None else "op", "")
        is_flags = tensor.dtype is torch.bool
        taken = OpTensor(name=name, stats=None, producer=producer, origin=kind, path=path, is_flags=is_flags)  # type: ignore[arg-type]
        return taken, reading

    def _find_current(self, tensor: torch.Tensor) -> _Writer | None:
        """Return the record of this tensor, or None if there is none or it was written to since."""
        writer = self._writers.get(id(tensor))
        if writer is None or writer.tensor() is not tensor or writer.version != version_of(tensor):
            return None
        storage = self._find_storage(tensor)  # knows of writes through `.data`, which has its own version counter
        if storage is None or storage.order is None:
            return writer
        return writer if writer.order is not None and writer.order >= storage.order else None

    def _find_storage(self, tensor: torch.Tensor) -> _Storage | None:
        """Return the storage behind a tensor; None if its owner is gone, since the address may have been reused."""
        storage = self._storages.get(_address(tensor))
        return storage if storage is not None and storage.tensor() is not None else None

    def _remember(
        self, tensor: torch.Tensor, order: int | None, reading: Reading | None, *, wrote: bool = False
    ) -> None:
        """Note what was read of a tensor and, if an op `wrote` to it or nothing is known of its memory, by which op."""
        writer = _Writer(weakref.ref(tensor), version_of(tensor), order, reading)
        self._writers[id(tensor)] = writer
        storage = self._find_storage(tensor)
        if storage is not None and not wrote:  # a view leaves the memory as it is
            return
        storage = storage or _Storage(writer.tensor, order)
        nonfinite = None if is_finite(reading) else order
        if nonfinite is None and storage.nonfinite is not None:
            is_whole = tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
            nonfinite = None if is_whole else storage.nonfinite
        self._storages[_address(tensor)] = storage._replace(order=order, nonfinite=nonfinite)

    def _describe(self, call: Invocation, analysis: OpAnalysis | None) -> OpCall:
        """Return the record of an op, still without its tensors."""
        owner = IN_LOSS if self.phase == "loss" else self._find_owner()
        if self._gradients is not None and not torch.is_grad_enabled():
            self._gradients.owner_inside = owner
        nth = self._counts[owner, call.name]
        self._counts[owner, call.name] += 1
        # A derivative, as `torch.autograd.grad` computes it in a forward, is at the line of its function.
        node = running_node()
        order = len(self._recordings) if node is None else bisect_right(self._num_nodes, node)
        forward = order if order < len(self._recordings) else None
        at = find_lines() if forward is None else self._recordings[forward].call
        return OpCall(
            op=call.name,
            order=len(self._recordings),
            place=owner,
            nth=nth,
            phase=self.phase,
            source=at.source,
            inside=at.inside,
            called_from=at.called_from,
            scalars=tuple(call.scalars()),
            analysis=analysis,
            forward=forward,
        )


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _makes_nonfinite(inputs: list[Input], outputs: list[Reading | None]) -> bool:
    """Return True if the op made non-finite values from finite ones, NaN from infinities, or infinities of a new sign.

    The last may be an overflow beside infinities that are meant, or mere arithmetic with them: the analysis tells.
    """
    before, after = _kinds([reading for _, reading in inputs]), _kinds(outputs)
    return "nan" not in before and (not before or bool(after - before))


def _kinds(readings: Iterable[Reading | None]) -> set[str]:
    """Return which of "nan", "inf" and "-inf" occur; a NaN hides the others."""
    limits = [limit for reading in readings if reading is not None for limit in limits_of(reading)]
    return {str(limit) for limit in limits if not math.isfinite(limit)}


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, which all views share; for one without memory, a key from its id."""
    address = tensor.untyped_storage().data_ptr() if _has_memory(tensor) else 0
    return address or -id(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not answers_itself(tensor)


def _examine(call: Invocation, outputs: Sequence[torch.Tensor]) -> OpAnalysis:
    """Analyse an op with a non-finite output; `call` holds the arguments as they were before it ran."""
    made = [numbers_in(output) for output in outputs]
    place, output = next((i, o) for i, o in enumerate(made) if o is not None and not all_finite(o))
    exact, rows = _recompute(call, place, like=output), full_rows(call)
    with plain_torch():  # a transform of torch.func would wrap every number that is read
        made_here = _without_passed_on(call, output)
        output = output if all_finite(made_here) else made_here
        counts, _ = count_exactly(output)
        numel = output.numel()
        worst, value = _find_worst(find_nonfinite(output), exact)
        if (each := _before_reduction(call)) is not None and not all_finite(each):
            output, worst = each, find_largest(find_nonfinite(each).numpy(force=True))
        taken = ((name, _operand_values(name, tensor)) for name, tensor in call.tensors())
        operands = [(name, values) for name, values in taken if values is not None]
        return OpAnalysis(
            counts=counts,
            numel=numel,
            exact=value,
            length=_length(call, [tensor for _, tensor in operands], output),
            num_full_rows=None if rows is None else int(unwrap(rows).sum()),
            operands=tuple(describe_operand(name, tensor, worst, output) for name, tensor in operands),
        )


def _before_reduction(call: Invocation) -> torch.Tensor | None:
    """Return what a loss of torch's computes for each element, before its mean or sum; None for any other op."""
    if not call.argument("reduction"):
        return None
    with torch.no_grad(), without_autocast():
        return numbers_in(call.with_argument("reduction", 0).run())


def find_passed_on(name: str, operands: Sequence[torch.Tensor], output: torch.Tensor) -> torch.Tensor | None:
    """Return where an op only passes on what it was given at the same element; None if it is no elementwise op.

    That is an infinity for an infinity, as masked rows are no sample's fault, and a NaN for a NaN. A function that is
    infinite for some finite inputs makes NaN of infinities, and passes on both.
    """
    finds = (find_nonfinite,) if name in POINTWISE else (torch.isinf, torch.isnan)
    passed = torch.zeros_like(output, dtype=torch.bool)
    for values in (values for values in operands if not all_finite(values)):
        if name in PRODUCTS or not _expands(values, output):
            return None
        for find in finds:
            passed |= find(output) & find(values).expand(output.shape)
    return passed


def _expands(values: torch.Tensor, output: torch.Tensor) -> bool:
    """Return False if an operand has another shape, as that of a reduction."""
    sizes = zip(reversed(values.shape), reversed(output.shape), strict=False)
    return values.dim() <= output.dim() and all(own in (1, whole) for own, whole in sizes)


def _without_passed_on(call: Invocation, output: torch.Tensor) -> torch.Tensor:
    """Return the output with zeros for what an elementwise op passes on."""
    operands = [values for _, tensor in call.tensors() if (values := numbers_in(tensor)) is not None]
    passed = find_passed_on(call.name, operands, output)
    return output if passed is None else output.masked_fill(passed, 0.0)


def _makes_of_finite(call: Invocation, outputs: Sequence[torch.Tensor]) -> bool:
    """Return True if a function that is infinite for some finite inputs was given those, whatever is beside them."""
    made = [values for output in outputs if (values := numbers_in(output)) is not None]
    return call.name in POINTWISE and not all(all_finite(_without_passed_on(call, values)) for values in made)


def _mark_absorbed(call: Invocation, inputs: list[Input], output: torch.Tensor) -> list[Input]:
    """Return an elementwise op's inputs, with a mark at those whose non-finite elements do not meet the output's."""
    made = numbers_in(output)
    if made is None or all(is_finite(reading) for _, reading in inputs):
        return inputs

    def meets(tensor: torch.Tensor) -> bool:
        values = numbers_in(tensor)
        # Complex, sparse and vmapped tensors have their numbers in another shape.
        if values is None or values.shape != tensor.shape or not _expands(values, made):
            return True
        return bool((find_nonfinite(values).expand(made.shape) & find_nonfinite(made)).any())

    with plain_torch():
        return [
            (it, reading) if is_finite(reading) or meets(tensor) else (replace(it, absorbed=True), reading)
            for (it, reading), (_, tensor) in zip(inputs, call.tensors(), strict=True)
        ]


def _operand_values(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the numbers of an operand; integers too if the op computes with them, as a division does."""
    is_integer = format_of(tensor.dtype) is None and tensor.dtype is not torch.bool
    return tensor.double() if is_integer and name in ("self", "other") else numbers_in(tensor)


def _recompute(call: Invocation, place: int, *, like: torch.Tensor) -> torch.Tensor | None:
    """Return the op's output at `place` in float64 from the same inputs, or None if that fails (no float64 kernel)."""
    try:
        with torch.no_grad(), without_autocast():
            output = call.mapped(partial(recast, FP64_FOR_ALL)).run()
    except (RuntimeError, NotImplementedError, TypeError, AssertionError):  # AssertionError: from a tensor class
        return None
    leaves = tree_tensors(output)
    values = numbers_in(leaves[place]) if place < len(leaves) else None
    with plain_torch():
        return None if values is None or values.shape != like.shape else values.double()


def _find_worst(nonfinite: torch.Tensor, exact: torch.Tensor | None) -> tuple[tuple[int, ...], float | None]:
    """Return the non-finite element with the largest exact value, and that value; else the first one and None."""
    places = nonfinite.numpy(force=True)
    if exact is not None:
        values = np.abs(exact.numpy(force=True))
        magnitudes = np.where(places & (values < math.inf), values, -1.0)  # NaN < inf is False
        worst = find_largest(magnitudes)
        if magnitudes[worst] >= 0:
            return worst, float(exact[worst])
    return find_largest(places), None


def describe_operand(name: str, tensor: torch.Tensor, worst: tuple[int, ...] | None, output: torch.Tensor) -> Operand:
    """Return the counts of one operand, and its value where it meets the worst element of `output`, if it is finite."""
    tensor = tensor.detach()
    counts, limits = count_exactly(tensor)
    meets = worst is not None and _expands(tensor, output)
    value = float(tensor.expand(output.shape)[worst]) if meets else math.nan
    return Operand(
        name=name,
        dtype=format_of(tensor.dtype) or FP64,
        shape=tuple(tensor.shape),
        absmax=max(abs(limits[0]), abs(limits[1])) if limits else None,
        min=limits[0] if limits else None,
        max=limits[1] if limits else None,
        counts=counts,
        at_worst=value if math.isfinite(value) else None,
    )


def _length(call: Invocation, operands: Sequence[torch.Tensor], output: torch.Tensor) -> int | None:
    """Return how many terms one output element sums, for products and reductions; None if that is not known."""
    if call.name in PRODUCTS:
        return num_terms(call.name, dict(call.arguments()))
    if len(operands) == 1 and output.numel() and operands[0].numel() > output.numel():
        return operands[0].numel() // output.numel()
    return None


def full_rows(call: Invocation) -> torch.Tensor | None:
    """Return the mask of rows that are -inf throughout, along a softmax's dimension or the keys of an attention mask.

    That dimension has length 1 in the result, which is None for an op without such rows.
    """
    if call.name == "scaled_dot_product_attention":
        mask = call.argument("attn_mask")
        if mask is None:
            return None
        return (~mask if mask.dtype == torch.bool else torch.isneginf(mask)).all(-1, keepdim=True)
    scores, dim = call.argument("self"), call.argument("dim")
    if not isinstance(scores, torch.Tensor) or not isinstance(dim, int) or not scores.is_floating_point():
        return None
    return torch.isneginf(scores).all(dim, keepdim=True) if scores.dim() else None
