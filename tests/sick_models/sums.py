"""Inputs that the first cast cannot hold, and reductions over so many elements that the total does not fit.

In: nothing. Out: `CASES` of the rows "input too large" and "long sum".
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sick_models.case import Batch, biased, case, rand, randn, scaled, seeded


class Microscope(nn.Module):
    """Raw sensor counts [batch, 1, 20, 20] -> class logits [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = scaled(nn.Conv2d(1, 8, 3, bias=False), 0.05)
        self.norm = nn.GroupNorm(2, 8)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 4)

    def forward(self, counts: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.stem(counts))))


class Neighbours(nn.Module):
    """Sums the messages that arrive at each node; a hub receives from everybody."""

    def __init__(self, *, average: bool) -> None:
        super().__init__()
        self.message = biased(nn.Linear(6, 10), 400.0)
        self.average = average

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        messages = F.relu(self.message(nodes))[source]
        if self.average:
            messages = messages / torch.bincount(target, minlength=1)[target].unsqueeze(-1)
        total = torch.zeros(len(nodes), 10, dtype=messages.dtype, device=nodes.device)
        return total.index_add(0, target, messages)


class GraphClassifier(nn.Module):
    def __init__(self, *, average: bool) -> None:
        super().__init__()
        self.gather = Neighbours(average=average)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.head(self.norm(self.gather(nodes, edges[0], edges[1]))).mean(dim=0)


def edges_of_a_hub(*, spokes: int) -> Tensor:
    """Every node but the first sends to the first."""
    return torch.stack([torch.arange(1, spokes + 1), torch.zeros(spokes, dtype=torch.long)])


def hub_graph() -> Batch:
    return {"nodes": randn(200, 6), "edges": edges_of_a_hub(spokes=199)}


CASES = (
    case(
        "input/microscope-counts",
        seeded(Microscope),
        lambda: {"counts": 1e5 * rand(2, 1, 20, 20)},
        "precision stem conv2d input-cast-overflow",
        line="self.body(self.norm(self.stem(counts)))",
        repair={"batch": lambda: {"counts": rand(2, 1, 20, 20)}},
    ),
    case(
        "long-sum/graph-hub",
        seeded(GraphClassifier, average=False),
        hub_graph,
        "precision gather index_add reduction-overflow",
        line="total.index_add(0, target, messages)",
        repair={"build": seeded(GraphClassifier, average=True)},
    ),
)
