"""Records of one run of a model: tensor statistics, calls of modules, operations, and the run as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nandoctor.evidence.formats import FP32, FloatFormat
from nandoctor.text import call_label

LOSS = "<loss>"
"""The module path of the loss function."""
Phase = Literal["forward", "loss", "backward", "optimizer"]

_NO_AUTOCAST = {"none": " without autocast", "fp32": "", "fp64": ""}


def describe_run(policy: str, format: FloatFormat) -> str:  # noqa: A002 - the field's own name
    """Return the run's precision after a verb: "under fp16 autocast", "in fp16 without autocast", "in fp32"."""
    return f"{'in' if policy in _NO_AUTOCAST else 'under'} {name_run(policy, format)}"


def head_run(policy: str, format: FloatFormat) -> str:  # noqa: A002
    """Return the run's column heading: "autocast", which computes some values in fp32, or the format."""
    return str(format) if policy in _NO_AUTOCAST else "autocast"


def name_run(policy: str, format: FloatFormat) -> str:  # noqa: A002
    """Return the run's name in a legend: "fp16 autocast", "fp16 without autocast", "fp32"."""
    return f"{format}{_NO_AUTOCAST.get(policy, ' autocast')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A call of a module.

    `module` is its dotted path, "" for the root, "<loss>" for the loss function; `type` its class, "" if unknown;
    `call` counts the calls of this module from 0.
    """

    module: str
    type: str
    call: int

    @property
    def key(self) -> tuple[str, int]:
        """The identity of this call within a run, the same in other runs."""
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
class NonfiniteCounts:
    """Exact counts over one tensor, made only if the cheap pass asked for them.

    `smallest` is the smallest non-zero finite magnitude, None if there is none. `samples` lists the indices along
    dimension 0 with a NaN or an infinity, at most 64.
    """

    num_nan: int
    num_posinf: int
    num_neginf: int
    num_zero: int
    smallest: float | None
    first_bad_index: tuple[int, ...] | None
    samples: tuple[int, ...]

    @property
    def num_bad(self) -> int:
        """The number of NaN and infinities together."""
        return self.num_nan + self.num_posinf + self.num_neginf

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which of "nan", "+inf", "-inf" occur."""
        counts = (("nan", self.num_nan), ("+inf", self.num_posinf), ("-inf", self.num_neginf))
        return tuple(kind for kind, count in counts if count)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Numbers about one floating-point tensor.

    `path` is the tensor's place in the arguments or the output ("", "[0]", ".logit", "hidden[2]"). `min`, `max` and
    `absmax` are over the finite elements: always known if `finite` is True, else only with `counts`, and None if no
    element is finite. `p05`, `median` and `p95` are quantiles of the non-zero finite magnitudes in `sample`, at most
    1024 spread elements that also serve to compare two runs; it is not written to reports. `producer` is the `order` of
    the traced op that made the tensor, None if ops were not traced.
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

    @property
    def known_values(self) -> NDArray[np.float32]:
        """The limits if they are known, else the finite values of the sample."""
        if self.min is not None and self.max is not None:
            return np.array([self.min, self.max])
        return np.array([]) if self.sample is None else self.sample[np.isfinite(self.sample)]


