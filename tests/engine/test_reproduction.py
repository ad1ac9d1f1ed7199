"""How a replayed output is compared with the saved one: which tensor, which grade, which numbers."""

import math

import pytest
import torch
from tiny_models import Pair, Prediction
from torch import nn

from nandoctor.engine.reproduction import grade
from nandoctor.errors import DumpError
from nandoctor.step.saved_arrays import saved_outputs

NAN, INF = math.nan, math.inf
SAVED = torch.tensor([[1.0, NAN], [INF, -4.0]])


def grade_of(replayed, saved=SAVED, name="logit", key=None):
    return grade((name, saved), replayed, key)


BITS = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
COMPLEX = torch.complex(torch.tensor([3.0, 1.0]), torch.tensor([4.0, NAN]))
HALF_MIN, BF16_MIN, FP32_MIN = (torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32))


def masked(first, limit, other=None):
    return [[first, limit if other is None else other], [-4.0, limit]]


GRADES = {
    # what was saved; what is replayed; the grade; the largest error of what is finite in both, over the largest
    "itself": (SAVED, SAVED, "exact", 0.0),
    "another number": (SAVED, [[1.5, NAN], [INF, -4.0]], "same-mask", 0.5 / 4),
    "Inf for NaN": (SAVED, [[1.0, INF], [INF, -4.0]], "same-mask", 0.0),
    "another sign": (SAVED, [[1.0, NAN], [-INF, -4.0]], "same-mask", 0.0),
    "more NaN": (SAVED, [[NAN, NAN], [INF, -4.0]], "elsewhere", 0.0),
    "fewer NaN": (SAVED, [[1.0, 2.0], [INF, -4.0]], "elsewhere", 0.0),
    "no NaN": (SAVED, [[1.0, 2.0], [3.0, -4.0]], "finite", 0.0),
    "finite, the same": ([1.0, 2.0], [1.0, 2.0], "exact", 0.0),
    "finite, another": ([1.0, 2.0], [1.0, 2.5], "same-mask", 0.25),
    "finite, now NaN": ([1.0, 2.0], [1.0, NAN], "elsewhere", 0.0),
    "NaN of other bits": (BITS, BITS.flip(0), "exact", None),
    "complex": (COMPLEX, COMPLEX, "exact", 0.0),
    "complex, off by i": (COMPLEX, COMPLEX + 1j, "same-mask", 0.25),
    "flags": (torch.tensor([True, False]), torch.tensor([True, True]), "same-mask", 1.0),
    "unsigned": (torch.tensor([4, 2]).to(torch.uint16), torch.tensor([4, 3]).to(torch.uint16), "same-mask", 0.25),
    "flags of numbers": (torch.tensor([True, False]), [0.5, -0.5], "no-reference", None),
    "nothing finite": ([NAN, NAN], [NAN, NAN], "exact", None),
    "zeros, off by a quarter": ([0.0, 0.0], [0.25, 0.0], "same-mask", 0.25),
    "rounded as it was saved": (torch.tensor([0.1, NAN]).half(), [0.1, NAN], "exact", 0.0),
    "infinite by the cast alone": (torch.tensor([1.0, INF]).half(), [1.0, 1e5], "finite", 0.0),
    "more dimensions": (SAVED, SAVED.reshape(2, 1, 2), "exact", 0.0),
    "even more": (SAVED, SAVED.reshape(1, 2, 2, 1), "exact", 0.0),
    **{
        f"mask of {limit}": (masked(1.0, limit), masked(1.5, limit), "same-mask", 0.5 / 4)
        for limit in (HALF_MIN, FP32_MIN)
    },
    "mask of bf16 alone": (masked(BF16_MIN, BF16_MIN)[0], masked(BF16_MIN, BF16_MIN)[0], "exact", None),
    "no mask now": (masked(1.0, HALF_MIN), masked(1.0, HALF_MIN, 2.0), "same-mask", 1.0),
}


@pytest.mark.parametrize("name", GRADES)
def test_grades(name):
    saved, replayed, expected, error = GRADES[name]
    found = grade_of(torch.as_tensor(replayed), torch.as_tensor(saved))
    assert (found.grade, found.output) == (expected, "logit")
    assert found.max_rel_err == (None if error is None else pytest.approx(error, rel=1e-4))


def other(tensor):
    return torch.zeros_like(tensor)


COUNTERPARTS = {
    "dict": {"logit": SAVED, "aux": other(SAVED)},
    "plural": {"aux": other(SAVED), "logits": SAVED},
    "nested dict": {"heads": {"logit": SAVED, "aux": other(SAVED)}},
    "dataclass": Prediction(SAVED, [other(SAVED)]),
    "tuple by shape": (other(SAVED)[0], SAVED),
    "tuple by agreement": (other(SAVED), SAVED),
    "named tuple by shape": Pair(other(SAVED)[:1], SAVED),
    "beside a nested one": [SAVED, torch.nested.nested_tensor([SAVED], layout=torch.jagged)],
    "beside one with another dimension": (other(SAVED)[:, None], SAVED),
}


@pytest.mark.parametrize("output", COUNTERPARTS.values(), ids=COUNTERPARTS)
def test_the_counterpart_is_found_by_name_shape_or_agreement(output):
    assert grade_of(output).grade == "exact"


@pytest.mark.parametrize(
    "output",
    [None, 3, {"logit": SAVED[:1]}, (other(SAVED), other(SAVED)), {}],
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


def test_a_mode_that_raises_has_not_made_the_saved_output(replay):
    report = replay(Observed, {"x": torch.full((4, 4), 2.0), "logit": torch.full((4,), torch.nan)}, fixes=False)
    assert report.reproduction.grade == "exact"
    assert [attempt.training for attempt in report.reproduction.attempts] == [True, False]
    assert any("shows the precision" in note for note in report.notes)


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
    assert "image and mask" in caught.value.remedy
