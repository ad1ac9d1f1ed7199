"""The facade: `load` a dump, `replay` it, look at the `Case`."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from nandoctor.diagnosis.run_summary import tabulate
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.reader import read_dump
from nandoctor.engine.progress import Listener, Progress, listener_of
from nandoctor.errors import DumpError
from nandoctor.evidence.report import NOTHING_FOUND, Cause, FirstNonfinite, Fix, Origin, Report
from nandoctor.evidence.verification import Verification
from nandoctor.pipeline import add_fixes, replay_dump
from nandoctor.repro_scripts.build import make_script
from nandoctor.source_files import find_typed
from nandoctor.step.model_loading import ModelSource
from nandoctor.step.settings import ReplayOptions, Settings, StepOptions, anchor, settings_for
from nandoctor.step.weights import take_weights
from nandoctor.text import brief, in_python
from nandoctor.verification import Changed, Query, tell_if_changed, verify_dump
from nandoctor.views.fixes import command_arguments
from nandoctor.views.report import report_document
from nandoctor.views.save import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def load(path: str | os.PathLike[str]) -> Dump:
    """Read a dump file, without running any code from it.

    Args:
        path: a file that `torch.save` or a `Recorder` wrote.

    Returns:
        The file's content, on the CPU: `state` (weights and buffers by name), `arrays` (tensors of one dimension or
        more), `scalars` (numbers and texts), `recorded` (what a recorder noted of the step), `missing` and `notes`.

    Raises:
        DumpError: the file is missing, broken, unsafe, or no dump.
    """
    if not isinstance(path, str | os.PathLike):
        raise DumpError(
            f"A dump cannot be of type {brief(type(path).__name__)}.",
            remedy="Pass the path of the file, or what nandoctor.load returned for it.",
        )
    return read_dump(path)


def replay(
    dump: Dump | str | os.PathLike[str],
    model: ModelSource | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[ReplayOptions],
) -> Case:
    """Replay a dump under autocast and in fp32, and search for fixes.

    An option that is left out, or None, is read from the project's `[tool.nandoctor]`, else from the dump, else found
    out.

    Args:
        dump: a path, or what `load` returns.
        model: a Module (copied, never written to), a class or function that builds one, or the SPEC of such:
            "package.module:attr" or "file.py:attr".
        **options: the settings, such as `loss` and `amp_dtype`; `nandoctor.step.settings.Settings` has them all.
        progress: called with (stage, module calls done, module calls in all or None). Left out, a notebook that has
            ipywidgets shows a bar, and an interrupt of the search for fixes gives the report with those found.

    Returns:
        The report, and ways to look at it.

    Raises:
        NanDoctorError: the dump, the model, the call or an option is wrong; the message says what to do.
    """
    shown: AbstractContextManager[Listener] = nullcontext(listener_of(progress or Listener()))
    if progress is None and "IPython" in sys.modules:
        from nandoctor.views.progress import ReplayDisplay

        shown = ReplayDisplay().shown()
    with shown as listener:
        dump, settings = _read(dump, model, options)
        found = replay_dump(dump, settings, progress=listener)
        arguments = _command_arguments(dump, {"model": model, **options})
        found = dataclasses.replace(found, report=dataclasses.replace(found.report, arguments=arguments))
        if found.report.verdict == "not-reproduced":
            found = tell_if_changed(found, dump, settings)
        listener.tell(found.report)
        return Case(add_fixes(found, settings))


def _command_arguments(dump: Dump, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a person types to replay the dump; () if only this notebook has the model's or the loss's code."""
    used = {"model": dump.recorded.model, "loss": dump.recorded.loss_function}
    own = [place for name, place in used.items() if place is not None and given.get(name) is None]
    if any(not place.file and find_typed(place.module, place.name) is not None for place in own):
        return ()
    return command_arguments(dump.path, given)


