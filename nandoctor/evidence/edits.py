"""Edits: changes to a run as plain data, most of which the engine makes and undoes; and what is printed of them."""

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
    """Where an op stands in the code, as a person finds it: every `op` of the line `source` in `type`'s forward.

    The line is shared by all modules of one class; `module`, the dotted path ("" the root, "<loss>" the loss function),
    is the one that it was seen in. Without a `source` the op is the `nth` of its name in each call of `module`. An `op`
    of "" stands for all ops of the line; otherwise it is the aten name.
    """

    module: str
    type: str
    op: str
    nth: int = 0
    source: SourceLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepModule:
    """Run a module in fp32, autocast off: its inputs are widened, its output stays fp32.

    With `children` False only the ops of its own forward are; its children run under autocast as before.
    """

    kind: Literal["keep-module"] = "keep-module"
    module: str
    children: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOp:
    """Run an op, or a line, in fp32, autocast off: inputs are widened, outputs stay fp32. In-place ops stay."""

    kind: Literal["keep-op"] = "keep-op"
    site: OpSite


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAttribute:
    """Give an attribute another number in every module of a class where it `was` this one: `norm.eps = 1e-5`."""

    kind: Literal["set-attribute"] = "set-attribute"
    type: str
    name: str
    was: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SetArgument:
    """Give an op another number as its argument, named as in the op's schema: the 1e-8 of `x + 1e-8`.

    Only where it `was` the number that is to be replaced. A `value` of None stands for the lowest number of the op's
    own format, `torch.finfo(x.dtype).min`.
    """

    kind: Literal["set-argument"] = "set-argument"
    site: OpSite
    argument: str
    was: float
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFlag:
    """Give an op True for an argument that is False by default: `zero_infinity` of a CTC loss."""

    kind: Literal["set-flag"] = "set-flag"
    site: OpSite
    argument: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampArgument:
    """Clamp a tensor before an op takes it, to [low, high]; None leaves that side open.

    With `keeps_sign` only what is nearer to zero than `low` becomes `low`. With `nan` it is NaN that is replaced, by
    `fill`: in the argument, or what an op makes of arguments without one. An `argument` of "" stands for what the op
    returns.
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
    """Run an op on `safe` where its argument is not between `low` and `high`, and take 0 for its result there.

    Both ends are left out; where neither is given it is zero that is. A NaN stays one. The argument
    is made safe inside and selected outside, so that no gradient passes the point; why one of the two is not enough:
    https://docs.jax.dev/en/latest/faq.html#gradients-contain-nan-where-using-where.
    """

    kind: Literal["guard"] = "guard"
    site: OpSite
    argument: str
    safe: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFirst:
    """Scale before a product instead of after it: `product` takes its first tensor times `factor`, `scale` is left out.

    `scale` is the multiplication or division by a number that followed.
    """

    kind: Literal["scale-first"] = "scale-first"
    product: OpSite
    scale: OpSite
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmaskRows:
    """Let a softmax or attention op attend evenly in rows where every key is masked, and give zeros as their result."""

    kind: Literal["unmask-rows"] = "unmask-rows"
    site: OpSite


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLog:
    """Write the logarithm or the quotient at a site without the exponential or the probability that it is taken of.

    log(softmax) is log_softmax, log(sum(exp)) logsumexp, exp / sum(exp) softmax. The engine cannot make it of a run: it
    is tried as text. With `everywhere` all logarithms of the function are written so. At an exponential it stands for
    subtracting the largest exponent, which the shares in a sum do not change with.
    """

    kind: Literal["stable-log"] = "stable-log"
    site: OpSite
    everywhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UseFormat:
    """Run everything under another format: bf16 has the range of fp32, fp32 and fp64 switch autocast off."""

    kind: Literal["use-format"] = "use-format"
    format: FloatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLossScale:
    """Multiply the loss by another number before the backward pass."""

    kind: Literal["loss-scale"] = "loss-scale"
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetBuffers:
    """Give buffers the values of a fresh model: running means 0, running variances 1, whatever else is non-finite 0."""

    kind: Literal["reset-buffers"] = "reset-buffers"
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroWeights:
    """Set the elements of weights to zero that are not finite."""

    kind: Literal["zero-weights"] = "zero-weights"
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSamples:
    """Run with these samples of the batch alone, along dimension 0 of every array that has it."""

    kind: Literal["keep-samples"] = "keep-samples"
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FillMasked:
    """Put 0 into an array of the batch wherever another one, its mask, is 0: it is multiplied away there anyway."""

    kind: Literal["fill-masked"] = "fill-masked"
    array: str
    mask: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOptimizerEps:
    """Give the optimizer another eps."""

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
    """One file: its absolute path, and the whole text before and after, with the line endings that the file has."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePatch:
    """New text for one or more files below `root`, the folder that `git apply -p1` is to be run in."""

    root: str
    files: tuple[ChangedFile, ...]

    @property
    def diff(self) -> str:
        """The patch as a unified diff with paths below `root`."""
        return "".join(_unified_diff(file, Path(self.root)) for file in self.files)

    @property
    def undone(self) -> SourcePatch:
        """The patch that takes this one back."""
        files = (ChangedFile(path=file.path, before=file.after, after=file.before) for file in self.files)
        return SourcePatch(root=self.root, files=tuple(files))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """Python that is run with `model` in scope before the step, or with `batch` where the kind is "data".

    `takes_samples` tells that the batch has fewer samples after it. `source` is the change of code that has no file,
    as a notebook's has none, where the snippet makes one: it gives the functions the code that they have in that text.
    """

    kind: Literal["snippet", "state", "data"]
    text: str
    takes_samples: bool = False
    source: SourcePatch | None = None


PrintedChange = SourcePatch | Snippet
Change = Edit | PrintedChange
"""An edit of the search, or a change as it is printed."""


def flatten(changes: Iterable[Change]) -> tuple[SingleEdit, ...]:
    """The edits among changes, one by one."""
    edits = (change for change in changes if not isinstance(change, SourcePatch | Snippet))
    return tuple(single for edit in edits for single in (edit.edits if isinstance(edit, Together) else (edit,)))


def only_widens(edit: Edit) -> bool:
    """Tell whether a change does nothing but to keep code in fp32."""
    return all(isinstance(single, KeepModule | KeepOp) for single in flatten((edit,)))


def is_text_alone(edit: Edit) -> bool:
    """Tell whether a change can be tried as text alone: the engine makes none of these."""
    kinds = StableLog | ResetBuffers | ZeroWeights | FillMasked
    return any(isinstance(single, kinds) for single in flatten((edit,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FixCost:
    """What a fix moves from low precision to fp32, as shares of the step's forward.

    `products_in_fp32` counts multiply-adds, which tensor cores do in low precision; `more_activations` the bytes that
    its ops' results take more.
    """

    products_in_fp32: float
    more_activations: float


def _unified_diff(file: ChangedFile, root: Path) -> str:
    name = Path(os.path.normpath(file.path)).relative_to(root).as_posix()
    old, new = (io.StringIO(text, newline="\n").readlines() for text in (file.before, file.after))
    lines = difflib.unified_diff(old, new, fromfile=f"a/{name}", tofile=f"b/{name}")
    # https://www.gnu.org/software/diffutils/manual/html_node/Incomplete-Lines.html
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
