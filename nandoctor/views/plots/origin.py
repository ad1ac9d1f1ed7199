"""The origin plot: where in the tensor the non-finite elements are."""

from __future__ import annotations

from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.report import Origin, Report
from nandoctor.evidence.trace import Grid
from nandoctor.text import brief, join_words
from nandoctor.views.evidence import describe_origin, describe_shape
from nandoctor.views.plots.figures import NONFINITE_COLOR, new_figure, write_finding, write_legend

_COUNTS = LinearSegmentedColormap.from_list("counts", ["#FBE3D5", NONFINITE_COLOR, "#7A3300"])
_HEIGHT_IN, _LINE_HEIGHT_IN = 4.6, 1.9
_NAME_WIDTH = 48
_MAX_ASPECT_RATIO = 3.0
"""A map with a larger aspect ratio is stretched to be visible."""


def draw_origin(report: Report) -> Figure:
    """Draw the number of non-finite elements over two dimensions of the origin's tensor.

    Raises:
        NanDoctorError: the report has no origin, or not the places of the non-finite elements in its tensor.
    """
    origin = report.origin
    if origin is None or (grid := origin.grid) is None:
        raise NanDoctorError(
            f"The report on {report.dump.path} does not say where in a tensor the first non-finite values are.",
            remedy="That is known only if an operation or a saved array is to blame; `nandoctor replay` names it.",
        )
    with matplotlib.style.context("default"):
        figure = new_figure(_LINE_HEIGHT_IN if len(grid.dims) == 1 else _HEIGHT_IN)
        _draw_map(figure.subplots(), grid)
        write_finding(figure, report, f"Origin: {describe_origin(origin)}.")
        drawn = sorted({count for row in grid.counts for count in row if count})
        told = sorted({drawn[0], drawn[len(drawn) // 2], drawn[-1]})
        legend = [Patch(color=_COUNTS(count / drawn[-1]), label=f"{count:,} non-finite per cell") for count in told]
        write_legend(figure, legend, _describe_source(report, origin, grid))
    return figure


def _draw_map(axes: Axes, grid: Grid) -> None:
    counts = np.array(grid.counts, dtype=np.float64)
    height, width = (1, *grid.sizes) if len(grid.sizes) == 1 else grid.sizes
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    axes.imshow(
        np.ma.masked_equal(counts, 0),
        cmap=_COUNTS,
        vmin=0,
        vmax=counts.max(),
        extent=extent,
        interpolation="nearest",
        aspect="equal" if 1 / _MAX_ASPECT_RATIO < width / height < _MAX_ASPECT_RATIO else "auto",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))  # also for a dimension of one
    axes.tick_params(labelsize=8)
    axes.set_xlabel(f"dimension {grid.dims[-1]}", size=9)
    if len(grid.dims) > 1:
        axes.set_ylabel(f"dimension {grid.dims[0]}", size=9)
    else:
        axes.set_yticks([])


def _describe_source(report: Report, origin: Origin, grid: Grid) -> str:
    source = brief(Path(report.dump.path).name, _NAME_WIDTH)
    assert origin.output is not None  # a grid is one of its elements
    summed = join_words([f"dimension {dim}" for dim in range(len(origin.output.shape)) if dim not in grid.dims])
    tensor = describe_shape(origin.output)
    return f"{source}: non-finite elements of {tensor}{f'; summed over {summed}' if summed else ''}"
