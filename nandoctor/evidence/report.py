"""The report: everything a renderer may look at, and the JSON contract `nandoctor.report/2`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from nandoctor.evidence.dump_summary import DumpSummary, Environment
from nandoctor.evidence.edits import ChangedFile, Edit, FixCost
from nandoctor.evidence.exhibits import Excerpt, SampleView
from nandoctor.evidence.formats import Effect, FloatFormat
from nandoctor.evidence.serialization import INLINED
from nandoctor.evidence.trace import Grid, Place, SourceLine, TensorStats
from nandoctor.evidence.verdicts import Verdict

SCHEMA = "nandoctor.report/2"
STABLE_FORM = "stable_form"
"""The name of the evidence that tells what to write by hand for code in two functions that no diff joins."""

Grade = Literal["exact", "same-mask", "elsewhere", "finite", "no-reference"]
ChangeKind = Literal["source", "snippet", "setting", "data", "state", "advice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAttempt:
    """One replay under autocast: its mode, its seed (None: the saved random state), and its grade."""

    training: bool
    seed: int | None
    grade: Grade


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """How well the replay agrees with the output that the dump saved.

    `exact`: equal in every bit (all NaNs count as one). `same-mask`: the same elements are non-finite; `max_rel_err`
    is the largest difference of the others over the largest saved magnitude. `elsewhere`: other elements are. `finite`:
    the replay is finite. `no-reference`: nothing to compare with. The last of `attempts` is reported.
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
    """How many elements of a tensor are non-finite, and which.

    `num_bad` of the `numel` elements are, of the `kinds` "nan", "+inf" and "-inf"; `first_index` is the first of them
    in row-major order, None where unknown. `samples` are indexes into the batch, the first 64; None where dimension 0
    is not known to be the batch's.
    """

    kinds: tuple[str, ...]
    num_bad: int
    numel: int
    first_index: tuple[int, ...] | None
    samples: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNonfinite:
    """The first place where a non-finite value came to light.

    `where` tells what it was: a module's own `output`; a value made `between` modules, in the forward that `module`
    names, and first seen as an input of the call `seen_in`; the `batch`; or the `loss`. `inputs` are what the module
    call took, `value` is the non-finite one.
    """

    run: str
    phase: Literal["forward", "loss", "input"]
    place: Place = field(metadata=INLINED)
    where: Literal["output", "between", "batch", "loss"]
    seen_in: Place | None
    elements: NonfiniteElements = field(metadata=INLINED)
    inputs: tuple[TensorStats, ...]
    value: TensorStats
    would_be: float | None
    state: tuple[TensorStats, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The operation, the state or the array that the damage comes from.

    It stands in the module whose forward called the op, or that owns the state. `op` is the aten name, None where none
    is to blame; `nth` counts its calls from that forward, from 0; `function` is the custom Function in whose backward
    it ran. `would_be` is the worst element from the same inputs in float64, None where it is not finite there either.
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
    grid: Grid | None = None
    function: str | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number that speaks for a cause, and the sentence it belongs to."""

    name: str
    value: float | int | str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The case in words, as `Cause` has it."""

    explanation: str
    evidence: tuple[Evidence, ...]
    headline: str = ""
    source: SourceLine | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Account):
    """Why it happened: a code of the published list, and the case in words.

    `headline` says it in one sentence without a full stop, code of the user's in backticks; "" where only the
    `explanation` tells. `source` is the expression that the sentence is about where that is not the origin's own, and
    `remark` what may stand beside it.
    """

    code: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """An origin and its cause; the report's `also` lists those beside the first."""

    origin: Origin
    cause: Cause | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One step of the way from the origin to the symptom."""

    place: Place = field(metadata=INLINED)
    op: str
    event: Literal["created", "propagated", "absorbed"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One module call in one run, aligned with the other run.

    `headroom_bits` is log2(max / absmax) of the outputs against the low-precision format of the replay; negative when
    the format cannot hold the value. `rel_err` compares the sampled output elements with the fp32 run's:
    norm of the difference over norm of the reference; None where either has no finite sample. `inherited_err` is the
    same for the inputs: what is far above it was made in this call.
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
        """Tell whether every output tensor is finite."""
        return all(stats.finite for stats in self.outputs)

    @property
    def absmax(self) -> float | None:
        """Largest finite magnitude over the outputs, None without one."""
        return max((s.absmax for s in self.outputs if s.absmax is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """A module call whose fp32 output comes within a factor of two of the low-precision format's limit, or passes it.

    `headroom_bits` is log2(max / absmax), negative past the limit; `growth` is the output's absmax over the inputs'.
    """

    place: Place = field(metadata=INLINED)
    absmax: float
    headroom_bits: float
    growth: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """What a changed run gave; `max_rel_err` is its largest difference from fp32 over fp32's largest magnitude.

    It is that of the worst sample, of output and loss where fp32 is finite; None where the run is not finite there.
    `ran` is False where the step could not be run with the change.
    """

    finite: bool
    max_rel_err: float | None
    ran: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One criterion of a fix, met or not checked, and the sentence that says so; `samples` is None for all of them."""

    name: str
    status: Literal["passed", "failed", "not-checked"]
    text: str
    samples: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FixSettings:
    """What a fix sets in the training loop; None is left alone."""

    amp_dtype: Literal["bfloat16"] | None = None
    loss_scale: float | None = None
    optimizer_eps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """A change that was tried on the failing step.

    `patch` is what was run, by `kind`: "source", a diff for `git apply -p1` in `patch_root`; "snippet" and "state",
    Python with `model` in scope, run before the step; "data", Python with `batch`, a dict of tensors. A "setting" has
    `settings` instead, and "advice" cannot be run. `verified`: every check that was made was passed. `edit` is what the
    search changed in the run. The smallest change that holds has `rank` 0. `cost` is None where nothing is widened.
    `files` are those that a diff changes, with their whole texts; a saved report has the diff alone.
    """

    kind: ChangeKind
    edit: Edit
    title: str
    patch: str
    patch_root: str | None = None
    files: tuple[ChangedFile, ...] = field(default=(), repr=False, compare=False)
    settings: FixSettings | None = None
    verified: bool
    checks: tuple[Check, ...] = ()
    outcome: TrialOutcome
    cost: FixCost | None = None
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """What one run of the step had in place of its own; None is as the step had it.

    `dtype` is the format of autocast, fp32 and fp64 without autocast; `only` and `without` select samples of the batch.
    """

    dtype: FloatFormat | None = None
    training: bool | None = None
    only: tuple[int, ...] | None = None
    without: tuple[int, ...] | None = None
    loss_scale: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterfactual:
    """The failing step with another setting: `group` is what was varied, `setting` holds the value that it took."""

    group: Literal["precision", "mode", "samples", "loss-scale", "seed"]
    setting: StepSetting
    outcome: TrialOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Module:
    """A module kept in fp32; with `children` False only the ops of its own forward, its submodules left out."""

    module: str
    children: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Set:
    """A set of modules that, kept in fp32, makes the step pass: every member was left out once, and it failed again."""

    modules: tuple[Fp32Module, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32SetSearch:
    """The search for the smallest sets of modules to keep in fp32; the sets have no member in common."""

    sets: tuple[Fp32Set, ...]
    num_modules: int
    num_probes: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpsUse:
    """A small constant as it was really used.

    `name` is the attribute of the module, the argument of the op, or the optimizer's eps; an argument of "1 - max"
    stands for a clamp just below one. `op` is the op that used it, or that will, by torch's own layer. `dtype` is the
    format that it was used in, None where no op was seen to; `rounded` is what it becomes there. `effect` tells what
    is left of it: "zero", "subnormal" (with its relative error), "normal". `absorbed_share` is the share, 0 to 1, of
    the elements that it was added to and that it did not change; None where it was not added, or not seen.
    `bound_share` is that of the elements which a clamp to it replaced. `num_uses` calls from the same line, or
    parameters of the optimizer, or modules alike, are this one row; `module` is the first.
    """

    place: Literal["module", "op", "optimizer"]
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
    absorbed_share: float | None = None
    bound_share: float | None = None
    num_uses: int = 1


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
    """The replay under autocast and its fp32 reference, row by row the same calls where both reached them.

    `first_unholdable` is the first call whose fp32 output the low-precision format cannot hold.
    """

    autocast: RunSummary
    fp32: RunSummary
    first_unholdable: Place | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One replayed dump. Fields that only a deeper diagnosis fills are None or empty until it ran.

    `arguments` replay it again on the command line; empty where the model or a function was given as an object.
    `search_notes` tell why the search has found no fix, or what it left untried. `fp32_error` is what the finite output
    in fp32 is off float64's by, as a share of the largest magnitude in the worst sample; None up to 0.1, or not asked.
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
    bad_gradients: tuple[TensorStats, ...] = ()
    fixes: tuple[Fix, ...] = ()
    search_notes: tuple[str, ...] = ()
    fp32_error: float | None = None
    counterfactuals: tuple[Counterfactual, ...] = ()
    fp32_sets: Fp32SetSearch | None = None
    headroom: tuple[NearMiss, ...] = ()
    eps_audit: tuple[EpsUse, ...] = ()
    sample: SampleView | None = None
    excerpt: Excerpt | None = None
    arguments: tuple[str, ...] = ()
