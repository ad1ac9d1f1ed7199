"""An eps that modules keep is raised where it is lost, and nowhere else."""

import torch
from torch import nn

X = {"x": torch.ones(3, 4).index_fill(0, torch.tensor(1), 0.0)}


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-8

    def forward(self, x):
        return x / ((x * x).mean(-1, keepdim=True) + self.eps).sqrt()

    def extra_repr(self):
        return f"eps={self.eps}"


class Settled(Norm):
    """The same eps is another one's tolerance; a third number happens to be equal."""

    def __init__(self):
        super().__init__()
        self.least = 1e-8

    def forward(self, x):
        if not self.training and x.abs().max() < self.least:
            return x
        return super().forward(x)


class Shared(Norm):
    def forward(self, x):
        x = x / ((x * x).mean(-1, keepdim=True) + self.eps).sqrt()
        return x if self.training else x.clamp(min=self.eps)


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.lift, self.norm, self.other, self.read = nn.Linear(4, 4, bias=False), norm, Norm(), nn.Linear(4, 2)

    def forward(self, x, other=None):
        x = self.norm(self.lift(x))
        return self.read(x) if other is None else self.read(x) + self.read(self.other(other))


def test_modules_that_were_not_called_keep_their_own(replay):
    best = replay(Net(Norm()), X).fixes[0]
    assert best.verified
    assert best.title == "Set eps of norm to 1e-4 (was 1e-8)"
    assert 'for name in ["norm"]:\n    model.get_submodule(name).eps = 1e-4\n' in best.patch


def test_of_two_equal_numbers_it_is_the_one_that_the_line_reads(replay):
    best = replay(Net(Settled()), X).fixes[0]
    assert best.title == "Set eps of Settled to 1e-4 (was 1e-8)"


def test_a_number_that_other_code_reads_is_changed_at_its_place(replay):
    best = replay(Net(Shared()), X).fixes[0]
    assert best.verified
    assert "+        x = x / ((x * x).mean(-1, keepdim=True) + 1e-4).sqrt()\n" in best.patch
