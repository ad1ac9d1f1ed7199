"""Architectures off the main road, each sick in its own way, beside a twin that is sound."""

import math

import torch
from torch import nn
from torch.nn.functional import mse_loss, normalize, relu, softplus

from strangers.rows import Rows
from strangers.visits import louder, mean, normal

rows = Rows()
STAR = torch.stack([torch.arange(200) % 10, torch.zeros(200, dtype=torch.long)])
RING = torch.stack([torch.arange(10), (torch.arange(10) + 1) % 10])
NODES = normal(10, 4)


@rows("numerics . div division-by-zero", {"nodes": NODES, "edges": STAR}, True, name="node that nobody writes to")
@rows("healthy", {"nodes": NODES, "edges": RING}, True, name="ring")
@rows("healthy", {"nodes": NODES, "edges": STAR}, False, name="star")
@rows("precision . index_add reduction-overflow", {"nodes": 1e4 * NODES, "edges": STAR}, False, name="hub")
class Graph(nn.Module):
    """Messages along edges, summed or averaged where they arrive."""

    def __init__(self, average):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = [nn.Linear(8, 8), nn.Linear(8, 8)]  # in a plain list, of which torch knows nothing
        self.average = average

    def forward(self, nodes, edges):
        hidden = relu(self.embed(nodes))
        for layer in self.layers:
            messages = layer(hidden)[edges[0]]
            arrived = torch.zeros_like(hidden).index_add(0, edges[1], messages.to(hidden.dtype))
            if self.average:
                degree = torch.zeros(len(nodes)).index_add(0, edges[1], torch.ones(edges.shape[1]))
                arrived = arrived / degree[:, None]
            hidden = arrived
        return hidden


@rows("precision . to input-cast-overflow", {"x": normal(2, 40, 8)}, 0.5)
@rows("healthy", {"x": normal(2, 40, 8)}, -0.5)
class Scan(nn.Module):
    """A state space model, its state kept in the inputs' precision, which grows or fades."""

    def __init__(self, rate):
        super().__init__()
        self.rate = nn.Parameter(torch.full((8,), rate))
        self.entry = nn.Linear(8, 8)
        self.exit = nn.Linear(8, 2)

    def forward(self, x):
        inputs = self.entry(x)
        state, states = torch.zeros_like(inputs[:, 0]), []
        for step in range(x.shape[1]):
            state = (self.rate.exp() * state + inputs[:, step]).to(inputs.dtype)
            states.append(state)
        return self.exit(torch.stack(states, 1))


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


def likelihood(output, _):
    return (output[0].float().square().sum(-1) - output[1]).mean()


@rows("healthy", {"x": normal(4, 8)}, 0.0, loss=likelihood)
@rows("numerics . exp exp-overflow", {"x": normal(4, 8)}, 92.0, loss=likelihood)
class Flow(nn.Module):
    """A coupling layer with its log determinant."""

    def __init__(self, bias):
        super().__init__()
        self.scale = nn.Linear(4, 4)
        nn.init.constant_(self.scale.bias, bias)

    def forward(self, x):
        kept, moved = x.chunk(2, -1)
        log_scale = self.scale(kept)
        return torch.cat([kept, moved * log_scale.exp()], -1), log_scale.sum(-1)


def rays(opacity):
    return {"points": normal(2, 5, 3), "opacity": torch.tensor([opacity])}


@rows("healthy", rays(1.0), name="radiance of something transparent")
@rows("numerics . div division-by-zero", rays(1e3), name="radiance of something opaque")
class Radiance(nn.Module):
    """Colours along rays, weighted by what light is left."""

    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, points, opacity):
        waves = (points[..., None] * 2.0 ** torch.arange(4)).flatten(-2)
        colour, density = self.field(torch.cat([waves.sin(), waves.cos()], -1)).split([3, 1], -1)
        light = torch.exp(-torch.cumsum(softplus(density) * opacity, 1))
        return (light * colour).sum(1) / light.sum(1)


@rows("healthy", {"x": 5 * normal(4, 8)}, 5.0)
@rows("numerics . reciprocal division-by-zero", {"x": 5 * normal(4, 8)}, 1e-3)
class Transport(nn.Module):
    """Sinkhorn's iterations outside of the log domain."""

    def __init__(self, regulariser):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.regulariser = regulariser

    def forward(self, x):
        kernel = torch.exp(-torch.cdist(self.embed(x).float(), x) / self.regulariser)
        left = right = torch.ones(len(x))
        for _ in range(5):
            left = 1 / (kernel @ right)
            right = 1 / (kernel.T @ left)
        return left[:, None] * kernel * right


BLANK = {"image": normal(4, 8) * torch.tensor([1.0, 1, 0, 1])[:, None], "text": normal(4, 8)}


@rows("healthy", BLANK, 1e-3)
@rows("precision . div eps-underflow", BLANK, 1e-8, samples=(2,))
class Towers(nn.Module):
    """Image and text, compared by their angle; the eps is added to a norm that was cast back."""

    def __init__(self, eps):
        super().__init__()
        self.image = nn.Linear(8, 4, bias=False)
        self.text = nn.Linear(8, 4)
        self.eps = eps

    def forward(self, image, text):
        image = self.image(image)
        image = image / (image.norm(dim=-1, keepdim=True).to(image.dtype) + self.eps)
        return image @ normalize(self.text(text), dim=-1).T


def noised(last):
    return {"image": normal(2, 3, 8, 8), "time": torch.tensor([3.0, 900.0]), "signal": torch.tensor([0.5, last])}


def of_noise(output, batch):
    squares = (output - batch["image"]).float().square().mean((1, 2, 3))
    return (squares / (1 - batch["signal"])).mean()


NOISE = {"loss": of_noise, "inputs": "image,time"}


@rows("healthy", noised(0.99), name="diffusion", **NOISE)
@rows("numerics <loss> div division-by-zero", noised(1.0), name="diffusion without noise", **NOISE)
class Diffusion(nn.Module):
    """Noise predicted from an image and a time."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, image, time):
        angles = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(4) / 4)
        shift = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        return self.up(self.norm(self.down(image) * (1 + shift[:, :, None, None])))


def evidence(output, batch):
    spread = output["log_variance"]
    divergence = -0.5 * (1 + spread - output["mean"] ** 2 - spread.exp()).sum(1).mean()
    return mse_loss(output["decoded"].float(), batch["x"]) + divergence


@rows("healthy", {"x": normal(4, 8)}, 0.0, loss=evidence)
@rows("numerics <loss> exp exp-overflow", {"x": normal(4, 8)}, 92.0, loss=evidence)
class Autoencoder(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.encode = nn.Linear(8, 8)
        self.decode = nn.Linear(4, 8)
        nn.init.constant_(self.encode.bias, bias)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        code = mean + torch.exp(0.5 * log_variance.clamp(max=5)) * torch.randn_like(mean)
        return {"decoded": self.decode(code), "mean": mean, "log_variance": log_variance}


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
