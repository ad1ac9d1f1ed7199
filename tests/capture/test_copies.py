"""A model under a recorder is copied and saved as any other: averages of its weights, whole models in a file."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import torch
from trainings import loss_of, make_batch, make_model

import nandoctor
from nandoctor import Recorder, cuda_autocast


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


def test_a_whole_model_comes_back_without_its_recorder(tmp_path):
    model, file = make_model(), io.BytesIO()
    image, _ = make_batch()
    with Recorder(model, folder=tmp_path):
        model(image)
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded.eval()(image)["logit"], model.eval()(image)["logit"])


def test_no_more_than_the_last_batches_are_held(tmp_path):
    model, seen = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Recorder(model, folder=tmp_path, loss=loss_of) as recorder:
        for number in range(20):
            batch = make_batch(loud=number == 3)
            seen.append(weakref.ref(batch[0]))
            watch(model, recorder, batch)
            optimizer.step()
        del batch
        gc.collect()
        assert sum(image() is not None for image in seen) <= 2
    gc.collect()
    assert not any(image() is not None for image in seen)
