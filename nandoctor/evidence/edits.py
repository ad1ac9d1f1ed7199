"""Edits: changes to a run as plain data, most of which the engine can apply and undo; and the printed changes."""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, dataclass_transform

from nandoctor.evidence.codec import OPEN_UNIONS
from nandoctor.evidence.trace import SourceLine

if TYPE_CHECKING:
    from nandoctor.changes.running_op import RunningOp
    from nandoctor.changes.source_writer import SourceWriter
    from nandoctor.evidence.report import FixSettings

T = TypeVar("T", bound="SingleEdit")


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


class SingleEdit:
    """One change of a run; its kinds are the records of `nandoctor.changes`, each in the file of its kind.

    `size` ranks a change among others that work: 1 is a number in the code. `why` says why it is written as it is.
    A change `is_text_alone` if no run can make it but that of its text; it `only_widens` if it keeps code in fp32. It
    `is_inner` if it changes an argument and leaves the rest of the expression.
    """

    __slots__ = ()
    kind: str
    size: ClassVar[int] = 1
    why: ClassVar[str] = ""
    is_text_alone: ClassVar[bool] = False
    only_widens: ClassVar[bool] = False
    is_inner: ClassVar[bool] = False

    @property
    def title(self) -> str:
        """The change in one short sentence."""
        raise NotImplementedError

    @property
    def sites(self) -> tuple[OpSite, ...]:
        """The places in the code that the change is made at."""
        site = getattr(self, "site", None)
        return (site,) if site is not None else ()

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the op's domain that the change keeps its argument off."""
        return ()

    @property
    def bound(self) -> float | None:
        """The largest exponent that the change allows, None if it bounds none."""
        return None

    @property
    def replaces(self) -> str:
        """What the change replaces although the formula gives it, "" if it is to leave all such values."""
        return ""

    def run(self, op: RunningOp) -> Any:
        """Run an op of one of the sites as it is with the change."""
        return op.run()

    def works_in_place(self, *, has_out: bool) -> bool:
        """Return True if an op that writes to an argument still writes to it with the change; `has_out`: by `out=`."""
        return False

    def write(self, source: SourceWriter) -> None:
        """Make the change in the source. Raises CannotWriteError if no text is known that does the same."""
        raise NotImplementedError

    def write_beside(self, source: SourceWriter) -> None:
        """Change what stands beside, after all changes are written."""

    def snippet(self, model: Any) -> Snippet | None:
        """Return lines that do the same with `model` or `batch` in scope; None if there are none."""
        return None

    def set_in(self, settings: FixSettings) -> FixSettings | None:
        """Return the training loop's settings with this change; None if it is no setting."""
        return None


KINDS: dict[str, type[SingleEdit]] = {}
"""The kinds of changes that are known, by their tags."""
OPEN_UNIONS[SingleEdit] = KINDS


@dataclass_transform(frozen_default=True, kw_only_default=True)
def kind_of_change(record: type[T]) -> type[T]:
    """Make a class a kind of change: a frozen record with its tag as `kind`, which reports are read with."""
    made = dataclass(frozen=True, slots=True, kw_only=True)(record)
    (tag,) = (item.default for item in fields(cast(Any, made)) if item.name == "kind")
    KINDS[str(tag)] = made
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Several edits at once."""

    kind: Literal["together"] = "together"
    edits: tuple[SingleEdit, ...]


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

    def diff(self, num_lines: int = 3) -> str:
        """Return a unified diff, paths below `root`, with so many unchanged lines around; `git apply` needs one."""
        names = [Path(os.path.normpath(file.path)).relative_to(self.root).as_posix() for file in self.files]
        pairs = zip(self.files, names, strict=True)
        return "".join(unified_diff(file, f"a/{name}", f"b/{name}", num_lines) for file, name in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """Python to run with `model` in scope before the step."""

    kind: Literal["snippet", "state"]
    text: str


PrintedChange = SourcePatch | Snippet
Change = Edit | PrintedChange
"""An edit of the search, or a printed change."""


def flatten(changes: Iterable[Change]) -> tuple[SingleEdit, ...]:
    """Return the single edits among changes."""
    edits = (change for change in changes if not isinstance(change, SourcePatch | Snippet))
    return tuple(single for edit in edits for single in (edit.edits if isinstance(edit, Together) else (edit,)))


def only_widens(edit: Edit) -> bool:
    """Return True if an edit only keeps code in fp32."""
    return all(single.only_widens for single in flatten((edit,)))


def is_text_alone(edit: Edit) -> bool:
    """Return True if an edit can only be tried as text, because the engine cannot apply it."""
    return any(single.is_text_alone for single in flatten((edit,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FixCost:
    """What a fix moves from low precision to fp32, as shares of the step's forward.

    `products_in_fp32` counts multiply-adds, which tensor cores do in low precision; `more_activations` the additional
    bytes of its ops' results.
    """

    products_in_fp32: float
    more_activations: float


def unified_diff(file: ChangedFile, before: str, after: str, num_lines: int = 3) -> str:
    """Return the diff of a file under these names."""
    old, new = (io.StringIO(text, newline="\n").readlines() for text in (file.before, file.after))
    lines = difflib.unified_diff(old, new, before, after, n=num_lines)
    # https://www.gnu.org/software/diffutils/manual/html_node/Incomplete-Lines.html
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