def largest_of(tensors: Iterable[TensorStats]) -> float | None:
    """Return the largest finite magnitude in tensors, None if there is none."""
    return max((stats.absmax for stats in tensors if stats.absmax is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall(Place):
    """One call of one module. `enter` and `leave` are ticks of a clock that counts entries and returns together.

    `leave` is None for a call that never returned because the forward raised. `state` has the module's own non-finite
    weights and the non-finite buffers that this call reads.
    """

    depth: int
    enter: int
    leave: int | None = None
    inputs: tuple[TensorStats, ...] = ()
    outputs: tuple[TensorStats, ...] = ()
    state: tuple[TensorStats, ...] = ()

    @property
    def place(self) -> Place:
        """The call's identity alone."""
        return Place(module=self.module, type=self.type, call=self.call)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of the user's code: that of the innermost frame outside torch and nandoctor.

    `column`, `end_line` and `end_column` delimit the expression that called the op: columns count from 0 in bytes of
    UTF-8, as in CPython, and all three are None if the interpreter does not keep them (`-X no_debug_ranges`).
    `expression` is its text on one line, "" if unknown.
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
        """The line without the position of an expression."""
        return SourceLine(file=self.file, line=self.line, text=self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTensor:
    """An input or output tensor of an operation.

    `name` is the parameter's name in the op's schema, "" for a gradient; `stats` is None for tensors without
    floating-point values, of which `is_flags` marks booleans. `producer` is the `order` of the traced op that wrote the
    tensor last, None if it came from outside the traced span; `origin` then says from where, if known. `absorbed` is
    True if an elementwise op made finite numbers of all its NaN and infinities, as 5 / Inf is 0, and others of its
    result are non-finite.
    """

    name: str
    stats: TensorStats | None
    producer: int | None = None
    origin: Literal["op", "weight", "buffer", "batch", "unknown"] = "unknown"
    path: str = ""
    is_flags: bool = False
    absorbed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One input of an examined op with counts, and its value where the output is worst (None unless elementwise)."""

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
    """An op that made non-finite values, examined while its tensors were in memory.

    `counts` are those of its non-finite output, of `numel` elements. The op is computed again in float64 from the same,
    already rounded inputs: `exact` is the largest result among the non-finite elements that are finite in float64,
    which the format could not hold. If none is, the operation itself is singular at these inputs. `length` is the
    number of terms of one output element, in products and reductions. `num_full_rows` counts the rows along the reduced
    dimension that are entirely -inf.
    """

    counts: NonfiniteCounts
    numel: int
    exact: float | None = None
    length: int | None = None
    num_full_rows: int | None = None
    operands: tuple[Operand, ...]

    @property
    def num_bad(self) -> int:
        """The number of NaN and infinities in the output together."""
        return self.counts.num_bad

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which of "nan", "+inf", "-inf" the op made."""
        return self.counts.kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One aten operation.

    `op` is its name without namespace and overload; `place` is the module call whose forward called it. `nth` counts
    the calls of this op from there, which finds the same op in another run. `scalars` are the plain numbers among the
    arguments, by their names in the schema. In the backward pass the inputs are the incoming gradients, the outputs the
    outgoing ones, and `forward` is the order of the op that they belong to (None for a custom autograd Function, which
    is named by its class). An op of the forward has one too if it computes a derivative, and its source. `inside` is
    the line of torch's own Python that ran the op, if torch computes there; `called_from` is the user's line if that,
    or `source`, is a library's.
    """

    op: str
    order: int
    place: Place
    nth: int
    phase: Phase
    source: SourceLine | None
    inputs: tuple[OpTensor, ...] = ()
    outputs: tuple[TensorStats, ...] = ()
    scalars: tuple[tuple[str, float], ...] = ()
    analysis: OpAnalysis | None = None
    forward: int | None = None
    inside: SourceLine | None = None
    called_from: SourceLine | None = None

    @property
    def own_line(self) -> SourceLine | None:
        """The innermost line that ran the op, a library's or torch's own included."""
        return self.inside or self.source

    @property
    def key(self) -> tuple[str, int, str, int]:
        """The identity of this op call within a run, the same in other runs."""
        return (*self.place.key, self.op, self.nth)

    def find_input(self, name: str) -> OpTensor | None:
        """Return the input tensor with this name in the op's schema, None if there is none."""
        return next((tensor for tensor in self.inputs if tensor.name == name), None)

    @property
    def outputs_finite(self) -> bool:
        """True if all outputs are finite."""
        return all(stats.finite for stats in self.outputs)

    @property
    def nonfinite_inputs(self) -> tuple[OpTensor, ...]:
        """The input tensors with NaN or infinities."""
        return tuple(tensor for tensor in self.inputs if tensor.stats is not None and not tensor.stats.finite)

    @property
    def carried_inputs(self) -> tuple[OpTensor, ...]:
        """The input tensors whose NaN or infinities may have made those of the output."""
        return tuple(tensor for tensor in self.nonfinite_inputs if not tensor.absorbed)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One run: its policy and every module call, in the order of entry.

    `num_samples` is the batch size, or the number of time steps if these come first; None if unknown.

    `buffers` names the model's buffers, `built` the state that its own code makes non-finite, with True if that is only
    -inf, `spoilt_buffers` the buffers and weights that have NaN or Inf only after the forward. `loss`, `backward` (the
    ops of the backward pass in its own order) and `bad_gradients` (the non-finite gradients of parameters) exist if a
    loss was given. `function_ops` are the ops that ran in the backward of custom autograd Functions. `trained_outside`
    names what the backward pass gives gradients besides the model's parameters.
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
    trained_outside: tuple[str, ...] = ()
    num_samples: int | None = None
    unread: tuple[str, ...] = ()

    @cached_property
    def by_key(self) -> Mapping[tuple[str, int, str, int], OpCall]:
        """The ops by their keys, as which another run has them too."""
        return {op.key: op for op in self.ops}

    @cached_property
    def finite_gradients(self) -> Mapping[tuple[str, int, str, int], bool]:
        """By the keys of the backward pass's ops, True if the gradients of all with that key are finite."""
        sick = {op.key for op in self.backward if not op.outputs_finite}
        return {op.key: op.key not in sick for op in self.backward}

    @property
    def finite(self) -> bool:
        """True if the model's output, and the loss if there is one, are entirely finite."""
        ends = (*self.output, self.loss) if self.loss else self.output
        return self.raised is None and all(stats.finite for stats in ends)

    @property
    def fails_in_loss(self) -> bool:
        """True if there is a loss, and it is not finite."""
        return self.loss is not None and not self.loss.finite

    def fails_as(self, failing: Trace) -> bool:
        """Return True if this run is non-finite where that one is: in the loss, or in the output if that has none."""
        return self.fails_in_loss if failing.fails_in_loss and self.loss is not None else not self.finite

    @property
    def rows_hit(self) -> tuple[int, ...]:
        """The non-finite rows of outputs with one row per sample; a trial has to show that these are the samples."""
        outputs = (stats for stats in self.output if stats.counts and stats.shape[:1] == (self.num_samples,))
        return tuple(sorted({row for stats in outputs if stats.counts for row in stats.counts.samples}))

    @property
    def handed_out(self) -> tuple[int, ...]:
        """The forward's ops whose non-finite outputs no op read: they left the model, or were discarded."""
        taken = {tensor.producer for op in self.ops for tensor in op.inputs}
        ends = (op for op in self.ops if op.phase == "forward" and op.order not in taken)
        return tuple(op.order for op in ends if not op.outputs_finite)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTrace:
    """The ops of an optimizer's step, and by the name of each weight that it left non-finite, the op that did.

    `low` is the weights' format. `notes` say why no op is known.
    """

    ops: tuple[OpCall, ...] = ()
    spoiled: Mapping[str, int] = field(default_factory=dict)
    low: FloatFormat = FP32
    notes: tuple[str, ...] = ()
