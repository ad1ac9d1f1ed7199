"""How a loss is called: with the batch, with parts of it by their names, or by a step up to its backward pass."""

from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from nandoctor.dumps.dump import Dump
from nandoctor.errors import LossError
from nandoctor.step.calls import bind_loss, call_up_to_backward
from nandoctor.step.weights import fill_loss

DUMP = Dump(path=Path("dump.pth"), nbytes=1, layout="plain", state={}, arrays={})
OUTPUT = torch.tensor([[2.0, 0.0]])
ARRAYS = {"image": torch.ones(1, 3), "label": torch.tensor([1]), "weight": torch.tensor([1.0, 3.0])}
EXPECTED = nn.functional.cross_entropy(OUTPUT, ARRAYS["label"])


def of_batch(output, batch):
    return nn.functional.cross_entropy(output, batch["label"])


def of_a_name_in_the_batch(output, label):
    return of_batch(output, {"label": label})


def of_the_plural(output, labels):
    return of_batch(output, {"label": labels})


def of_the_target_first(label, logits):
    return of_batch(logits, {"label": label})


def of_the_batch_first(batch, output):
    return of_batch(output, batch)


def of_keywords(output, *, label, reduction="mean", **_):
    return nn.functional.cross_entropy(output, label, reduction=reduction)


def of_anything(output, *args):
    return of_batch(output, *args)


def with_logs(output, label):
    made = of_batch(output, {"label": label})
    return made, {"accuracy": 1.0}


def in_a_dict(output, batch):
    return {"regularizer": 0.0, "loss": of_batch(output, batch)}


class Smoothed(nn.CrossEntropyLoss):
    def forward(self, prediction, y):
        return super().forward(prediction, y)


def compute(loss, **others):
    bound = bind_loss(loss, DUMP, lambda tensors: {**tensors, **others})
    return [bound(OUTPUT, ARRAYS) for _ in range(2)]


@pytest.mark.parametrize(
    "loss",
    [
        of_batch,
        of_a_name_in_the_batch,
        of_the_plural,
        of_the_target_first,
        of_the_batch_first,
        of_keywords,
        of_anything,
        with_logs,
        in_a_dict,
        nn.CrossEntropyLoss(),
        Smoothed(),
    ],
)
def test_a_loss_takes_the_batch_or_parts_by_name(loss):
    assert compute(loss) == [EXPECTED, EXPECTED]


def test_a_loss_of_an_array_is_not_given_the_batch_first():
    def of_one_class(output, label):
        return output[label == 1].mean()  # a dict is never 1

    assert compute(of_one_class) == [OUTPUT.mean(), OUTPUT.mean()]


@pytest.mark.parametrize("loss", [of_a_name_in_the_batch, lambda output, batch: of_batch(output, {"label": batch[1]})])
def test_a_loss_takes_a_list_or_its_last_items(loss):
    bound = bind_loss(loss, DUMP, lambda tensors: [tensors["image"], tensors["label"]])
    assert [bound(OUTPUT, ARRAYS) for _ in range(2)] == [EXPECTED, EXPECTED]


def of_several(recon_x, x, mu, logvar):
    return recon_x + 10 * x + 100 * mu + 1000 * logvar


@pytest.mark.parametrize(
    ("loss", "output"),
    [
        (of_several, (1.0, 2.0, 3.0)),
        (of_several, {"mu": 2.0, "logvar": 3.0, "recon_x": 1.0}),
        (of_several, namedtuple("Out", "mu logvar recon_x")(2.0, 3.0, 1.0)),
        (lambda made: made[0] + 100 * made[1] + 1000 * made[2] + 50, (1.0, 2.0, 3.0)),
        (lambda student, teacher: student.sum() + teacher.sum(), (1251.0, 2000.0)),
    ],
)
def test_a_loss_takes_several_outputs_or_the_output_alone(loss, output):
    made = tuple(map(torch.tensor, output)) if type(output) is tuple else output
    arrays = {"image": torch.tensor(5.0)}
    assert bind_loss(loss, DUMP, dict, used={"image"})(made, arrays) == 3251


