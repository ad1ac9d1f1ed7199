"""The plot of a report: what every layer's values span, against what the format can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nandoctor.evidence.report import Report


def draw(report: Report) -> Figure:
    """Return the plot; matplotlib is imported only for it.

    Raises:
        NanDoctorError: the report lacks the numbers that it shows.
    """
    from nandoctor.views.plots.ranges import draw_ranges  # noqa: PLC0415  (imports matplotlib)

    return draw_ranges(report)
