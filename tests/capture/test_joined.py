"""Many tensors copied and measured by a few calls; models under a recorder are copied and saved as any other."""

import copy
import math
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch
from torch import nn
from trainings import loss_of, make_batch, make_model

import nandoctor
from nandoctor import Recorder, cuda_autocast
from nandoctor.capture.environment import Generators
from nandoctor.capture.step import Observer
from nandoctor.capture.tensors import JoinOrder
from nandoctor.dumps.reader import read_dump

TENSORS = [
    torch.randn(3, 4),
    torch.tensor(2.0),
    torch.randn(5),
    torch.tensor(7),
    torch.randn(2, 4).half(),
    torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    torch.randn(6, 4),
    torch.tensor(-3.0),
    torch.randn(300, 300),
    torch.randn(4, 6).t(),
]


def test_each_copy_is_that_of_its_own_tensor():
    order = JoinOrder(TENSORS)
    ordered = [TENSORS[place] for place in order.places]
    for tensor, copied in zip(ordered, order.split(order.copy(ordered)), strict=True):
        assert copied.dtype == tensor.dtype
        assert torch.equal(copied, tensor)
        assert copied.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_nonfinite_value_is_overlooked(value):
    tensors = [tensor.clone() for tensor in TENSORS if tensor.is_floating_point()]
    order = JoinOrder(tensors)
    ordered = [tensors[place] for place in order.places]
    assert order.largest(ordered) == max(float(tensor.abs().max()) for tensor in tensors)
    for index, tensor in enumerate(ordered):
        spoiled = tensor.clone()
        spoiled[(-1,) * tensor.dim()] = value
        found = order.largest([*ordered[:index], spoiled, *ordered[index + 1 :]])
        assert found is not None
        assert not math.isfinite(found)
    assert order.largest([None] * len(ordered)) is None
    assert order.largest([None, *ordered[1:]]) == max(float(tensor.abs().max()) for tensor in ordered[1:])


class Odd(nn.Module):
    """Buffers that are put in anew, written to late, uncounted by torch, empty, and without dimensions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("fresh", torch.zeros(3))
        self.register_buffer("late", torch.zeros(2))
        self.register_buffer("code", torch.ones(4, 3))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("missing", None)
        self.key = nn.Parameter(torch.ones(5), requires_grad=False)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, number):
        self.fresh = torch.full((3,), float(number))
        self.count += 1
        self.code.data.mul_(0.5)
        self.key.data = self.key.data * 0.9
        if number >= 2:
            self.late += 1


@pytest.mark.parametrize(("undo_nbytes", "lost"), [(1 << 20, []), (0, ["key"])])
def test_what_no_optimizer_writes_is_kept_as_it_was(undo_nbytes, lost):
    model = Odd()
    observer = Observer(model, undo_nbytes)
    for number in range(5):
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        snapshot = observer.look().kept
        model(number)
        state, found = snapshot()
        assert found == lost
        assert state.keys() == expected.keys() - ({"key", "frozen"} if lost else set())
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


@pytest.mark.parametrize("draw", [np.random.rand, np.random.randn, lambda: np.random.shuffle([1, 2, 3]), random.random])
def test_generators_are_read_after_every_draw(draw):
    generators = Generators()
    for _ in range(5):
        kept = generators.read(torch.device("cpu"))
        expected = np.random.randn(3).tolist(), random.random()
        np.random.set_state(kept.numpy)
        random.setstate(kept.python)
        assert (np.random.randn(3).tolist(), random.random()) == expected
        draw()


def watch(model, recorder, batch):
    with cuda_autocast():
        loss = loss_of(model(batch[0]), batch)
    recorder.watch(loss, batch)


def test_the_forward_of_a_copy_is_no_call_of_the_model(tmp_path):
    model = make_model()
    with Recorder(model, folder=tmp_path, loss=loss_of) as recorder:
        average = copy.deepcopy(model)
        watch(model, recorder, make_batch())
        average(make_batch()[0])
        watch(model, recorder, make_batch(loud=True))
        copy.deepcopy(model)
    (dump,) = recorder.written
    assert len(torch.load(dump, weights_only=True)["calls"]) == 1
    assert nandoctor.replay(dump, model=make_model, fixes=False).report.reproduction.grade == "exact"


def test_a_whole_model_loads_where_nandoctor_is_not_installed(tmp_path):
    with Recorder(model := nn.Linear(2, 1), folder=tmp_path):
        torch.save(model, tmp_path / "model.pt")
        pickled = pickle.dumps(model)
    with zipfile.ZipFile(tmp_path / "model.pt") as file:
        (member,) = [name for name in file.namelist() if name.endswith("data.pkl")]
        assert b"nandoctor.capture" not in file.read(member)
    assert b"nandoctor.capture" not in pickled
    for loaded in (torch.load(tmp_path / "model.pt", weights_only=False), pickle.loads(pickled)):
        assert torch.equal(loaded(torch.ones(3, 2)), model(torch.ones(3, 2)))
    assert {*read_dump(tmp_path / "model.pt").state} == {"weight", "bias"}


def test_a_forward_that_is_compiled_as_one_graph(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    with Recorder(model, folder=tmp_path, threshold=1) as recorder:
        for value in (1.0, float("nan")):
            loss = model(torch.full((3, 2), value)).sum()
            recorder.watch(loss)
            loss.backward()
    assert [path.name for path in recorder.written] == ["nan-step000000-micro1.pth"]
