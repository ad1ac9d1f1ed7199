"""The facade: `load` a dump, `replay` it, look at the `Case`.

In: paths, models and options, as a notebook has them. Out: a `Case` around a report.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from nandoctor.diagnosis.eps_audit import fold
from nandoctor.diagnosis.run_summary import tabulate
from nandoctor.dumps.dump import Dump
from nandoctor.dumps.reader import read_dump
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.formats import FORMATS
from nandoctor.evidence.report import Cause, EpsUse, FirstNonfinite, Fix, Origin, Report
from nandoctor.evidence.report_diff import Comparison
from nandoctor.keywords import takes_options
from nandoctor.pipeline import audit_dump, replay_dump
from nandoctor.renderers.save import save_report
from nandoctor.replaying.model_loading import build_model
from nandoctor.replaying.module_constants import list_constants
from nandoctor.replaying.progress import Progress
from nandoctor.replaying.settings import (
    MEANINGS,
    ReplayOptions,
    Settings,
    StepOptions,
    anchor,
    anchored,
    command_arguments,
    override,
    read_settings,
)
from nandoctor.replaying.setup import ModelSource
from nandoctor.repro_scripts.build import make_script

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure


def load(path: str | os.PathLike[str], *, trust: bool = False) -> Dump:
    """Read a dump file, without running any code from it.

    `trust` allows what only unpickling can build, and with it any code the file's author put there.

    Raises:
        DumpError: the file is missing, broken, unsafe, or no dump.
    """
    return read_dump(path, trust=trust)


@takes_options(ReplayOptions, meanings=MEANINGS)
def replay(
    dump: Dump | str | os.PathLike[str],
    model: ModelSource | None = None,
    *,
    progress: Progress = lambda *_: None,
    **options: Unpack[ReplayOptions],
) -> Case:
    """Replay a dump under autocast and in fp32, and search for fixes.

    `model` is a Module (copied, never written to), a class or function that builds one, or a SPEC. What is left out, or
    None, is taken from the project's `[tool.nandoctor]`, else found out.

    Args:
        dump: a path, or what `load` gives.
        model: what builds the model.
        **options: the settings.
        progress: told (stage, module calls done, calls in all or None).

    Raises:
        NanDoctorError: the dump, the model, the call or an option is wrong; the message says what to do.
    """
    dump, settings = _read(dump, options)
    report = replay_dump(dump, anchor(model), settings, progress=progress).report
    given = {"model": model, **options}
    return Case(dataclasses.replace(report, arguments=command_arguments(dump.path, given)))


@takes_options(StepOptions)
def repro(
    dump: Dump | str | os.PathLike[str],
    model: ModelSource | None = None,
    *,
    progress: Progress = lambda *_: None,
    **options: Unpack[StepOptions],
) -> str:
    """Write a standalone script with the smallest tensors that still fail as the dump does, and a case that passes.

    Arguments are those of `replay`.

    Raises:
        NanDoctorError: the dump, the model, the call or an option is wrong, or nothing can be shown without the
            project's own code.
    """
    dump, settings = _read(dump, options)
    found = replay_dump(dump, anchor(model), override(settings, {"fixes": False}), progress=progress)
    return make_script(found.report, found.step, dump.state)


@takes_options(StepOptions)
def list_eps(
    dump: Dump | str | os.PathLike[str] | None = None,
    model: ModelSource | None = None,
    *,
    progress: Progress = lambda *_: None,
    **options: Unpack[StepOptions],
) -> tuple[EpsUse, ...]:
    """List every eps of a model; with a dump, every small constant of its step, and what each was really used in.

    Arguments are those of `replay`. Without a dump only `model` and `model_args` matter: nothing is run.

    Raises:
        NanDoctorError: the dump, the model, the call or an option is wrong; the message says what to do.
    """
    if dump is None:
        settings = override(read_settings(Path.cwd()), _given(options))
        source = anchor(model) if model is not None else settings.model
        if source is None:
            raise NanDoctorError("There is no model to look at.", remedy="Name what builds it: --model file.py:attr.")
        return fold(list_constants(build_model(source, settings.model_args, directory=settings.directory)))
    dump, settings = _read(dump, options)
    return audit_dump(dump, anchor(model), settings, progress=progress)


def _read(dump: Dump | str | os.PathLike[str], options: Mapping[str, Any]) -> tuple[Dump, Settings]:
    """The dump, and how to replay it."""
    dump = dump if isinstance(dump, Dump) else read_dump(dump)
    return dump, override(read_settings(dump.path), _given(options))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not left out, SPECs among them made absolute."""
    return anchored({name: value for name, value in options.items() if value is not None})


def describe(tensor: torch.Tensor) -> str:
    """A tensor in one line: "fp16 [4, 8], -3.2 to 14.8, NaN in 8 of 32 (sample 2)"; it may live on any device."""
    from nandoctor.renderers.tensors import describe_tensor
    from nandoctor.tracing.tensor_stats import collect, measure

    reading = measure(tensor, counts_for=FORMATS["float16"])
    if reading is None:
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}: no floating-point values"
    return describe_tensor(collect([("", reading)])[0])


class Case:
    """A replayed dump: the report, and ways to look at it."""

    def __init__(self, report: Report) -> None:
        self.report = report
        if "IPython" in sys.modules:
            from nandoctor.renderers.notebook import show_records

            show_records()

    @property
    def verdict(self) -> str:
        """One word for what kind of failure this is."""
        return self.report.verdict

    @property
    def first_nonfinite(self) -> FirstNonfinite | None:
        """The first place where a non-finite value came to light, None where there is none."""
        return self.report.first_nonfinite

    @property
    def origin(self) -> Origin | None:
        """The operation, the state or the array that the damage comes from, None where that is not known."""
        return self.report.origin

    @property
    def cause(self) -> Cause | None:
        """Why it happened, None where no rule can tell."""
        return self.report.cause

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """The changes that were tried on the failing step, verified ones first."""
        return self.report.fixes

    def table(self) -> Any:
        """One row per module call, both runs side by side: a pandas DataFrame, or a list of dicts without pandas."""
        rows = tabulate(self.report.runs)
        try:
            import pandas as pd
        except ImportError:
            return rows
        return pd.DataFrame(rows)

    def plot(self, kind: str = "ranges") -> Figure:
        """One of the plots: "ranges", "exponents", "divergence", "samples", "origin".

        Raises:
            NanDoctorError: there is no such kind, or only a replay with `per_sample=True` has the numbers for it.
        """
        from nandoctor.renderers.plots.kinds import draw

        return draw(self.report, kind)

    def compare(self, other: Case) -> Comparison:
        """What changed from this case to the other one: verdict, origin, headroom, ranges."""
        from nandoctor.diagnosis.compare_reports import compare

        return compare(self.report, other.report)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page (.html), Markdown (.md), the report (.json) or the ranges plot (.png, .svg, .pdf)."""
        save_report(self.report, Path(path))

    def __repr__(self) -> str:
        return f"Case({self.report.verdict}: {self.report.headline})"

    def _repr_html_(self) -> str:
        from nandoctor.renderers.notebook_card import report_html

        return report_html(self.report)
