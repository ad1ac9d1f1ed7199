"""The first affected sample: which arrays can be looked at, and how the page shows them."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace

import factory
import pytest
import torch

from nandoctor.evidence.codec import from_plain, to_plain
from nandoctor.replaying.saved_arrays import view_sample
from nandoctor.views.plots.affected_sample import caption, view_html

NAN = math.nan


def view(array, sample=0, name="x"):
    return view_sample({name: array}, sample)


def test_an_image_is_small_grey_and_stretched():
    image = torch.zeros(3, 3, 100, 200)
    image[1, :, :50] = 7.0
    shown = view_sample({"mask": torch.zeros(3, 5), "image": image}, 1)
    assert (shown.name, shown.sample, shown.height, shown.width) == ("image", 1, 64, 64)
    pixels = base64.b64decode(shown.pixels)
    assert len(pixels) == 64 * 64
    assert (pixels[0], pixels[-1]) == (255, 0)
    assert (shown.low, shown.high, shown.num_bad) == (0.0, 7.0, 0)
    assert "data:image/png;base64," in view_html(shown)


@pytest.mark.parametrize(
    ("array", "sample"),
    [
        (torch.randn(2, 8), 0),  # a few features
        (torch.randn(2, 16, 64), 0),  # embeddings
        (torch.randn(2, 16, 32, 32), 0),
        (torch.randn(2, 3, 4, 4), 0),
        (torch.randn(2, 3, 9, 9), 2),
        (torch.ones(2, 64), 0),  # a mask
        (torch.ones(2, 64, dtype=torch.bool), 0),
        (torch.arange(64), 0),  # labels, one for each sample
        (torch.randn(2, 64, dtype=torch.complex64), 0),
        (torch.randn(()), 0),
    ],
)
def test_what_is_not_to_be_looked_at_is_left_out(array, sample):
    assert view(array, sample) is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (torch.zeros(1, 1, 8, 8), ", every value 0"),
        (torch.full((1, 1, 8, 8), NAN), ", every value non-finite"),
        (torch.full((1, 3, 8, 8), 0.25), ", every value 0.25"),
    ],
)
def test_a_flat_image_is_a_sentence(values, text):
    shown = view(values)
    assert caption(shown) == text
    assert view_html(shown) == ""


def test_an_image_with_holes_is_drawn_and_counted():
    image = torch.rand(1, 1, 8, 8)
    image[0, 0, 3, :2] = NAN
    shown = view(image)
    assert ", 2 are non-finite;" in caption(shown)
    assert view_html(shown)


def test_a_waveform_keeps_the_peaks_of_its_pieces():
    wave = torch.zeros(2, 16_000)
    wave[1, 777], wave[1, 9_000] = 5.0, -3.0
    shown = view(wave, 1)
    assert (shown.dim, shown.length, shown.num_channels, len(shown.lows[0])) == (1, 16_000, 1, 256)
    assert (max(shown.highs[0]), min(shown.lows[0])) == (5.0, -3.0)
    assert caption(shown) == ", 1 channel over the 16,000 places of dimension 1, -3 to 5"


@pytest.mark.parametrize("shape", [(2, 3, 100), (2, 100, 3)], ids=["channels first", "channels last"])
def test_a_signal_goes_along_its_longer_dimension(shape):
    series = torch.randn(shape)
    holed = series[1] if shape[1] == 3 else series[1].T
    holed[2, 40] = math.inf
    shown = view(series, 1)
    assert (shown.dim, shown.length, shown.num_channels) == (shape.index(100), 100, 3)
    assert [limits.index(None) if None in limits else None for limits in shown.lows] == [None, None, 40]
    assert shown.lows[0] == pytest.approx((series[1] if shape[1] == 3 else series[1].T)[0].double().tolist())
    assert caption(shown).endswith(", in parts non-finite")


def test_samples_of_audio_in_whole_numbers_are_a_signal():
    audio = torch.randint(-30_000, 30_000, (2, 400), dtype=torch.int16)
    assert view(audio).kind == "signal"
    assert view(-audio.abs().long() - 1).kind == "signal"


def test_ids_come_before_the_mask_and_are_cut():
    batch = {"attention_mask": torch.ones(2, 400, dtype=torch.long), "input_ids": torch.arange(800).reshape(2, 400)}
    shown = view_sample(batch, 1)
    assert (shown.kind, shown.name, shown.length, len(shown.ids), shown.ids[0]) == ("ids", "input_ids", 400, 256, 400)
    assert caption(shown) == ", 400 ids (the first 256 shown)"
    assert "400 401 402" in view_html(shown)


@pytest.mark.parametrize("array", [torch.rand(2, 1, 8, 8), torch.rand(2, 50), torch.arange(8).reshape(2, 4)])
def test_each_kind_is_on_the_page_and_in_the_file(array):
    shown = view(array, 1, name="<b>name")
    report = replace(factory.fixable(), sample=shown)
    assert from_plain(type(report), json.loads(json.dumps(to_plain(report)))).sample == shown
    page = factory.sketch_of(report)
    assert "Sample 1 of <code>&lt;b&gt;name</code>" in page
    assert "<b>name" not in page
