"""What a step leaves non-finite in the model, wherever the model keeps it."""

import pytest
import torch
from torch import nn

from nandoctor.engine.module_state import list_nonfinite_state


class Keeping(nn.Module):
    """A linear layer, a weight of its own and a buffer."""

    def __init__(self):
        super().__init__()
        self.large = nn.Linear(256, 256)
        self.own = nn.Parameter(torch.zeros(1 << 15))
        self.register_buffer("peak", torch.zeros(2))


def _write(tensor):
    with torch.no_grad():
        tensor.view(-1)[0] = torch.inf


WRITES = {
    "peak": lambda model: _write(model.peak),
    "state": lambda model: setattr(model, "state", torch.tensor(torch.nan)),
    "large.seen[1]": lambda model: setattr(model.large, "seen", [torch.ones(2), torch.tensor(torch.inf)]),
    "past.key": lambda model: setattr(model, "past", {"key": torch.tensor(torch.inf)}),
    "own": lambda model: _write(model.own.data),
    "large.bias": lambda model: _write(model.large.bias.data),
    "large.weight": lambda model: _write(model.large.weight),
}


@pytest.mark.parametrize("name", WRITES)
def test_all_state_is_looked_at(name):
    model = Keeping()
    assert list_nonfinite_state(model) == {}
    WRITES[name](model)
    assert list_nonfinite_state(model) == {name: True}
