"""A model that is built without being filled is, once it is filled, the model that a plain build gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nandoctor.replaying.setup as replay_setup
from nandoctor.case import replay
from nandoctor.errors import ModelError
from nandoctor.replaying.deferred_fills import DeferredFills
from nandoctor.replaying.model_loading import load_state


class Drawing(nn.Module):
    """Draws in every way at once, and computes buffers from what it drew."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, 5, 4) * 0.02)
        self.register_buffer("phase", torch.rand(4), persistent=False)
        self.trunk = nn.Linear(4, 4)
        nn.init.trunc_normal_(self.trunk.weight, std=0.02)
        nn.init.constant_(self.trunk.weight[1], 7.0)
        self.register_buffer("norm", self.trunk.weight.detach().norm(), persistent=False)
        self.square = nn.init.orthogonal_(nn.Parameter(torch.empty(4, 4)))
        self.other = copy.deepcopy(self.trunk)
        self.half = nn.Linear(4, 4).half()
        self.order = torch.randperm(6)
        self.plain = torch.zeros(3)


class Seeding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        torch.manual_seed(7)
        self.second = nn.Linear(4, 4)
        self.third = nn.Parameter(self.second.weight.data.clone())
        torch.manual_seed(8)


class Peeking(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3).normal_())
        self.total = float(self.weight.detach().numpy().sum())
        self.listed = self.weight.tolist()
        self.after = nn.Parameter(torch.empty(3).uniform_())


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.old = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))


class Turned(nn.Module):
    """Changes the shape of what it drew in place; `orthogonal_` transposes a wide matrix."""

    def __init__(self):
        super().__init__()
        self.wide = nn.init.orthogonal_(nn.Parameter(torch.empty(3, 6)))
        self.turned = nn.Parameter(torch.empty(2, 3))
        with torch.no_grad():
            self.turned.normal_().t_().add_(torch.arange(2))
            self.turned.data.unsqueeze_(0).transpose_(0, 1)
        self.resized = torch.randn(4)
        self.resized.resize_(2, 3).fill_(1)
        self.sparse = nn.init.sparse_(nn.Parameter(torch.empty(4, 5)), 0.5)


def make_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    return transformers.BertModel(config)


def make_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    return transformers.LlamaModel(config)


BUILDERS = [
    Drawing,
    Seeding,
    Peeking,
    Normed,
    Turned,
    pytest.param(make_bert, marks=pytest.mark.slow),  # whose import takes seconds
    pytest.param(make_llama, marks=pytest.mark.slow),
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2),
    lambda: nn.LSTM(3, 4, num_layers=2),
]


def tensors_of(model):
    own = {name: value for module in model.modules() for name, value in vars(module).items()}
    plain = {name: value for name, value in own.items() if isinstance(value, (torch.Tensor, float)) or name == "listed"}
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **plain}


def built(builder, fills=None):
    torch.manual_seed(3)
    if fills is None:
        return builder()
    with fills.building():
        return builder()


def assert_same(model, other):
    mine, others = tensors_of(model), tensors_of(other)
    assert mine.keys() == others.keys()
    assert [name for name in mine if not torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(others[name]))] == []


@pytest.mark.parametrize("builder", BUILDERS)
def test_filled_it_is_the_model_of_a_plain_build(builder):
    plain = built(builder)
    after = torch.get_rng_state()
    fills = DeferredFills()
    model = built(builder, fills)
    fills.make_all()
    assert_same(model, plain)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("builder", BUILDERS)
def test_finished_it_is_the_model_of_a_plain_build(builder):
    """All that it holds is held."""
    fills = DeferredFills()
    model = built(builder, fills)
    fills.finish()
    assert_same(model, built(builder))


@pytest.mark.parametrize("builder", BUILDERS)
def test_loaded_it_is_as_a_plain_build_that_was_loaded(builder):
    own = built(builder).state_dict().items()
    state = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in own}
    plain, fills = built(builder), DeferredFills()
    load_state(plain, state)
    model = built(builder, fills)
    load_state(model, state, fills=fills)
    assert_same(model, plain)


def test_weights_of_the_file_take_the_place_of_the_initial_ones():
    state = {name: tensor + 1 for name, tensor in nn.Linear(4, 4).state_dict().items()}
    fills = DeferredFills()
    model = built(lambda: nn.Linear(4, 4), fills)
    load_state(model, state, fills=fills)
    assert model.weight.data_ptr() == state["weight"].data_ptr()
    assert model.weight.requires_grad


def test_what_the_file_lacks_is_drawn_as_it_would_have_been():
    plain, fills = built(Seeding), DeferredFills()
    model = built(Seeding, fills)
    load_state(model, {"first.weight": torch.zeros(4, 4)}, strict=False, fills=fills)
    assert torch.equal(model.second.weight, plain.second.weight)
    assert torch.equal(model.first.bias, plain.first.bias)
    assert not model.first.weight.any()


def test_tied_weights_stay_tied():

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    state = {name: torch.full((5, 4), 2.0) for name in ("embed.weight", "head.weight")}
    fills = DeferredFills()
    model = built(Tied, fills)
    load_state(model, state, fills=fills)
    assert model.head.weight is model.embed.weight
    assert (model.embed.weight == 2).all()


def test_weights_that_do_not_fit_are_refused_as_ever():
    fills = DeferredFills()
    model = built(lambda: nn.Linear(4, 4), fills)
    with pytest.raises(ModelError, match="do not fit"):
        load_state(model, {"weight": torch.zeros(3, 3)}, fills=fills)


def test_a_replay_finds_the_same_either_way(tmp_path, monkeypatch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 64), nn.Linear(64, 2)

        def forward(self, x):
            return self.head(self.layer(x) * 1e4) * 1e3

    torch.manual_seed(0)
    state = Net().state_dict()
    torch.save({"state_dict": state, "x": torch.randn(3, 4)}, tmp_path / "dump.pth")
    plain = replay(tmp_path / "dump.pth", Net, fixes=False).report
    monkeypatch.setattr(replay_setup, "_UNFILLED_NBYTES", 0)
    shared = replay(tmp_path / "dump.pth", Net, fixes=False).report
    assert (shared.headline, shared.origin) == (plain.headline, plain.origin)
    assert torch.equal(torch.load(tmp_path / "dump.pth")["state_dict"]["head.weight"], state["head.weight"])
