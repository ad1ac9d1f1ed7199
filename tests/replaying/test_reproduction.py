"""How a replayed output is compared with the saved one: which tensor, which grade, which numbers."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import Pair, Prediction
from torch import nn

import nandoctor
from nandoctor.errors import DumpError
from nandoctor.replaying.reproduction import grade
from nandoctor.replaying.saved_arrays import saved_outputs

NAN, INF = math.nan, math.inf
SAVED = torch.tensor([[1.0, NAN], [INF, -4.0]])


def grade_of(replayed, saved=SAVED, name="logit", key=None):
    return grade((name, saved), replayed, key)


@pytest.mark.parametrize(
    ("replayed", "expected"),
    [
        (SAVED.tolist(), "exact"),
        ([[1.5, NAN], [INF, -4.0]], "same-mask"),
        ([[1.0, INF], [INF, -4.0]], "same-mask"),
        ([[1.0, NAN], [-INF, -4.0]], "same-mask"),
        ([[NAN, NAN], [INF, -4.0]], "elsewhere"),
        ([[1.0, 2.0], [INF, -4.0]], "elsewhere"),
        ([[1.0, 2.0], [3.0, -4.0]], "finite"),
    ],
)
def test_grades_of_a_nonfinite_saved_output(replayed, expected):
    assert grade_of(torch.tensor(replayed)).grade == expected


@pytest.mark.parametrize(
    ("replayed", "expected"), [([1.0, 2.0], "exact"), ([1.0, 2.5], "same-mask"), ([1.0, NAN], "elsewhere")]
)
def test_grades_of_a_finite_saved_output(replayed, expected):
    assert grade_of(torch.tensor(replayed), torch.tensor([1.0, 2.0])).grade == expected


def test_nans_of_any_bits_are_one():
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert grade_of(bits.flip(0), bits).grade == "exact"


def test_the_error_is_of_finite_elements_over_the_largest():
    reproduction = grade_of(torch.tensor([[1.5, NAN], [INF, -4.0]]))
    assert reproduction.max_rel_err == pytest.approx(0.5 / 4)
    assert (reproduction.num_bad_saved, reproduction.num_bad_replayed, reproduction.numel) == (2, 2, 4)
    assert reproduction.output == "logit"


def test_complex_numbers_are_compared_part_by_part():
    saved = torch.complex(torch.tensor([3.0, 1.0]), torch.tensor([4.0, NAN]))
    assert grade_of(saved, saved).grade == "exact"
    reproduction = grade_of(saved + 1j, saved)
    assert (reproduction.grade, reproduction.max_rel_err) == ("same-mask", 0.25)


def test_there_is_no_error_where_nothing_is_finite():
    assert grade_of(torch.full((3,), NAN), torch.full((3,), NAN)).max_rel_err is None


def test_the_error_of_a_saved_output_of_zeros_is_absolute():
    assert grade_of(torch.tensor([0.25, 0.0]), torch.zeros(2)).max_rel_err == 0.25


def test_the_replay_is_rounded_to_what_was_saved():
    assert grade_of(torch.tensor([0.1, NAN]), torch.tensor([0.1, NAN]).half()).grade == "exact"


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2), (1, 2, 2, 1)])
def test_dimensions_of_one_do_not_count(shape):
    assert grade_of(SAVED.reshape(shape)).grade == "exact"


def other(tensor):
    """A tensor of the same shape with other values."""
    return torch.zeros_like(tensor)


@pytest.mark.parametrize(
    "output",
    [
        {"logit": SAVED, "aux": other(SAVED)},
        {"aux": other(SAVED), "logits": SAVED},
        {"heads": {"logit": SAVED, "aux": other(SAVED)}},
        Prediction(SAVED, [other(SAVED)]),
        (other(SAVED)[0], SAVED),
        Pair(other(SAVED)[:1], SAVED),
        [SAVED, torch.nested.nested_tensor([SAVED], layout=torch.jagged)],
        (other(SAVED)[:, None], SAVED),
    ],
    ids=[
        "dict",
        "plural",
        "nested dict",
        "dataclass",
        "tuple by shape",
        "named tuple by shape",
        "beside a nested one",
        "beside one with another dimension",
    ],
)
def test_the_counterpart_is_found_by_name_then_by_shape(output):
    assert grade_of(output).grade == "exact"


@pytest.mark.parametrize(
    "output",
    [None, 3, {"logit": SAVED[:1]}, (SAVED, SAVED), {}],
    ids=["nothing", "a number", "another shape", "two of that shape", "empty"],
)
def test_without_one_counterpart_there_is_no_reference(output):
    reproduction = grade_of(output)
    assert (reproduction.grade, reproduction.output, reproduction.numel) == ("no-reference", "logit", None)


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("logit.1", (other(SAVED), SAVED)),
        ("heads.1", {"heads": (other(SAVED), SAVED), "aux": (SAVED * 2, SAVED * 2)}),
        ("out.0.1", [[other(SAVED), SAVED], other(SAVED)]),
    ],
)
def test_one_of_several_of_a_shape_is_found_by_its_place(name, output):
    assert grade_of(output, name=name).grade == "exact"


class Observed(nn.Module):
    """In training it observes the range of its activations, as layers for quantization do, and refuses NaN."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 3e4))

    def forward(self, x):
        scores = torch.mm(x * self.scale, x.mT)
        x = (scores - scores).mean(1)
        if self.training:
            assert not x.isnan().any(), "NaN in the observed range"
        return x


