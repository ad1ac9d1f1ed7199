"""The plots beside the ranges: samples and origin."""

from __future__ import annotations

from dataclasses import replace

import factory
import pytest
from matplotlib.text import Text

from nandoctor.errors import NanDoctorError
from nandoctor.views.plots.figures import save_figure
from nandoctor.views.plots.kinds import PLOTS, draw


def title(figure):
    return " ".join(figure.get_suptitle().split())


def surveyed(num_layers=20, **options):
    made = factory.fixable() if num_layers == 20 else factory.precision(num_layers, **options)
    return replace(made, runs=factory.surveyed(made.runs))


@pytest.mark.parametrize("kind", PLOTS)
def test_nothing_was_run(kind):
    with pytest.raises(NanDoctorError):
        draw(factory.weights_only(), kind)


def test_an_unknown_kind_is_refused():
    with pytest.raises(NanDoctorError, match="no plot 'pie'") as caught:
        draw(factory.healthy(), "pie")
    assert "ranges, samples, origin" in caught.value.remedy


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [(("NaN.pth",), "nandoctor plot NaN.pth --kind samples"), ((), "nandoctor.replay(..., per_sample=True)")],
)
def test_what_only_a_per_sample_counts_asks_for_one(arguments, remedy):
    with pytest.raises(NanDoctorError) as caught:
        draw(replace(factory.healthy(), arguments=arguments), "samples")
    assert caught.value.remedy == f"Count them: {remedy}"


def test_samples_tell_who_is_nonfinite_and_who_is_near():
    finding = title(draw(surveyed(), "samples"))
    assert finding.startswith(f"{surveyed().headline}. Non-finite from encoder.blocks.2.attention on: sample 2")
    near = factory.report(factory.surveyed(factory.network(12, growth=2.3)))
    assert "No sample goes non-finite under fp16 autocast; " in title(draw(near, "samples"))
    assert "near the limit" in title(draw(near, "samples"))


def test_the_origin_is_shown_where_it_is():
    made = factory.fixable()
    named = replace(made.origin, dimensions=("sample", "channel", "height", ""))
    figure = draw(replace(made, origin=named), "origin")
    assert (figure.axes[0].get_ylabel(), figure.axes[0].get_xlabel()) == ("height", "dimension 3")
    assert "of sample, channel, height, ?; summed over sample and channel" in figure.legends[0].get_title().get_text()
    assert title(figure) == f"{factory.fixable().headline}. div in encoder.blocks.2.attention: NaN in 288 of 65,536."
    image = figure.axes[0].images[0].get_array()
    assert image[11, 5] == 8
    assert image.mask[0, 0]


@pytest.mark.parametrize("kind", PLOTS)
def test_hostile_names_are_drawn_as_they_are(kind, tmp_path):
    hostile = "$\\frac{$x^\x1b\n_{<b>"
    made = surveyed()
    rows = tuple(factory.put(row, module=hostile) if not row.finite else row for row in made.runs.autocast.modules[:11])
    made = replace(
        made,
        headline=hostile,
        runs=replace(made.runs, autocast=replace(made.runs.autocast, modules=rows)),
        origin=factory.put(made.origin, module=hostile, op=hostile),
        dump=factory.dump(path=hostile),
    )
    save_figure(draw(made, kind), tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert len(text) > 5000
    assert "\x1b" not in text
    assert "<b>" not in text


@pytest.mark.parametrize("kind", ["ranges", "samples"])
def test_a_run_without_autocast_is_told_as_such(kind):
    made = surveyed()
    plain = replace(made, runs=replace(made.runs, autocast=replace(made.runs.autocast, policy="none")))
    written = [text.get_text() for text in draw(plain, kind).findobj(Text)]
    told = [text for text in written if "autocast" in text]
    assert all("without autocast" in text for text in told)
    assert told
