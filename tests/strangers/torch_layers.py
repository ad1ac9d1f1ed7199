"""Torch's own larger layers as patients, mixtures of experts, and convolutions of a graph."""

import math

import torch
from torch import nn
from torch.nn.functional import local_response_norm
from torch.nn.utils.parametrizations import weight_norm

from strangers.rows import Rows
from strangers.visits import Between, louder, mean, normal

rows = Rows()
LENGTHS = torch.arange(5) >= torch.tensor([[5], [0], [5]])
PARTLY = torch.arange(5) >= torch.tensor([[5], [3], [1]])
SENTENCES = normal(3, 5, 16)
LAST = torch.tensor(7)
KEYLESS = {
    "holds": lambda report: report.cause.evidence[0].value == 2 * 5,  # heads x queries of the sample
    "fix": "none",  # no text reaches into torch's own attention
}


@rows("precision attention bmm matmul-overflow", {"x": 4 * normal(2, 5, 16)}, 400.0)
@rows("numerics attention softmax fully-masked-softmax", {"x": SENTENCES, "padding": LENGTHS}, name="padded", **KEYLESS)
@rows("healthy", {"x": SENTENCES, "padding": PARTLY}, name="partly padded")
class SelfAttention(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)
        with torch.no_grad():
            self.attention.in_proj_weight.mul_(factor)

    def forward(self, x, padding=None):
        mixed, self.weights = self.attention(x, x, x, key_padding_mask=padding, need_weights=True)
        return self.head(mixed)


@rows(
    "numerics . div division-by-zero",
    {"x": normal(8, 5, 16), "keep": torch.ones(8, 5).index_fill(0, LAST, 0)},
    samples=(7,),
)
class MeanBehindAttention(SelfAttention):
    def forward(self, x, keep):
        mixed = super().forward(x)
        return (mixed * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)


THIRD = "precision layers.2.linear1 linear matmul-overflow"


@rows(THIRD, {"src": 2 * normal(4, 5, 16)}, name="encoder in train mode", line=None)
@rows(THIRD, {"src": 2 * normal(4, 5, 16)}, name="encoder's fused path", line=None, mode="eval")
def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    louder(encoder.layers[2].linear1, 5e4)
    return encoder


@rows("* cells rnn_relu matmul-overflow", {"x": normal(40, 3, 8)})
class RecurrenceThatGrows(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = louder(nn.RNN(8, 8, nonlinearity="relu"), 9.0)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.cells(x)[0][-1])


BAGS = {"ids": torch.arange(20).view(2, 10), "counts": torch.full((2, 10), 3e38)}


@rows("numerics words embedding_bag reduction-overflow", BAGS)
class Bags(nn.Module):
    """Sums more than fp32 holds."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(20, 8, mode="sum")
        self.head = nn.Linear(8, 2)

    def forward(self, ids, counts):
        return self.head(self.words(ids, per_sample_weights=counts))


@rows("numerics 0.parametrizations.weight.0 _weight_norm division-by-zero", {"x": normal(3, 8)})
def weight_norm_of_a_dead_row():
    model = nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].parametrizations.weight.original1[0].zero_()
    return model


@rows("healthy", {"x": torch.zeros(4, 8)})
def layer_norm_with_a_tiny_eps():
    return Between(nn.LayerNorm(8, eps=1e-12))


@rows.between("healthy", {"x": normal(3, 8)})
def layer_that_a_cpu_has_no_fp16_kernel_for(x):
    return local_response_norm(x.view(len(x), 4, 2), 3)[:, :, 0].repeat(1, 2)


# --- mixtures of experts, and convolutions of a graph whose edges are a sparse tensor


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
