"""The plot of the ranges."""

import itertools
from dataclasses import replace

import factory
import matplotlib
import pytest
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.text import Text

from nandoctor.errors import NanDoctorError
from nandoctor.evidence.formats import FP16, FP32
from nandoctor.evidence.report import Runs
from nandoctor.views.layers import every_layer, select_layers
from nandoctor.views.ranges import MAX_NAMES, draw_ranges


def texts(axes):
    return [text.get_text() for text in axes.texts]


def names(axes):
    return [label.get_text() for label in axes.get_xticklabels()]


def marks(axes, marker_name):
    found = [c for c in axes.collections if isinstance(c, PathCollection) and c.get_label() == marker_name]
    return [x for collection in found for x, _ in collection.get_offsets()]


def bars(axes):
    drawn = [one for one in axes.collections if isinstance(one, PolyCollection)]
    return [(path.vertices[0][1], path.vertices[1][1]) for one in drawn for path in one.get_paths()]


def report_on(*pairs, **changes):
    autocast = [factory.row(f"layer{i}", "Linear", a, depth=1) for i, (a, _) in enumerate(pairs)]
    fp32 = [factory.row(f"layer{i}", "Linear", b, depth=1) for i, (_, b) in enumerate(pairs)]
    runs = Runs(autocast=factory.run(autocast, dtype=FP16), fp32=factory.run(fp32, dtype=FP32))
    return factory.report(runs, **changes)


def test_bands_are_those_of_the_format_and_both_runs_are_marked():
    figure = draw_ranges(factory.numerics())
    (axes,) = figure.axes
    assert marks(axes, "non-finite, fp32") == list(range(9, 20))
    assert "fp16 overflow\n> 65,504" in texts(axes)
    assert "subnormal\n< 6.1e-5" in texts(axes)
    assert "zero\n< 2.98e-8" in texts(axes)
    edges = {round(edge, 12) for patch in axes.patches for edge in (patch.get_y(), patch.get_y() + patch.get_height())}
    assert {65504.0, round(2.0**-14, 12), round(2.0**-25, 12)} <= edges


@pytest.mark.parametrize(("count", "named"), [(None, {"fp32"}), (5, {"fp32 throughout", "as your code runs it"})])
def test_a_step_in_fp32_is_drawn_once_if_all_of_it_is(count, named):
    made = factory.numerics()
    own = replace(made.runs.fp32, policy="none", modules=made.runs.fp32.modules[:count])
    report = replace(made, runs=replace(made.runs, autocast=own))
    told = [text.get_text() for text in draw_ranges(report).legends[0].get_texts()]
    assert {text for text in told if "non-finite" not in text} == named
    assert [column.heading for column in every_layer(report).columns].count("fp32") == 1


def test_the_first_nonfinite_layer_and_those_after_it_are_marked():
    (axes,) = draw_ranges(factory.precision()).axes
    assert marks(axes, "non-finite, fp16 autocast") == list(range(9, 20))
    assert "first non-finite: encoder.blocks.2.attention" in texts(axes)
    assert [9, 9] in [list(line.get_xdata()) for line in axes.lines]
    bold = [label.get_text() for label in axes.get_xticklabels() if label.get_weight() == "bold"]
    assert bold == ["encoder.blocks.2.attention"]


FLAT = [(factory.tensor(1.0 + i), factory.tensor(1.0 + i, dtype=FP32)) for i in range(300)]


@pytest.mark.parametrize(
    "make", [lambda: factory.precision(400, nonfinite_from=250), lambda: report_on(*FLAT)], ids=["blocks", "flat"]
)
def test_of_many_layers_as_many_are_named_as_have_room(make):
    report = make()
    figure = draw_ranges(report)
    figure.canvas.draw()
    (axes,) = figure.axes
    assert len(bars(axes)) == 2 * len(select_layers(report).pairs)
    assert 30 <= len(names(axes)) <= MAX_NAMES
    first = report.first_nonfinite
    assert first is None or first.place.label in names(axes)
    boxes = sorted((label.get_window_extent().x0, label.get_window_extent().x1) for label in axes.get_xticklabels())
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(boxes))


def test_a_long_headline_and_long_names_leave_room_for_the_panel():
    made = factory.precision()
    name = "stage." * 60
    rows = tuple(factory.put(row, module=name) if not row.finite else row for row in made.runs.autocast.modules)
    runs = replace(made.runs, autocast=replace(made.runs.autocast, modules=rows))
    seen = factory.put(made.first_nonfinite, module=name)
    figure = draw_ranges(replace(made, headline="word " * 900, runs=runs, first_nonfinite=seen))
    figure.canvas.draw()
    panel = figure.axes[0].get_window_extent()
    assert panel.width > 0.6 * figure.bbox.width
    assert panel.height > 0.3 * figure.bbox.height


def test_the_users_style_is_neither_used_nor_changed():
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "black", "figure.dpi": 17}):
        before = dict(matplotlib.rcParams)
        figure = draw_ranges(factory.healthy(3))
        assert dict(matplotlib.rcParams) == before
    assert figure.axes[0].get_facecolor() == (1, 1, 1, 1)
    assert not figure.axes[0].get_xticklabels()[0].get_usetex()


def title(figure):
    return " ".join(figure.get_suptitle().split())


def test_nothing_was_run():
    with pytest.raises(NanDoctorError):
        draw_ranges(factory.weights_only())


def test_a_run_without_autocast_is_told_as_such():
    made = factory.fixable()
    plain = replace(made, runs=replace(made.runs, autocast=replace(made.runs.autocast, policy="none")))
    written = [text.get_text() for text in draw_ranges(plain).findobj(Text)]
    told = [text for text in written if "autocast" in text]
    assert all("without autocast" in text for text in told)
    assert told
