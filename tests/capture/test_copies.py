"""A model under a recorder is copied and saved as any other: averages of its weights, whole models in a file."""

import copy
import pickle
import zipfile

import torch
from torch import nn
from trainings import loss_of, make_batch, make_model

import nandoctor
from nandoctor import Recorder, cuda_autocast
from nandoctor.dumps.reader import read_dump


def watch(model, recorder, batch):
    """A step up to its backward pass."""
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
