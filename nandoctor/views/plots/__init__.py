"""Plots of a report, one file per kind, and their kinds in one table: title and content.

The module named like the kind draws it; matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from nandoctor.errors import NanDoctorError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nandoctor.evidence.report import Report

PLOTS: Mapping[str, tuple[str, str]] = {
    "ranges": ("Ranges of every layer", "what every layer's values span, against what the format can hold"),
    "origin": ("Where in the tensor", "which elements of the tensor are the first non-finite ones"),
}
"""By kind the heading on the page, and what the plot shows."""


def draw(report: Report, kind: str) -> Figure:
    """Return the plot of this kind.

    Raises:
        NanDoctorError: there is no such kind, or the report lacks the numbers that it shows.
    """
    if kind not in PLOTS:
        raise NanDoctorError(f"There is no plot {kind!r}.", remedy=f"The kinds are: {', '.join(PLOTS)}.")
    module = import_module(f"nandoctor.views.plots.{kind}")
    figure: Figure = getattr(module, f"draw_{kind}")(report)
    return figure
