"""Batches in containers reach the model, --call and --loss as the loop had them, and a wrong loss is told as such."""

from functools import partial, reduce

import pytest
import torch
from torch import nn

from nandoctor.errors import LossError, ModelError
from nandoctor.step import saved_arrays

IMAGES = torch.linspace(-1, 1, 24).reshape(3, 8)
LABELS = [{"boxes": torch.ones(count, 4), "id": count, "weight": torch.tensor(0.5)} for count in (1, 2, 3)]


class Detector(nn.Module):
    """Overflows in fp16 if it is sick, after it has read every label."""

    def __init__(self, scale=1e6):
        super().__init__()
        self.score, self.scale = nn.Linear(8, 8), scale

    def forward(self, images, labels):
        assert [len(label["boxes"]) for label in labels] == [label["id"] for label in labels]
        return {"scores": self.score(images) * self.scale}


class Classifier(Detector):
    """Takes the whole batch, by its names in the loop."""

    def forward(self, batch):
        return super().forward(batch["images"], batch["labels"])


class OfDataclass(Classifier):
    """Takes a batch that was a dataclass, and was saved by `asdict`."""

    def forward(self, batch):
        return super().forward({"images": batch.images, "labels": batch.labels})


class Misnamed(Classifier):
    def forward(self, batch):
        return super().forward({"images": batch.pixels, "labels": batch.labels})


class Plain(Detector):
    def forward(self, images):
        return super().forward(images, LABELS)["scores"]


def loss_of(output, batch):
    scores = output["scores"] if isinstance(output, dict) else output
    return scores.float().mean() + batch["labels"][2]["boxes"].sum() * batch["labels"][0]["weight"]


FLAT = {"images": IMAGES, "labels": LABELS, "epoch": 3}
NESTED = {"batch": {"images": IMAGES, "labels": LABELS}, "scores": IMAGES / 0, "epoch": 3}


@pytest.fixture
def replay(replay):
    return partial(replay, mode="train", fixes=False)


@pytest.mark.parametrize(
    ("model", "saved", "called"),
    [
        (Detector, FLAT, "model(images, labels)"),
        (Detector, NESTED, 'model(images=batch["images"], labels=batch["labels"])'),
        (Classifier, NESTED, "model(batch)"),
        (OfDataclass, NESTED, "model(batch)"),
        (Classifier, FLAT, 'model({"labels": labels, "epoch": epoch, "images": images})'),
        (Plain, NESTED, 'model(images=batch["images"])'),
    ],
)
def test_model_and_loss_get_the_containers(replay, model, saved, called):
    report = replay(model(), saved, loss=loss_of)
    assert (report.verdict, report.notes[0].split(" in ")[0]) == ("precision", f"Replayed as {called}")


def test_a_wrong_call_is_none_of_the_batch(replay):
    """A NaN in it would explain any error."""
    saved = {"batch": {"images": IMAGES / 0, "labels": LABELS}}
    assert replay(OfDataclass(), saved).notes[0].startswith("Replayed as model(batch)")
    with pytest.raises(ModelError, match="no attribute 'pixels'"):
        replay(Misnamed(), saved)


def test_a_long_list_is_walked_once_for_all_that_hold_it(replay, monkeypatch):
    seen, walked = [], saved_arrays.walk
    monkeypatch.setattr(saved_arrays, "walk", lambda tree: (seen.append(item) or item for item in walked(tree)))
    replay(Plain(), {**NESTED, "deep": reduce(lambda nest, _: {"in": nest}, range(50), [0.0] * 5000)})
    assert len(seen) < 6000


def test_a_call_gets_the_containers(replay):
    assert replay(Detector(), NESTED, call=lambda model, batch: model(**batch)).origin.op == "mul"


class Scaled(nn.Linear):
    """Overflows in fp16, but not for zeros."""

    def forward(self, x):
        return super().forward(x) * 1e6


@pytest.mark.parametrize("batch", [[torch.zeros(3, 8), IMAGES], [IMAGES, torch.zeros(3, 8)]])
def test_of_several_arrays_the_input_is_the_one_that_fails(replay, batch):
    report = replay(Scaled(8, 8, bias=False), {"batch": batch})
    place = int(batch[1] is IMAGES)
    assert (report.verdict, report.notes[0].split(" in ")[0]) == ("precision", f"Replayed as model(x=batch[{place}])")


def test_of_two_lists_the_targets_are_not_the_input(replay):
    class Pair(Scaled):
        def forward(self, chosen, rejected):
            return super().forward(chosen) - rejected

    report = replay(Pair(8, 8, bias=False), {"inputs": (IMAGES, IMAGES / 2), "labels": (torch.zeros(3), torch.ones(3))})
    assert report.notes[0].startswith("Replayed as model(chosen=inputs[0], rejected=inputs[1])")


def test_several_arrays_that_all_run_are_not_called_healthy(replay):
    with pytest.raises(ModelError, match="how to call Scaled"):
        replay(Scaled(8, 8, bias=False), {"batch": [torch.zeros(3, 8), torch.zeros(3, 8)]})


def wants_a_mask(output, batch):
    return output.mean() * batch["mask"]


LACKS = r"KeyError at .*test_nested_batches.py:\d+: 'mask' \(its batch has images, labels\)"


@pytest.mark.parametrize(
    ("loss", "said", "scale"),
    [
        (wants_a_mask, LACKS, 1.0),
        (wants_a_mask, LACKS, 1e6),
        (lambda output, _: output.mean().item(), "returned a float", 1.0),
        (lambda output, _: output, r"returned a tensor of shape \[3, 8\]", 1e6),
        (lambda _, batch: batch["images"].mean(), "has no gradient", 1e6),
        (lambda output, batch: (output - batch["images"][:, :3]).mean(), "must match the size", 1e6),
    ],
)
def test_a_loss_that_cannot_be_computed_judges_nothing(replay, loss, said, scale):
    with pytest.raises(LossError, match=said):
        replay(Plain(scale), {"batch": {"images": IMAGES, "labels": LABELS}}, loss=loss)


def test_a_loss_that_refuses_what_is_non_finite_is_no_error(replay):
    def strict(output, _):
        if not output.isfinite().all():
            raise ValueError("non-finite scores")
        return output.float().mean()

    report = replay(Plain(), FLAT, loss=strict, fixes=True, max_trials=40)
    assert report.verdict == "precision"
    assert any(fix.verified for fix in report.fixes)


def test_the_call_that_a_model_rejects_is_shown(replay):
    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale["by"]

    with pytest.raises(ModelError, match="forward raised IndexError") as caught:
        replay(Scaled(8, 8), {"images": IMAGES, "factor": torch.ones(3)})
    assert caught.value.remedy.startswith("Check the call, model(x=images, scale=factor): `nandoctor inspect`")
