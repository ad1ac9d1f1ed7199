"""The plots beside the ranges: which kinds there are, and the origin."""

from dataclasses import replace

import factory
import pytest
from matplotlib.text import Text

from nandoctor.errors import NanDoctorError
from nandoctor.views.plots.kinds import PLOTS, draw


def title(figure):
    return " ".join(figure.get_suptitle().split())


@pytest.mark.parametrize("kind", PLOTS)
def test_nothing_was_run(kind):
    with pytest.raises(NanDoctorError):
        draw(factory.weights_only(), kind)


def test_an_unknown_kind_is_refused():
    with pytest.raises(NanDoctorError, match="no plot 'pie'") as caught:
        draw(factory.healthy(), "pie")
    assert "ranges, origin" in caught.value.remedy


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


def test_a_run_without_autocast_is_told_as_such():
    made = factory.fixable()
    plain = replace(made, runs=replace(made.runs, autocast=replace(made.runs.autocast, policy="none")))
    written = [text.get_text() for text in draw(plain, "ranges").findobj(Text)]
    told = [text for text in written if "autocast" in text]
    assert all("without autocast" in text for text in told)
    assert told