def verify(
    dump: Dump | str | os.PathLike[str],
    model: ModelSource | None = None,
    *,
    changed: bool | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    progress: Progress = lambda *_: None,
    **options: Unpack[StepOptions],
) -> Verification:
    """Check whether the step of a dump, which failed, passes under the current code.

    The other arguments are those of `replay` but `fixes`, `max_trials` and `time`.

    Args:
        changed: files that have changed since the failure, or True for "the code has", where the dump cannot tell.

    Returns:
        The answer: `outcome` ("fixed", "passes", "still-fails" or "cannot-tell"), `headline`, `reasons`, `checks`,
        `cause` and `origin` of a step that still fails, and `exit_code` (0, 1 or 125).

    Raises:
        NanDoctorError: the dump, the model, the call or an option is wrong; the message says what to do.
    """
    changed = [changed] if isinstance(changed, str | os.PathLike) else changed
    files = changed if isinstance(changed, bool) else [Path(file) for file in changed]
    return check(dump, changed=files, progress=progress, model=model, **options)[0]


def check(
    dump: Dump | str | os.PathLike[str],
    *,
    changed: Changed = (),
    proved: bool = False,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> tuple[Verification, Report]:
    """Return the verification of a dump and the report of its replay; `options` are those of `replay`, plus `model`."""
    dump, settings = _read(dump, options.pop("model", None), options)
    return verify_dump(Query(dump=dump, settings=settings, changed=changed, proved=proved), progress=progress)


def repro(
    dump: Dump | str | os.PathLike[str],
    model: ModelSource | None = None,
    *,
    progress: Progress = lambda *_: None,
    **options: Unpack[StepOptions],
) -> str:
    """Write a standalone script with the smallest tensors that still fail as the dump does.

    The arguments are those of `replay` but `fixes`, `max_trials` and `time`.

    Returns:
        The text of the script, which imports torch alone.

    Raises:
        NanDoctorError: the dump, the model, the call or an option is wrong, or no operation makes the failure, or it is
            the project's own code.
    """
    dump, settings = _read(dump, model, options)
    found = replay_dump(dump, settings, progress=progress)
    return make_script(found.report, found.step)


def _read(
    dump: Dump | str | os.PathLike[str], model: ModelSource | None, options: Mapping[str, Any]
) -> tuple[Dump, Settings]:
    """Return the dump, and the settings to replay it with."""
    dump = dump if isinstance(dump, Dump) else load(dump)
    settings = settings_for(dump.path, options)
    if model is not None:
        settings = dataclasses.replace(settings, model=anchor(model))
    return take_weights(dump, settings), settings


class Case:
    """A replayed dump: its `report`, and ways to look at it. A notebook shows it as a card."""

    def __init__(self, report: Report) -> None:
        self.report = report

    @property
    def verdict(self) -> str:
        """The kind of failure: precision, numerics, state, input, loss-scale, silent, healthy, not-reproduced, ..."""
        return self.report.verdict

    @property
    def finite(self) -> bool:
        """True if output, loss and gradients are finite and right, and none of them was left unseen."""
        return self.report.verdict in NOTHING_FOUND - {"cannot-tell"}

    @property
    def first_nonfinite(self) -> FirstNonfinite | None:
        """The first place where a non-finite value came to light; None where there is none."""
        return self.report.first_nonfinite

    @property
    def origin(self) -> Origin | None:
        """The operation, weight or array that the non-finite values come from; None where that is not known."""
        return self.report.origin

    @property
    def cause(self) -> Cause | None:
        """Why it happened; None where no rule can tell."""
        return self.report.cause

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """The changes that were tried on the failing step, verified ones first."""
        return self.report.fixes

    def table(self) -> Any:
        """Return one row per module call, with both runs: a pandas DataFrame, or a list of dicts without pandas."""
        rows = tabulate(self.report.runs)
        try:
            import pandas as pd
        except ImportError:
            return rows
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """Draw the ranges of every layer with matplotlib.

        Raises:
            NanDoctorError: the report lacks the numbers that it shows.
        """
        from nandoctor.views.ranges import draw_ranges

        return draw_ranges(self.report)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file.

        Args:
            path: its ending says what is written: a page (.html), Markdown (.md), the report as data (.json) or the
                ranges plot (.png, .svg, .pdf).

        Raises:
            NanDoctorError: the ending is another one, or the file cannot be written.
        """
        save(self.report, Path(path))

    def __repr__(self) -> str:
        return f"Case({self.report.verdict}: {in_python(self.report.headline)})"

    def _repr_html_(self) -> str:
        from nandoctor.views.html import card_of

        return card_of(report_document(self.report))
