"""Edits: changes to a run as plain data, most of which the engine can apply and undo; and the printed changes."""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.trace import SourceLine


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSite:
    """The place of an op in the code, as a person finds it: every `op` on the line `source` of `type`'s forward.

    All modules of a class share the line; `module` is the dotted path of the one that it was seen in ("" the root,
    "<loss>" the loss function). Without a `source`, the op is the `nth` of its name in each call of `module`. `op` is
    the aten name; "" stands for all ops of the line.
    """

    module: str
    type: str
    op: str
    nth: int = 0
    source: SourceLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepModule:
    """Run a module in fp32 with autocast off: its inputs are widened, its output stays fp32.

    With `children` False only the ops of its own forward run so; its children run under autocast as before.
    """

    kind: Literal["keep-module"] = "keep-module"
    module: str
    children: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOp:
    """Run an op, or a line, in fp32 with autocast off: inputs are widened, outputs stay fp32. Not for in-place ops."""

    kind: Literal["keep-op"] = "keep-op"
    site: OpSite


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAttribute:
    """Set an attribute from what it `was` to `value` in every module of a class: `norm.eps = 1e-5`."""

    kind: Literal["set-attribute"] = "set-attribute"
    type: str
    name: str
    was: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SetArgument:
    """Replace a number among an op's arguments, named as in the op's schema: the 1e-8 of `x + 1e-8`.

    Only an argument that `was` this number is replaced. A `value` of None stands for the lowest number of the op's
    format, `torch.finfo(x.dtype).min`.
    """

    kind: Literal["set-argument"] = "set-argument"
    site: OpSite
    argument: str
    was: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFlag:
    """Pass True for an op's argument that is False by default: `zero_infinity` of a CTC loss."""

    kind: Literal["set-flag"] = "set-flag"
    site: OpSite
    argument: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampArgument:
    """Clamp an op's tensor argument to [low, high]; None leaves that side open.

    An `argument` of "" stands for the op's result. With `keeps_sign`, only values nearer to zero than `low` become
    `low`. With `nan`, `fill` replaces NaN in the argument, or in a result of arguments without NaN.
    """

    kind: Literal["clamp"] = "clamp"
    site: OpSite
    argument: str
    low: float | None = None
    high: float | None = None
    nan: bool = False
    fill: float = 0.0
    keeps_sign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardArgument:
    """Run an op on `safe` where its argument is not strictly between `low` and `high`; use `fill` as its result there.

    If neither bound is given, zeros are replaced. NaN is kept. The argument is made safe before the op and the result
    selected after it, so that no gradient passes through the point; why either one alone is not enough:
    https://docs.jax.dev/en/latest/faq.html#gradients-contain-nan-where-using-where.
    """

    kind: Literal["guard"] = "guard"
    site: OpSite
    argument: str
    safe: float
    low: float | None = None
    high: float | None = None
    fill: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFirst:
    """Scale before a product instead of after it: `product` gets its first tensor times `factor`, `scale` is removed.

    `scale` is the multiplication or division by a number that followed.
    """

    kind: Literal["scale-first"] = "scale-first"
    product: OpSite
    scale: OpSite
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmaskRows:
    """Let a softmax or attention op attend evenly in rows where every key is masked, and return zeros for them."""

    kind: Literal["unmask-rows"] = "unmask-rows"
    site: OpSite


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLog:
    """Rewrite a logarithm or quotient at a site without its exponential or probability.

    log(softmax) becomes log_softmax, log(sum(exp)) logsumexp, exp / sum(exp) softmax. The engine cannot apply it to a
    run, so it is tried as text. With `everywhere`, all logarithms of the function are rewritten. At an exponential it
    subtracts the largest exponent, which leaves the shares in a sum unchanged.
    """

    kind: Literal["stable-log"] = "stable-log"
    site: OpSite
    everywhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UseFormat:
    """Run everything in another format: bf16 has the range of fp32; fp32 and fp64 switch autocast off."""

    kind: Literal["use-format"] = "use-format"
    format: FloatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLossScale:
    """Multiply the loss by another number before the backward pass."""

    kind: Literal["loss-scale"] = "loss-scale"
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetBuffers:
    """Reset buffers as in a fresh model: running means to 0, running variances to 1, other non-finite values to 0."""

    kind: Literal["reset-buffers"] = "reset-buffers"
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroWeights:
    """Set the non-finite elements of weights to zero."""

    kind: Literal["zero-weights"] = "zero-weights"
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSamples:
    """Run with only these samples of the batch, along dimension 0 of every array that has it."""

    kind: Literal["keep-samples"] = "keep-samples"
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FillMasked:
    """Set an array of the batch to 0 where its `mask`, another array, is 0: it is multiplied by 0 there anyway."""

    kind: Literal["fill-masked"] = "fill-masked"
    array: str
    mask: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOptimizerEps:
    """Set the optimizer's eps."""

    kind: Literal["optimizer-eps"] = "optimizer-eps"
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Several edits at once."""

    kind: Literal["together"] = "together"
    edits: tuple[SingleEdit, ...]


SingleEdit = (
    KeepModule
    | KeepOp
    | SetAttribute
    | SetArgument
    | SetFlag
    | ClampArgument
    | GuardArgument
    | ScaleFirst
    | UnmaskRows
    | StableLog
    | UseFormat
    | SetLossScale
    | ResetBuffers
    | ZeroWeights
    | KeepSamples
    | FillMasked
    | SetOptimizerEps
)
Edit = SingleEdit | Together


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """One file: its absolute path, and the whole text before and after, with the file's own line endings."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePatch:
    """New text for one or more files below `root`, the folder to run `git apply -p1` in."""

    root: str
    files: tuple[ChangedFile, ...]

    @property
    def diff(self) -> str:
        """The patch as a unified diff with paths below `root`."""
        return "".join(_unified_diff(file, Path(self.root)) for file in self.files)

    @property
    def undone(self) -> SourcePatch:
        """The patch that reverts this one."""
        files = (ChangedFile(path=file.path, before=file.after, after=file.before) for file in self.files)
        return SourcePatch(root=self.root, files=tuple(files))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """Python to run with `model` in scope before the step, or with `batch` if the kind is "data".

    `takes_samples` is True if it removes samples from the batch. `source` is the change that the snippet makes to code
    without a file, such as a notebook's: it gives the functions their code from that text.
    """

    kind: Literal["snippet", "state", "data"]
    text: str
    takes_samples: bool = False
    source: SourcePatch | None = None


