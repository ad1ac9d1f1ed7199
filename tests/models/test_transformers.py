"""Unchanged models of transformers, replayed from dump files as a training script writes them."""

import random

import numpy as np
import pytest
import torch

import nandoctor
from nandoctor.autocast.policy import cuda_autocast

pytest.importorskip("transformers")

from models.zoo import MODELS, middle_layer

pytestmark = pytest.mark.slow


def write_dump(path, model, spec, *, training):
    model.train(training)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with torch.no_grad(), cuda_autocast():
        output = model(**spec.batch)[spec.output]
    arrays = {name: tensor.numpy() for name, tensor in {**spec.batch, spec.output: output}.items()}
    torch.save({"state_dict": model.state_dict(), **arrays}, path)


@pytest.fixture(params=MODELS)
def spec(request):
    return MODELS[request.param]


@pytest.fixture
def model(spec):
    torch.manual_seed(1)
    return spec.make()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_healthy_model_is_replayed_to_the_bit(tmp_path, spec, model, training):
    write_dump(tmp_path / "dump.pth", model, spec, training=training)
    report = nandoctor.replay(
        tmp_path / "dump.pth", model=model, mode="train" if training else "eval", fixes=False
    ).report
    assert (report.verdict, report.reproduction.grade) == ("healthy", "exact")
    assert (report.first_nonfinite, report.origin) == (None, None)
    assert all(name in report.notes[0] for name in spec.batch)


def test_the_layer_that_overflows_is_named(tmp_path, spec, model):
    layer = middle_layer(model)
    with torch.no_grad():
        weight = model.get_submodule(layer).weight
        weight *= 3e4 / weight.abs().max()
    write_dump(tmp_path / "dump.pth", model, spec, training=True)
    report = nandoctor.replay(tmp_path / "dump.pth", model=model, fixes=False).report
    assert (report.verdict, report.reproduction.grade) == ("precision", "exact")
    assert (report.first_nonfinite.place.module, report.origin.place.module, report.origin.op) == (
        layer,
        layer,
        "linear",
    )
    assert report.cause.code == "matmul-overflow"
    assert report.origin.would_be > 65504 or report.origin.would_be < -65504
