"""The plots by their names.

In: a `Report` and a kind. Out: a matplotlib figure.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import Report
from nandoctor.renderers.plots.divergence import draw_divergence
from nandoctor.renderers.plots.exponents import draw_exponents
from nandoctor.renderers.plots.figures import draw_ranges
from nandoctor.renderers.plots.origin_map import draw_origin
from nandoctor.renderers.plots.samples import draw_samples

PLOTS = {
    "ranges": draw_ranges,
    "exponents": draw_exponents,
    "divergence": draw_divergence,
    "samples": draw_samples,
    "origin": draw_origin,
}


def draw(report: Report, kind: str) -> Figure:
    """The plot of this kind.

    Raises:
        NanDoctorError: there is no such kind, or the report does not hold what it shows.
    """
    if kind not in PLOTS:
        raise NanDoctorError(f"There is no plot {kind!r}.", remedy=f"The kinds are: {', '.join(PLOTS)}.")
    return PLOTS[kind](report)
