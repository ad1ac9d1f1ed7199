"""The report: everything that a view may read, and the JSON contract `nandoctor.report/2`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nandoctor.evidence.codec import INLINED
from nandoctor.evidence.dump_summary import DumpSummary, Environment
from nandoctor.evidence.edits import ChangedFile, Edit, FixCost
from nandoctor.evidence.formats import FP32, Effect, FloatFormat
from nandoctor.evidence.trace import Place, SourceLine, TensorStats, largest_of

SCHEMA = "nandoctor.report/2"

Verdict = Literal[
    "precision",
    "numerics",
    "state",
    "input",
    "loss-scale",
    "silent",
    "healthy",
    "not-reproduced",
    "cannot-tell",
    "fixed",
]
NOTHING_FOUND: frozenset[Verdict] = frozenset({"healthy", "not-reproduced", "cannot-tell", "fixed"})
"""The replay saw nothing non-finite: "healthy" although all was checked, "not-reproduced" although the dump has some,
"cannot-tell" as far as could be checked, "fixed" although the dump has some, because the code has changed since."""

Grade = Literal["exact", "same-mask", "elsewhere", "finite", "no-reference"]
ChangeKind = Literal["source", "cell", "snippet", "setting", "state", "advice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAttempt:
    """One replay under autocast: its mode, its seed (None: the saved random state), and its grade."""

    training: bool
    seed: int | None
    grade: Grade


WRONG = 0.1
"""Values this far from fp32's (norm of the difference over norm) count as wrong.

