"""Mixtures of experts, and convolutions of a graph whose edges are a sparse tensor."""

import math

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import louder, mean, normal

rows = Rows()


@rows("precision experts.2.2 linear matmul-overflow", {"x": 30 * normal(16, 8)}, 2)
@rows("healthy", {"x": normal(1, 8)}, name="experts that nobody chose")
class Mixture(nn.Module):
    """The best two of four experts, chosen by scores of which the others' are -inf."""

    def __init__(self, sick=None):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)])
        if sick is not None:
            louder(self.experts[sick][2], 4e4)

    def forward(self, x):
        scores, best = self.gate(x).topk(2)
        shares = torch.full((len(x), 4), -math.inf, dtype=scores.dtype).scatter(-1, best, scores).softmax(-1)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = (best == index).any(-1)
            output[chosen] += (shares[chosen, index, None] * expert(x[chosen])).to(x.dtype)
        return output


class Convolution(nn.Linear):
    """A convolution of a graph, which is a sparse tensor: it has no samples to leave out and no values to vary."""

    def forward(self, x, adjacency=None):
        hidden = super().forward(x)
        hidden = hidden if adjacency is None else (adjacency @ hidden.float()).to(hidden.dtype)
        return hidden * hidden


for layout in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
    batch, overflow = {"x": 1e4 * normal(6, 4)}, "precision . mul elementwise-overflow"
    of = {"make": lambda model: model(4, 4), "loss": mean}
    read, beside = {**batch, "adjacency": layout(torch.eye(6))}, {**batch, "edges": layout(torch.eye(6))}
    rows(overflow, read, name=f"{layout.__name__}, read", samples=None, **of)(Convolution)
    rows(
        overflow,
        beside,
        name=f"{layout.__name__}, beside",
        holds=lambda report: report.origin.elements.samples is not None,
        **of,
    )(Convolution)