def test_a_mode_that_raises_has_not_made_the_saved_output(tmp_path):
    x = torch.full((4, 4), 2.0)
    saved = {"state_dict": Observed().state_dict(), "x": x, "logit": torch.full((4,), torch.nan)}
    torch.save(saved, tmp_path / "dump.pth")
    report = nandoctor.replay(tmp_path / "dump.pth", Observed, fixes=False).report
    assert report.reproduction.grade == "exact"
    assert [attempt.training for attempt in report.reproduction.attempts] == [True, False]
    assert any("shows the precision" in note for note in report.notes)


def test_the_field_that_the_user_names_is_the_counterpart():
    output = {"main": other(SAVED), "refined": SAVED}
    assert grade_of(output).grade == "no-reference"
    assert grade_of(output, key="refined").grade == "exact"


@pytest.mark.parametrize(
    ("names", "key", "expected"),
    [
        (["image", "logit"], None, ["logit"]),
        (["logits", "aux_logits", "image"], None, ["logits", "aux_logits"]),
        (["logits", "aux_logits"], "aux_logits", ["aux_logits", "logits"]),
        (["image", "thing"], "thing", ["thing"]),
        (["image", "logit"], "refined", ["logit"]),
        (["image", "mask"], None, []),
    ],
)
def test_saved_outputs_go_by_name_the_users_first(names, key, expected):
    assert saved_outputs(dict.fromkeys(names, torch.ones(2)), key) == expected


def test_an_output_that_is_not_there_lists_what_is():
    with pytest.raises(DumpError, match="no array 'thing'") as caught:
        saved_outputs({"image": SAVED, "mask": SAVED}, "thing")
    assert "image, mask" in caught.value.remedy


@pytest.mark.parametrize(
    "limit", [-65504.0, float(torch.finfo(torch.float32).min), float(torch.finfo(torch.bfloat16).min)]
)
def test_masks_at_the_limit_of_a_format_measure_no_error(limit):
    saved = torch.tensor([[1.0, limit], [-4.0, limit]])
    assert grade_of(torch.tensor([[1.5, limit], [-4.0, limit]]), saved).max_rel_err == pytest.approx(0.5 / 4)
    assert grade_of(torch.tensor([[1.0, 2.0], [-4.0, limit]]), saved).max_rel_err == pytest.approx(1.0, rel=1e-4)
    assert grade_of(torch.full((2, 2), limit), torch.full((2, 2), limit)).max_rel_err is None


def test_what_only_a_cast_makes_infinite_is_finite_in_the_replay():
    saved = torch.tensor([1.0, math.inf], dtype=torch.float16)
    found = grade(("y", saved), {"y": torch.tensor([1.0, 1e5])})
    assert (found.grade, found.num_bad_saved, found.num_bad_replayed, found.max_rel_err) == ("finite", 1, 0, 0.0)