fp16 carries 11 bits and a deep network loses a few of them, so rounding alone stays below a few per cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """How well the replay agrees with the saved output of the dump.

    `exact`: bitwise equal (all NaNs count as equal). `same-mask`: the same elements are non-finite; `max_rel_err` is
    the largest difference of the others over the largest saved magnitude. `elsewhere`: different elements are
    non-finite. `finite`: the replay is finite. `no-reference`: nothing to compare with. The last of `attempts` is the
    one reported.
    """

    grade: Grade
    output: str | None = None
    num_bad_saved: int | None = None
    num_bad_replayed: int | None = None
    numel: int | None = None
    max_rel_err: float | None = None
    attempts: tuple[ReplayAttempt, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteElements:
    """The number and places of a tensor's non-finite elements.

    `num_bad` of the `numel` elements are non-finite, of the `kinds` "nan", "+inf" and "-inf"; `first_index` is the
    first of them in row-major order, None if unknown. `samples` are the samples of the batch with which they appear and
    without which they do not, of many the first 64; None if that is not known. `batch_size` is the number of samples.
    """

    kinds: tuple[str, ...]
    num_bad: int
    numel: int
    first_index: tuple[int, ...] | None
    samples: tuple[int, ...] | None
    batch_size: int | None = None


Where = Literal["output", "between", "batch", "loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNonfinite:
    """The first place where a non-finite value was seen.

    `where` says what it was: a module's `output`; a value made `between` modules, in the forward of `module`, and first
    seen as an input of the call `seen_in`; the `batch`; or the `loss`. `inputs` are those of the module call, and
    `value` is the non-finite tensor.
    """

    run: str
    phase: Literal["forward", "loss", "input"]
    place: Place = field(metadata=INLINED)
    where: Where
    seen_in: Place | None
    elements: NonfiniteElements = field(metadata=INLINED)
    inputs: tuple[TensorStats, ...]
    value: TensorStats
    would_be: float | None
    state: tuple[TensorStats, ...] = ()

    def __repr__(self) -> str:
        return f"FirstNonfinite({self.where} of {self.place.in_words})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The operation, the state or the array that the failure comes from.

    The place is the module whose forward called the op, or that owns the state. `op` is the aten name, None if none is
    to blame; `nth` counts its calls from that forward, from 0; `function` is the custom Function in whose backward it
    ran. `would_be` is the worst element computed from the same inputs in float64, None if that is non-finite too.
    `called_from` is the user's line if `source` is a library's.
    """

    phase: Literal["forward", "loss", "backward", "optimizer", "state", "input"]
    place: Place = field(metadata=INLINED)
    op: str | None
    source: SourceLine | None
    elements: NonfiniteElements = field(metadata=INLINED)
    would_be: float | None
    inputs: tuple[TensorStats, ...]
    output: TensorStats | None
    nth: int = 0
    function: str | None = None
    called_from: SourceLine | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that supports a cause, and its sentence."""

    name: str
    value: float | int | str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The text of a `Cause`."""

    explanation: str
    evidence: tuple[Evidence, ...]
    headline: str = ""
    source: SourceLine | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Account):
    """Why it failed: a code of the published list, and the case in words.

    `headline` is one sentence without a full stop, with the user's code in backticks; "" if there is only the
    `explanation`. `source` is the expression that the sentence is about if that is not the origin's, and `remark` a
    note to show beside it.
    """

    code: str
    title: str

    def __repr__(self) -> str:
        return f"Cause({self.code}: {self.explanation})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """An origin and its cause; the report's `also` lists those after the first."""

    origin: Origin
    cause: Cause | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One step of the path from the origin to the symptom."""

    place: Place = field(metadata=INLINED)
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One step of the data flow that made a value too large, with the largest magnitudes before and after it.

    The last is the tensor that it came from: `module` is then its path, `op` "weight", "buffer" or "batch". A
    gradient is followed up to the loss.
    """

    place: Place = field(metadata=INLINED)
    op: str
    source: SourceLine | None
    absmax_in: float | None
    absmax_out: float | None
    log2_gain: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One module call in one run, aligned with the other run.

    `headroom_bits` is log2(max / absmax) of the outputs, for the low-precision format of the replay; negative if the
    format cannot hold the value. `rel_err` compares the sampled output elements with the fp32 run's: norm of the
    difference over norm of the reference; None if either has no finite sample. `inherited_err` is the same for the
    inputs: a `rel_err` far above it arose in this call.
    """

    place: Place = field(metadata=INLINED)
    depth: int
    inputs: tuple[TensorStats, ...]
    outputs: tuple[TensorStats, ...]
    headroom_bits: float | None = None
    rel_err: float | None = None
    inherited_err: float | None = None
    state: tuple[TensorStats, ...] = ()

    @property
    def finite(self) -> bool:
        """True if every output tensor is finite."""
        return all(stats.finite for stats in self.outputs)

    @property
    def absmax(self) -> float | None:
        """Largest finite magnitude over the outputs; None if there is none."""
        return largest_of(self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """The outcome of a changed run; `max_rel_err` is its largest difference from fp32 over fp32's largest magnitude.

    It is the worst sample's (of all samples, if rounding explains the error of one with small values), over output and
    loss where fp32 is finite; None if the run is non-finite there. `ran` is False if the change could not be run.
    """

    finite: bool
    max_rel_err: float | None
    ran: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One criterion of a fix, whether it was met, and a sentence on that; `samples` is None for the whole batch."""

    name: str
    status: Literal["passed", "failed", "not-checked"]
    text: str
    samples: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FixSettings:
    """The settings that a fix makes in the training loop, on this type of `device`; None leaves one unchanged."""

    device: str = "cuda"
    amp_dtype: Literal["bfloat16"] | None = None
    loss_scale: float | None = None
    optimizer_eps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change that was tried on the failing step.

    `patch` is the text that was run, by `kind`: "source", a diff for `git apply -p1` in `patch_root`; "cell", a diff of
    code without a file, such as a notebook's; "snippet" and "state", Python with `model` in scope, run before the step.
    A "setting" has `settings`, and "advice" cannot be run. `verified`: it passed every check that was made.
    `workaround`: it makes the step finite by replacing something that the formula means, as this sentence says.
    `edit` is the change that the search made to the run. The smallest change that works has `rank` 0. `cost` is None if
    nothing is widened. `files` are the files that a diff changes, in full; a saved report has only the diff.
    """

    kind: ChangeKind
    edit: Edit
    title: str
    patch: str
    patch_root: str | None = None
    files: tuple[ChangedFile, ...] = field(default=(), repr=False, compare=False)
    settings: FixSettings | None = None
    verified: bool
    workaround: str | None = None
    checks: tuple[Check, ...] = ()
    outcome: TrialOutcome
    cost: FixCost | None = None
    rank: int

    def __repr__(self) -> str:
        return f"Fix({'verified' if self.verified else 'not verified'}: {self.title})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """The settings that one run of the step replaced; None keeps the step's own.

    `dtype` is the format of autocast; fp32 and fp64 are without autocast. `only` and `without` select samples of the
    batch.
    """

    dtype: FloatFormat | None = None
    training: bool | None = None
    only: tuple[int, ...] | None = None
    without: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """The failing step with another setting: `group` is the kind of setting varied, `setting` its value."""

    group: Literal["precision", "mode", "samples"]
    setting: StepSetting
    outcome: TrialOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Module:
    """A module kept in fp32; with `children` False only the ops of its own forward, without its submodules."""

    module: str
    children: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Set:
    """A set of modules that makes the step pass if kept in fp32, and with any one of them left out the step fails."""

    modules: tuple[Fp32Module, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32SetSearch:
    """The search for the smallest sets of modules to keep in fp32; the sets have no member in common."""

    sets: tuple[Fp32Set, ...]
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpsUse:
    """A small constant as it was actually used.

    `name` is the argument of the op, or the optimizer's eps. `op` is the op that used it, and `dtype` the format, None
    for an optimizer whose state is not in the file; `rounded` is its value there. `effect` says what is left of it:
    "zero", "subnormal" (with its relative error), "normal". One row stands for `num_uses` calls from the same line, or
    parameters of the optimizer.
    """

    place: Literal["op", "optimizer"]
    module: str
    type: str
    name: str
    value: float
    op: str | None = None
    source: SourceLine | None = None
    dtype: FloatFormat | None = None
    rounded: float | None = None
    rel_err: float | None = None
    effect: Effect | None = None
    num_uses: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run as the report keeps it; `modules` are in the order in which the calls returned."""

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
    """The replay under autocast and its fp32 reference, with rows for the same calls where both reached them."""

    autocast: RunSummary
    fp32: RunSummary

    @property
    def are_one(self) -> bool:
        """True if the step itself computes in fp32 throughout, so that its reference shows the same."""
        made, again = ([row.outputs for row in run.modules] for run in (self.autocast, self.fp32))
        return self.autocast.dtype == FP32 and made == again


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceExcerpt:
    """The source around the expression to look at.

    `path` is the file's, relative to the working directory of the replay if it is inside. `function` is the qualified
    name of the enclosing function or class, "" at module level. `first` is the line number of the first of `lines`,
    in which tabs are expanded to spaces. The expression spans from `column` of `line` to `end_column` of `end_line`, in
    characters from 0; if these are unknown it is the whole `line`.
    """

    file: str
    path: str
    function: str
    first: int
    lines: tuple[str, ...]
    line: int
    end_line: int
    column: int | None
    end_column: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One replayed dump. Fields that only a deeper diagnosis fills are None or empty until it has run.

    `arguments` replay it again on the command line; they are empty if the model or a function was passed as an object.
    `search_notes` say why the search found no fix, or what it left untried. `fp32_error` is the error of fp32's finite
    output against float64's, as a share of the largest magnitude in the worst sample; None if at most 0.1, or unknown.
    `difference` says what sets the samples to blame apart in the batch, "" if nothing does at sight.
    """

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
    growth: tuple[Growth, ...] = ()
    bad_gradients: tuple[TensorStats, ...] = ()
    fixes: tuple[Fix, ...] = ()
    search_notes: tuple[str, ...] = ()
    fp32_error: float | None = None
    counterfactuals: tuple[Counterfactual, ...] = ()
    fp32_sets: Fp32SetSearch | None = None
    eps_audit: tuple[EpsUse, ...] = ()
    difference: str = ""
    excerpt: SourceExcerpt | None = None
    arguments: tuple[str, ...] = ()
