"""What one run of a model showed: numbers about tensors, calls of modules, operations, and the run as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nandoctor.evidence.formats import FloatFormat
from nandoctor.text import call_label

LOSS = "<loss>"
"""What stands for the loss function where a module's path is asked for."""
INTERRUPTED = "interrupted"
"""What stands for the message of an exception where the user interrupted a run."""
Phase = Literal["forward", "loss", "backward"]

_NO_AUTOCAST = {"none": " without autocast", "fp32": "", "fp64": ""}


def describe_run(policy: str, format: FloatFormat) -> str:  # noqa: A002 - the field's own name
    """What a run computed in, after a verb: "under fp16 autocast", "in fp16 without autocast", "in fp32"."""
    return f"{'in' if policy in _NO_AUTOCAST else 'under'} {name_run(policy, format)}"


def head_run(policy: str, format: FloatFormat) -> str:  # noqa: A002
    """The run over a column of its values, some of which autocast computes in fp32: "autocast", or its format."""
    return str(format) if policy in _NO_AUTOCAST else "autocast"


def name_run(policy: str, format: FloatFormat) -> str:  # noqa: A002
    """The run in a legend: "fp16 autocast", "fp16 without autocast", "fp32"."""
    return f"{format}{_NO_AUTOCAST.get(policy, ' autocast')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A call of a module.

    `module` is its dotted path, "" the root, "<loss>" the loss function; `type` its class, "" where that is not known;
    `call` counts the calls of this module from 0.
    """

    module: str
    type: str
    call: int

    @property
    def key(self) -> tuple[str, int]:
        """What tells this call from every other of the run, and finds it in another run."""
        return (self.module, self.call)

    @property
    def label(self) -> str:
        """The call in a table: "norm (2nd call)", the root by its type, "(UNet)"."""
        return call_label(self.module or f"({self.type})", self.call)

    @property
    def in_words(self) -> str:
        """The call in a sentence: "norm (2nd call)", "the model (UNet)", "the loss"."""
        return call_label(self.module, self.call) if self.module not in ("", LOSS) else self.with_type

    @property
    def with_type(self) -> str:
        """The call and the class of its module: "norm (LayerNorm, 2nd call)", "the model (UNet)", "the loss"."""
        name = {"": "the model", LOSS: "the loss"}.get(self.module, self.module)
        return call_label(name, self.call, self.type if self.module != LOSS else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Counts of a tensor's non-finite elements over one or two of its dimensions, the others summed up.

    `dims` are those dimensions and `sizes` their lengths; `numel` is the whole tensor's. Each is cut into at most 32
    cells as equal as can be (place p of `size` lies in cell `p * cells // size`). `counts` holds the rows of cells,
    a single row where there is only one dimension.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    numel: int
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStats:
    """One index along dimension 0: its non-finite elements, and its largest finite magnitude, None without one."""

    num_bad: int
    absmax: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteCounts:
    """Exact counts over one tensor, made only where the cheap pass or the user asked for them.

    `smallest` is the smallest non-zero finite magnitude, None where there is none. `flushed_share` is the share of
    elements, 0 to 1, that are non-zero and would round to zero in the run's low-precision format.
    `samples` lists the indices along dimension 0 that hold a NaN or an infinity, at most 64 of them.
    `by_sample` has the first 64 of all of them, where one is non-finite or per-sample statistics were asked for;
    `exponents`, only with `--per-sample`, pairs each binary exponent with the number of its finite non-zero elements;
    `grid` is there for non-finite arrays of the batch and for the outputs of examined ops.
    """

    num_nan: int
    num_posinf: int
    num_neginf: int
    num_zero: int
    num_subnormal: int
    smallest: float | None
    flushed_share: float
    first_bad_index: tuple[int, ...] | None
    samples: tuple[int, ...]
    by_sample: tuple[SampleStats, ...] = ()
    exponents: tuple[tuple[int, int], ...] = ()
    grid: Grid | None = None

    @property
    def num_bad(self) -> int:
        """NaN and infinities together."""
        return self.num_nan + self.num_posinf + self.num_neginf

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which of "nan", "+inf", "-inf" occur."""
        counts = (("nan", self.num_nan), ("+inf", self.num_posinf), ("-inf", self.num_neginf))
        return tuple(kind for kind, count in counts if count)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Numbers about one floating-point tensor.

    `path` says where the tensor stood in the arguments or the output ("", "[0]", ".logit", "hidden[2]").
    `min`, `max` and `absmax` are over the finite elements: always known where `finite` is True, else only with a
    counts, and None where no element is finite. `p05`, `median` and `p95` are quantiles of the non-zero finite
    magnitudes in `sample`, a spread sample of at most 1024 elements that also serves to compare two runs; it is not
    written to reports. `producer` is the `order` of the traced op that made the tensor, None where ops were not traced.
    """

    path: str
    shape: tuple[int, ...]
    dtype: FloatFormat
    numel: int
    finite: bool
    min: float | None = None
    max: float | None = None
    absmax: float | None = None
    p05: float | None = None
    median: float | None = None
    p95: float | None = None
    counts: NonfiniteCounts | None = None
    producer: int | None = None
    sample: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)

    def needs_counts(self, low: FloatFormat) -> bool:
        """Tell whether exact counts tell more: something is non-finite, or small enough for `low` to flush to zero."""
        return not self.finite or (self.p05 is not None and self.p05 < low.smallest_normal)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall(Place):
    """One call of one module. `enter` and `leave` are ticks of one clock that counts entries and returns together.

    A call that never returned (the forward raised) has `leave` None. `state` holds the module's own non-finite weights
    and the non-finite buffers that this call reads.
    """

    depth: int
    enter: int
    leave: int | None
    inputs: tuple[TensorStats, ...]
    outputs: tuple[TensorStats, ...]
    state: tuple[TensorStats, ...] = ()

    @property
    def place(self) -> Place:
        """The call by its names alone."""
        return Place(module=self.module, type=self.type, call=self.call)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of the user's code: the innermost frame outside torch and nandoctor.

    `column` to `end_line` and `end_column` delimit the expression that called the op: columns count from 0 in bytes of
    UTF-8, as CPython does, and all three are None where the interpreter does not tell (`-X no_debug_ranges`).
    `expression` is its text on one line, "" where that is not known.
    """

    file: str
    line: int
    text: str
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None
    expression: str = ""

    @property
    def whole(self) -> SourceLine:
        """The line without the place of one expression in it."""
        return SourceLine(file=self.file, line=self.line, text=self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTensor:
    """A tensor that an operation took or gave.

    `name` is the parameter's name in the op's schema; `stats` is None for tensors that have no floating-point values.
    `producer` is the `order` of the traced op that wrote the tensor last, None where it came from outside the traced
    span; `origin` then says from where, as far as it is known.
    """

    name: str
    stats: TensorStats | None
    producer: int | None = None
    origin: Literal["op", "weight", "buffer", "batch", "unknown"] = "unknown"
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One input of an examined op, counted, and its value where the output is worst (None unless elementwise)."""

    name: str
    dtype: FloatFormat
    shape: tuple[int, ...]
    absmax: float | None
    min: float | None
    max: float | None
    counts: NonfiniteCounts
    at_worst: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpAnalysis:
    """An op that made non-finite values, examined with its tensors still in hand.

    `counts` are those of the output that has them, of `numel` elements. The op is computed again in float64 from the
    very inputs it had, already rounded as they were: `exact` is the largest of the non-finite elements that are finite
    then, which the format could not hold. Where none is, the operation itself is singular at these inputs. `length` is
    the number of terms that make one output element, in products and reductions. `num_full_rows` counts the rows along
    the reduced dimension that are -inf throughout.
    """

    counts: NonfiniteCounts
    numel: int
    exact: float | None = None
    length: int | None = None
    num_full_rows: int | None = None
    operands: tuple[Operand, ...]

    @property
    def num_bad(self) -> int:
        """NaN and infinities of the output together."""
        return self.counts.num_bad

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which of "nan", "+inf", "-inf" the op made."""
        return self.counts.kinds

    @property
    def overflowed(self) -> bool:
        """Tell whether unlimited range would have kept at least one of the non-finite elements finite."""
        return self.exact is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One aten operation.

    `op` is its name without namespace and overload; `module`, `type` and `call` name the module call whose forward
    made it ("<loss>" for the loss function).
    `nth` counts the calls of this op from this module call, so that the same op can be found in another run. `scalars`
    holds the plain numbers among the arguments, by their names in the schema. In the backward pass the inputs are the
    incoming gradients, the outputs the outgoing ones, and `forward` is the order of the op they belong to (None for a
    custom autograd Function, which goes by its class).
    """

    op: str
    order: int
    module: str
    type: str
    call: int
    nth: int
    phase: Phase
    source: SourceLine | None
    inputs: tuple[OpTensor, ...]
    outputs: tuple[TensorStats, ...]
    scalars: tuple[tuple[str, float], ...]
    analysis: OpAnalysis | None = None
    forward: int | None = None

    @property
    def place(self) -> Place:
        """The module call whose forward made the op."""
        return Place(module=self.module, type=self.type, call=self.call)

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What tells this op from every other of the run, and finds it in another run."""
        return (self.module, self.call, self.op, self.nth)

    def find_input(self, name: str) -> OpTensor | None:
        """The tensor that the op took under this name of its schema, None where it took none."""
        return next((tensor for tensor in self.inputs if tensor.name == name), None)

    @property
    def outputs_finite(self) -> bool:
        """Tell whether all that the op gave is finite."""
        return all(stats.finite for stats in self.outputs)

    @property
    def nonfinite_inputs(self) -> tuple[OpTensor, ...]:
        """The tensors that the op took with NaN or an infinity in them."""
        return tuple(tensor for tensor in self.inputs if tensor.stats is not None and not tensor.stats.finite)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One run: the policy it ran under and every module call, in the order in which the calls were entered.

    `num_samples` is the batch size, None where it is not known. `time_first` tells whether it may be a number of steps
    in time instead: "possible" where the batch holds sequences alone, "unlikely" where another array has as many rows.

    `buffers` names the model's buffers, `built` the state that its own code makes non-finite, and whether it is -inf
    alone, `spoilt_buffers` the buffers with NaN or Inf after the forward alone. `loss`, `backward` (the ops of the
    backward pass in its own order) and `bad_gradients` (the non-finite gradients of parameters) are there where a loss
    was given. `function_ops` are the ops that the backwards of custom autograd Functions ran.

    `unread` names what in the output could not be looked into; what went in there shows in the ops alone.

    `policy` is "none" where autocast was off but for the model's own regions.
    `format` is what the policy computes its matrix products in (fp32 for the reference). `raised` is the message of
    an exception that ended the forward early. `ops` are the operations of the span that was asked for; `blinded` is the
    message of the exception for which none could be watched.
    """

    policy: str
    format: FloatFormat
    training: bool
    seed: int | None
    calls: tuple[ModuleCall, ...]
    batch: tuple[TensorStats, ...]
    output: tuple[TensorStats, ...]
    elapsed_s: float
    raised: str | None = None
    ops: tuple[OpCall, ...] = ()
    blinded: str | None = None
    buffers: frozenset[str] = frozenset()
    built: Mapping[str, bool] = field(default_factory=dict)
    spoilt_buffers: tuple[str, ...] = ()
    loss: TensorStats | None = None
    backward: tuple[OpCall, ...] = ()
    function_ops: tuple[OpCall, ...] = ()
    bad_gradients: tuple[TensorStats, ...] = ()
    num_samples: int | None = None
    time_first: Literal["never", "unlikely", "possible"] = "never"
    unread: tuple[str, ...] = ()

    @property
    def output_finite(self) -> bool:
        """Tell whether the model's own calls returned, also before an error of the loss, what is finite throughout."""
        outputs = [stats for call in self.calls if not call.module for stats in call.outputs]
        return bool(outputs) and all(stats.finite for stats in outputs)

    @property
    def finite(self) -> bool:
        """Tell whether the model's output, and the loss where there is one, are finite throughout."""
        ends = (*self.output, self.loss) if self.loss else self.output
        hidden = self.handed_out if self.unread else ()
        return self.raised is None and all(stats.finite for stats in ends) and not hidden

    @property
    def handed_out(self) -> tuple[int, ...]:
        """The forward's ops whose non-finite values no op took: they left the model, or came to nothing."""
        taken = {tensor.producer for op in self.ops for tensor in op.inputs}
        ends = (op for op in self.ops if op.phase == "forward" and op.order not in taken)
        return tuple(op.order for op in ends if not op.outputs_finite)
