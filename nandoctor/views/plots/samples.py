"""The samples plot: which samples of the batch are non-finite, or near the limit, in which layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from nandoctor.diagnosis.run_summary import NEAR_BITS
from nandoctor.errors import NanDoctorError
from nandoctor.evidence.formats import FloatFormat
from nandoctor.evidence.report import LayerRow, Report
from nandoctor.evidence.trace import SampleStats, describe_run
from nandoctor.text import samples_text
from nandoctor.views.commands import command_for
from nandoctor.views.layers import Layers, select_layers
from nandoctor.views.plots.figures import NONFINITE_COLOR, ORANGE, SKY, draw_by_layer

MAX_SAMPLES = 64
ROOM_BITS = 4.0

_BLANK, _FINITE, _ROOM, _CLOSE, _NEAR, _NONFINITE = range(6)
_CLASSES = (
    ("not counted by sample", "#FFFFFF"),
    ("finite", "#F0F0F0"),
    (f"more than {ROOM_BITS:.0f} doublings below the limit", "#D3EAF8"),
    (f"{NEAR_BITS:.0f} to {ROOM_BITS:.0f} doublings below it", SKY),
    ("less than one doubling below it", ORANGE),
    ("non-finite", NONFINITE_COLOR),
)
"""Label and colour of each class."""


def draw_samples(report: Report) -> Figure:
    """Draw samples by layers.

    The distance of a finite sample from the limit needs per-sample statistics. Layers without the batch as dimension 0
    are left blank.

    Raises:
        NanDoctorError: no layer has a batch, or no layer was counted.
    """
    layers = select_layers(report)
    num_samples = _find_batch(layers)
    if report.runs is None or num_samples is None:
        command = command_for("plot", report, "--kind samples") or "nandoctor.replay(..., per_sample=True)"
        raise NanDoctorError(
            f"The report on {report.dump.path} has no per-sample counts.", remedy=f"Count them: {command}"
        )
    low = report.runs.autocast.dtype
    under = describe_run(report.runs.autocast.policy, low)
    columns = [_classify(pair.autocast, num_samples, low) for pair in layers.pairs]
    if layers.first_nonfinite is not None and layers.elements is not None:
        for sample in set(layers.elements.samples or ()) & set(range(num_samples)):
            columns[layers.first_nonfinite][sample] = _NONFINITE
    image = np.array(columns).T
    cut = f", the first {MAX_SAMPLES} samples" if num_samples == MAX_SAMPLES else ""
    return draw_by_layer(
        report,
        lambda axes, _: _draw_panel(axes, image),
        finding=_write_finding(layers, image, under),
        what=f"{under}{cut}",
    )


def _find_batch(layers: Layers) -> int | None:
    """Return the number of samples, the most frequent size of counted outputs."""
    sizes = Counter(
        min(stats.shape[0], MAX_SAMPLES)
        for pair in layers.pairs
        for stats in (pair.autocast.outputs if pair.autocast else ())
        if stats.counts is not None and stats.counts.by_sample
    )
    return max(sizes, key=sizes.__getitem__, default=None)


def _classify(row: LayerRow | None, num_samples: int, low: FloatFormat) -> list[int]:
    """Return one class per sample, the worst over the outputs."""
    classes = [_BLANK] * num_samples
    for stats in row.outputs if row is not None else ():
        if len(stats.shape) < 2 or min(stats.shape[0], MAX_SAMPLES) != num_samples:
            continue
        counted = stats.counts.by_sample if stats.counts is not None else ()
        found = [_class_of(sample, low) for sample in counted] or [_FINITE if stats.finite else _BLANK] * num_samples
        classes = [max(pair) for pair in zip(classes, found, strict=True)]
    return classes


def _class_of(sample: SampleStats, low: FloatFormat) -> int:
    if sample.num_bad:
        return _NONFINITE
    room = low.headroom_bits(sample.absmax or 0.0)
    return _NEAR if room <= NEAR_BITS else _CLOSE if room <= ROOM_BITS else _ROOM


def _write_finding(layers: Layers, image: NDArray[np.int64], under: str) -> str:
    """Return which samples go non-finite and where, and which come near the limit."""
    nonfinite_places = image == _NONFINITE
    nonfinite = np.flatnonzero(nonfinite_places.any(axis=1)).tolist()
    near = np.flatnonzero((image == _NEAR).any(axis=1) & ~nonfinite_places.any(axis=1)).tolist()
    close = f"; near the limit: {samples_text(near, len(image))}" if near else ""
    if not nonfinite and layers.first_nonfinite is not None:
        return f"Which samples are non-finite was not counted{close}."
    if not nonfinite:
        return f"No sample goes non-finite {under}{close}."
    start = layers.pairs[int(np.argmax(nonfinite_places.any(axis=0)))].label
    return f"Non-finite from {start} on: {samples_text(nonfinite, len(image))}{close}."


def _draw_panel(axes: Axes, image: NDArray[np.int64]) -> Sequence[Artist]:
    axes.imshow(
        image,
        aspect="auto",
        extent=(-0.5, image.shape[1] - 0.5, image.shape[0] - 0.5, -0.5),
        cmap=ListedColormap([color for _, color in _CLASSES]),
        vmin=-0.5,
        vmax=len(_CLASSES) - 0.5,
        interpolation="nearest",
    )
    axes.set_ylabel("sample")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))
    named = [_CLASSES[kind] for kind in sorted(set(image.flat))]
    return [Patch(facecolor=color, edgecolor="#999999", linewidth=0.5, label=name) for name, color in named]
