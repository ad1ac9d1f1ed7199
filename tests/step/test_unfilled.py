"""A large model is built without initial values: those of the file take their place."""

import pytest
import torch
from torch import nn

import nandoctor.step.setup as replay_setup
from nandoctor import file_memory
from nandoctor.dumps.reader import read_dump
from nandoctor.step.model_loading import Unfilled, load_state
from nandoctor.step.settings import Settings


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch):
    monkeypatch.setattr(file_memory, "_LEAST_NBYTES", 0)
    monkeypatch.setattr(replay_setup, "_UNFILLED_NBYTES", 0)


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.trunk = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 4)
        nn.init.trunc_normal_(self.trunk.weight, std=0.02)
        self.square = nn.init.orthogonal_(nn.Parameter(torch.empty(4, 4)))
        self.by_hand = nn.Linear(4, 4)
        self.by_hand.weight.data.normal_(std=0.02)
        self.register_buffer("phase", torch.empty(4).uniform_(1, 2), persistent=False)

    def forward(self, x):
        return self.trunk(self.embed(x)) @ self.square * self.phase


def build_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    return transformers.BertModel(config)


@pytest.mark.parametrize(
    "build",
    [
        Drawing,
        pytest.param(build_bert, marks=pytest.mark.slow),  # whose import takes seconds
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2),
        lambda: nn.LSTM(3, 4, num_layers=2),
    ],
)
def test_it_has_the_weights_of_the_file(build):
    state = build().state_dict()
    with Unfilled():
        model = build()
    load_state(model, state, shared=True)
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])] == []
    names = dict(model.named_parameters()).keys() & state.keys()
    assert all(model.get_parameter(name).data_ptr() == state[name].data_ptr() for name in names)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("init", [nn.init.normal_, nn.init.xavier_uniform_, nn.init.kaiming_uniform_])
@pytest.mark.parametrize("part", ["the weight", "its data"])
def test_memory_stays_as_it_was_allocated(init, part):
    weight = nn.Parameter(torch.full((4, 4), 7.0))
    with Unfilled() as unfilled:
        init(weight if part == "the weight" else weight.data)
    assert unfilled.holds(weight)
    assert (weight == 7).all()


def test_with_weights_that_stay_all_are_drawn(tmp_path):
    torch.save({"state_dict": {"square": torch.zeros(4, 4)}, "x": torch.tensor([1])}, tmp_path / "nan.pth")
    dump, settings = read_dump(tmp_path / "nan.pth"), Settings(model=Drawing, strict=False)
    model = replay_setup.prepare(dump, settings).steps[0].model
    assert not model.square.any()
    assert ((model.phase >= 1) & (model.phase < 2)).all()
    assert 0 < model.trunk.weight.abs().max() < 0.1
    assert model.embed.weight[1:].std() > 0.1