@pytest.mark.parametrize(
    "loss", [lambda output, scale=2.0: output.sum() * scale, lambda output, *, eps=2.0: output.sum() * eps]
)
def test_what_need_not_be_given_is_not_guessed(loss):
    arrays = {"image": torch.ones(1, 3), "extra": torch.ones(2)}
    assert bind_loss(loss, DUMP, dict, used={"image"})(OUTPUT, arrays) == 4


@pytest.mark.parametrize("beside", [{"loss": torch.tensor(9.0)}, {"input": torch.ones(1, 2)}], ids=["loss", "output"])
def test_the_only_array_that_the_model_leaves_is_the_target(beside):
    """A saved output is not its own target."""
    arrays = {"image": torch.ones(1, 3), "price": torch.tensor([[1.0, 4.0]]), **beside}
    assert bind_loss(nn.MSELoss(), DUMP, dict, used={"image"})(OUTPUT, arrays) == 8.5


def of_two_parts(made, batch):
    return made.sum() + 10 * batch["price"] + 100 * batch["weight"]


def test_a_loss_gets_the_dicts_whose_keys_it_reads():
    price, weight = torch.tensor(3.0), torch.tensor(5.0)
    for batch in ({"price": price, "weight": weight}, {"x": {"weight": weight}, "y": {"price": price}}):
        assert bind_loss(of_two_parts, DUMP, dict)(torch.tensor([1.0, 1.0]), batch) == 532


def test_a_target_inside_of_the_batch_is_found():
    batch = {"0": {"image": ARRAYS["image"]}, "1": {"label": ARRAYS["label"]}}
    assert bind_loss(nn.CrossEntropyLoss(), DUMP, dict)(OUTPUT, batch) == EXPECTED


def test_the_items_of_a_batch_may_be_attributes():
    assert compute(lambda output, batch: of_batch(output, {"label": batch.label})) == [EXPECTED, EXPECTED]


def test_a_loss_takes_its_own_state_from_the_file():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(1, 2))

    for arrays, states in (({"crit.center": torch.ones(1, 2)}, {}), ({}, {"crit": {"center": torch.ones(1, 2)}})):
        filled, notes = fill_loss(loss := Centred(), replace(DUMP, arrays=arrays, other_states=states))
        assert (filled.center.sum(), loss.center.sum()) == (2, 0)
        assert notes == ["The loss has the state under 'crit'."]
    assert fill_loss(loss, replace(DUMP, arrays={"center": torch.ones(1, 3)}))[0] is loss


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


class Manual(nn.Module):
    """Like a LightningModule that optimizes manually; `configure_optimizers` counts its calls."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.linear, self.asks, self.num_calls = nn.Linear(2, 1), asks, 0

    def configure_optimizers(self):
        self.num_calls += 1
        return [torch.optim.SGD(self.parameters(), lr=0.1)] * 2

    def manual_backward(self, loss):
        raise AssertionError("replaced in a replay")

    def training_step(self, x):
        if self.asks:
            first, second = self.optimizers()
            first.zero_grad()
            second.step()
        self.manual_backward(self.linear(x).mean())


@pytest.mark.parametrize("asks", [True, False])
def test_optimizers_are_made_only_for_a_step_that_asks(asks):
    model = Manual(asks)
    loss = call_up_to_backward(model, model.training_step, torch.ones(3, 2))
    assert loss.shape == ()
    assert model.num_calls == asks
    assert "optimizers" not in vars(model)


def test_a_loss_that_was_called_once_is_not_called_otherwise():
    """A change of the code may raise what a wrong call raises, and shows nothing of the call."""
    fails = [False]

    def of_two(output, label, weight):
        if fails[0]:
            raise TypeError("of the changed code")
        return nn.functional.cross_entropy(output, label, weight)

    bound = bind_loss(of_two, DUMP, dict)
    made = bound(OUTPUT, ARRAYS)
    fails[0] = True
    with pytest.raises((LossError, TypeError), match="of the changed code"):
        bound(OUTPUT, ARRAYS)
    fails[0] = False
    assert bound(OUTPUT, ARRAYS) == made