PrintedChange = SourcePatch | Snippet
Change = Edit | PrintedChange
"""An edit of the search, or a printed change."""


def flatten(changes: Iterable[Change]) -> tuple[SingleEdit, ...]:
    """Return the single edits among changes."""
    edits = (change for change in changes if not isinstance(change, SourcePatch | Snippet))
    return tuple(single for edit in edits for single in (edit.edits if isinstance(edit, Together) else (edit,)))


def only_widens(edit: Edit) -> bool:
    """Return True if an edit only keeps code in fp32."""
    return all(isinstance(single, KeepModule | KeepOp) for single in flatten((edit,)))


def is_text_alone(edit: Edit) -> bool:
    """Return True if an edit can only be tried as text, because the engine cannot apply it."""
    kinds = StableLog | ResetBuffers | ZeroWeights | FillMasked
    return any(isinstance(single, kinds) for single in flatten((edit,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FixCost:
    """What a fix moves from low precision to fp32, as shares of the step's forward.

    `products_in_fp32` counts multiply-adds, which tensor cores do in low precision; `more_activations` the additional
    bytes of its ops' results.
    """

    products_in_fp32: float
    more_activations: float


def _unified_diff(file: ChangedFile, root: Path) -> str:
    name = Path(os.path.normpath(file.path)).relative_to(root).as_posix()
    old, new = (io.StringIO(text, newline="\n").readlines() for text in (file.before, file.after))
    lines = difflib.unified_diff(old, new, fromfile=f"a/{name}", tofile=f"b/{name}")
    # https://www.gnu.org/software/diffutils/manual/html_node/Incomplete-Lines.html
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
