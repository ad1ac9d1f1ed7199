"""The report: everything a renderer may look at, and the JSON contract `nandoctor.report/1`.

In: what the engine measured and the rules concluded. Out: `Report`, to and from plain JSON data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from nandoctor.evidence.census import DumpSummary
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.trace import SourceLine, TensorStats

SCHEMA = "nandoctor.report/1"

Verdict = Literal["precision", "numerics", "state", "input", "loss-scale", "silent", "healthy", "not-reproduced"]
Grade = Literal["exact", "same-mask", "elsewhere", "finite", "no-reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """How well the replay agrees with the output that the dump saved.

    `exact`: equal in every bit (all NaNs count as one). `same-mask`: the same elements are non-finite; `max_rel_err`
    is the largest difference of the finite ones over the largest saved magnitude. `elsewhere`: other elements are.
    `finite`: the saved output is non-finite and the replay is not. `no-reference`: nothing to compare with.
    `attempts` names the settings tried, in order; the last is the one reported.
    """

    grade: Grade
    output: str | None = None
    num_bad_saved: int | None = None
    num_bad_replayed: int | None = None
    numel: int | None = None
    max_rel_err: float | None = None
    attempts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNonfinite:
    """The first place where a non-finite value came to light.

    `where` tells what it was: a module's own `output`; a value made `between` modules, in the forward that `module`
    names, and first seen as the input of `seen_in`; the `batch` itself; or the `loss`. `inputs`
    are what went in, `value` the tensor that came out.
    """

    run: str
    phase: Literal["forward", "loss", "input"]
    module: str
    type: str
    call: int
    where: Literal["output", "between", "batch", "loss"]
    seen_in: str | None
    kinds: tuple[str, ...]
    num_bad: int
    numel: int
    first_index: tuple[int, ...] | None
    samples: tuple[int, ...]
    inputs: tuple[TensorStats, ...]
    value: TensorStats
    would_be: float | None
    state: tuple[TensorStats, ...] = ()

    @property
    def label(self) -> str:
        """The call as `LayerRow.label` writes it."""
        name = self.module or f"({self.type})"
        return name if self.call == 0 else f"{name} (call {self.call})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The operation, the state or the array that the damage comes from.

    `module` is the dotted path of the module whose forward called the op, "" the root, "<loss>" the loss function; for
    bad state its owner. `op` is the aten name, None where no op is to blame. `would_be` is what the worst element
    would have been with unlimited range, from the same inputs; None where the op has no finite value there.
    """

    phase: Literal["forward", "loss", "backward", "optimizer", "state", "input"]
    module: str
    type: str
    call: int
    op: str | None
    source: SourceLine | None
    kinds: tuple[str, ...]
    num_bad: int
    numel: int
    first_index: tuple[int, ...] | None
    samples: tuple[int, ...]
    would_be: float | None
    inputs: tuple[TensorStats, ...]
    output: TensorStats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One number that speaks for a cause, and the sentence it belongs to."""

    name: str
    value: float | int | str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why it happened: a code of the published list, and the case in words."""

    code: str
    title: str
    explanation: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """An origin and its cause; the report's `also` lists those beside the first."""

    origin: Origin
    cause: Cause | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One step of the way from the origin to the symptom."""

    module: str
    op: str
    event: Literal["born", "propagated", "absorbed"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One module call in one run, aligned with the other run.

    `headroom_bits` is log2(max / absmax) of the outputs against the low-precision format of the replay; negative when
    the format cannot hold the value. `rel_err` compares the sampled output elements with the fp32 run's:
    norm of the difference over norm of the reference; None where either has no finite sample. `inherited_err` is the
    same for the inputs: what is far above it was made in this call.
    """

    module: str
    type: str
    call: int
    depth: int
    inputs: tuple[TensorStats, ...]
    outputs: tuple[TensorStats, ...]
    headroom_bits: float | None = None
    rel_err: float | None = None
    inherited_err: float | None = None
    state: tuple[TensorStats, ...] = ()

    @property
    def label(self) -> str:
        """The dotted path as people read it, the root by its type, later calls numbered."""
        name = self.module or f"({self.type})"
        return name if self.call == 0 else f"{name} (call {self.call})"

    @property
    def finite(self) -> bool:
        """Whether every output tensor is finite."""
        return all(stats.finite for stats in self.outputs)

    @property
    def absmax(self) -> float | None:
        """Largest finite magnitude over the outputs, None without one."""
        return max((s.absmax for s in self.outputs if s.absmax is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """A call whose fp32 output comes within a factor of two of the low-precision format's limit, or passes it.

    `headroom_bits` is log2(max / absmax), negative past the limit; `growth` is the output's absmax over the inputs'.
    """

    module: str
    type: str
    call: int
    absmax: float
    headroom_bits: float
    growth: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run as the report keeps it; `modules` stand in the order in which the calls returned."""

    dtype: FloatFormat
    policy: str
    training: bool
    seed: int | None
    finite: bool
    raised: str | None
    elapsed_s: float
    output: tuple[TensorStats, ...]
    modules: tuple[LayerRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The replay under autocast and its fp32 reference, row by row the same calls where both reached them."""

    autocast: RunSummary
    fp32: RunSummary
    first_unholdable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where the replay ran."""

    nandoctor: str
    torch: str
    python: str
    platform: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One replayed dump. Fields that only a deeper diagnosis fills are None or empty until it ran."""

    schema: str = SCHEMA
    verdict: Verdict
    headline: str
    reproduction: Reproduction
    first_nonfinite: FirstNonfinite | None
    runs: Runs | None
    dump: DumpSummary
    environment: Environment
    notes: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    origin: Origin | None = None
    cause: Cause | None = None
    also: tuple[Diagnosis, ...] = ()
    chain: tuple[Link, ...] = ()
    bad_gradients: tuple[TensorStats, ...] = ()
    prescriptions: tuple[Any, ...] = ()
    headroom: tuple[NearMiss, ...] = ()
    eps_audit: tuple[Any, ...] = ()
