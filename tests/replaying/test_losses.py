"""How a loss is called: with the batch, or with parts of it by their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from nandoctor.dumps.dump import Dump
from nandoctor.errors import LossError
from nandoctor.replaying.losses import bind_loss

OUTPUT = torch.tensor([[2.0, 0.0]])
ARRAYS = {"image": torch.ones(1, 3), "label": torch.tensor([1]), "weight": torch.tensor([1.0, 3.0])}
EXPECTED = nn.functional.cross_entropy(OUTPUT, ARRAYS["label"])


def of_batch(output, batch):
    return nn.functional.cross_entropy(output, batch["label"])


def of_a_name_in_the_batch(output, label):
    return of_batch(output, {"label": label})


def of_keywords(output, *, label, reduction="mean", **_):
    return nn.functional.cross_entropy(output, label, reduction=reduction)


def of_anything(output, *args):
    return of_batch(output, *args)


class Smoothed(nn.CrossEntropyLoss):
    def forward(self, prediction, y):
        return super().forward(prediction, y)


def compute(loss, **others):
    dump = Dump(path=Path("dump.pth"), nbytes=1, layout="plain", state={}, arrays={})
    bound = bind_loss(loss, dump, lambda tensors: {**tensors, **others})
    return [bound(OUTPUT, ARRAYS) for _ in range(2)]


@pytest.mark.parametrize(
    "loss", [of_batch, of_a_name_in_the_batch, of_keywords, of_anything, nn.CrossEntropyLoss(), Smoothed()]
)
def test_a_loss_takes_the_batch_or_parts_by_name(loss):
    assert compute(loss) == [EXPECTED, EXPECTED]


def test_a_saved_text_is_no_argument_that_has_a_default():
    assert compute(of_keywords, reduction="none") == [EXPECTED, EXPECTED]


def test_a_parameter_called_batch_is_the_saved_batch():
    assert compute(of_batch, batch={"label": torch.tensor([0])}) == [EXPECTED, EXPECTED]


@pytest.mark.parametrize(
    ("loss", "others"),
    [
        (lambda output, edges: output[edges].mean(), {}),
        (lambda output, target: (output - target.float()).mean(), {"mask": torch.ones(1)}),  # two targets
        (lambda output, label, edges: of_batch(output, {"label": label}), {}),
    ],
)
def test_a_part_that_is_not_known_is_not_guessed(loss, others):
    with pytest.raises(LossError, match="its batch has image, label"):
        compute(loss, **others)


def test_an_error_of_values_is_not_tried_again():
    called = []

    def strict(output, label):
        called.append(label)
        raise ValueError("non-finite scores")

    with pytest.raises(LossError, match="non-finite"):
        compute(strict)
    assert len(called) == 1
