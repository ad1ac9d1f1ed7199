"""The optimizer's second moments, as files hold them."""

import pytest
import torch
from torch import nn

from nandoctor.dumps.classify import read_second_moments
from nandoctor.dumps.reader import read_dump


def stepped(make, **options):
    """The state dict of an optimizer after one step of a small model with one frozen layer."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net[0].requires_grad_(requires_grad=False)
    optimizer = make(net.parameters(), lr=0.1, **options)
    net(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def read(optimizer):
    return read_second_moments(optimizer["state"], optimizer["param_groups"])


@pytest.mark.parametrize(
    ("make", "options", "eps"),
    [
        (torch.optim.Adam, {}, 1e-8),
        (torch.optim.AdamW, {"eps": 1e-4}, 1e-4),
        (torch.optim.Adam, {"amsgrad": True}, 1e-8),
        (torch.optim.RMSprop, {}, 1e-8),
        (torch.optim.Adagrad, {}, 1e-10),
    ],
)
def test_every_adaptive_optimizer_has_them(make, options, eps):
    moments = [moment for moment in read(stepped(make, **options)) if moment.index >= 2]
    assert [(moment.index, moment.eps, moment.values.shape) for moment in moments] == [(2, eps, (1, 3)), (3, eps, (1,))]
    assert all((moment.values > 0).all() for moment in moments)


def test_names_are_kept_where_the_optimizer_was_given_any():
    net = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.named_parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [moment.name for moment in read(optimizer.state_dict())] == ["weight", "bias"]


@pytest.mark.parametrize("state", [stepped(torch.optim.SGD, momentum=0.9), {"state": {}, "param_groups": []}])
def test_other_optimizers_have_none(state):
    assert read(state) == ()


@pytest.mark.parametrize(
    "damaged",
    [
        {"state": None, "param_groups": []},
        {"state": {}, "param_groups": {}},
        {"state": {0: 1}, "param_groups": [{"eps": 1e-8, "params": [0]}]},
        {"state": {0: {"exp_avg_sq": 3.0}}, "param_groups": [{"eps": 1e-8, "params": [0]}]},
        {"state": {0: {"exp_avg_sq": torch.ones(1)}}, "param_groups": [{"eps": "1e-8", "params": [0]}]},
        {"state": {0: {"exp_avg_sq": torch.ones(1)}}, "param_groups": [{"eps": 1e-8, "params": 0}]},
        {"state": {0: {"exp_avg_sq": torch.ones(1)}}, "param_groups": [{"eps": 1e-8, "params": ["0"]}]},
        {"state": {0: {"exp_avg_sq": torch.ones(1, dtype=torch.long)}}, "param_groups": [{"eps": 1e-8, "params": [0]}]},
        {"state": {}, "param_groups": [7]},
    ],
)
def test_what_has_another_shape_is_passed_over(damaged):
    assert read(damaged) == ()


def test_a_file_gives_them_up(tmp_path):
    path = tmp_path / "dump.pth"
    state = {"state_dict": nn.Linear(2, 1).state_dict(), "solver": stepped(torch.optim.Adam)}
    torch.save(state, path)
    dump = read_dump(path)
    assert [moment.index for moment in dump.moments] == [2, 3]
    assert dump.left_out == ()


def test_a_parameter_of_several_groups_is_read_once():
    """A file may name thousands in each of many groups, which torch refuses."""
    group = {"params": [0, 0], "eps": 1e-8}
    state = {0: {"step": 1, "exp_avg_sq": torch.ones(2)}}
    (moment,) = read({"state": state, "param_groups": [group, {**group, "eps": 1e-4}]})
    assert (moment.index, moment.eps) == (0, 1e-8)
