"""Architectures off the main road, each sick in its own way, beside a twin that is sound."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, normalize, relu, softplus

from strangers.visits import blamed, louder, normal

HEALTHY = ("healthy",)


class Graph(nn.Module):
    """Messages along edges, summed or averaged where they arrive."""

    def __init__(self, *, average):
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


STAR = torch.stack([torch.arange(200) % 10, torch.zeros(200, dtype=torch.long)])
RING = torch.stack([torch.arange(10), (torch.arange(10) + 1) % 10])


def test_a_node_that_nobody_writes_to(examine):
    report = examine(Graph(average=True), {"nodes": normal(10, 4), "edges": STAR})
    assert blamed(report) == ("numerics", "", "div", "division-by-zero")


@pytest.mark.parametrize(("average", "edges"), [(True, RING), (False, STAR)])
def test_graphs_that_are_healthy(examine, average, edges):
    assert blamed(examine(Graph(average=average), {"nodes": normal(10, 4), "edges": edges})) == HEALTHY


def test_a_hub_that_hears_from_everybody(examine):
    report = examine(Graph(average=False), {"nodes": 1e4 * normal(10, 4), "edges": STAR})
    assert blamed(report) == ("precision", "", "index_add", "reduction-overflow")


class Scan(nn.Module):
    """A state space model, its state kept in the inputs' precision."""

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


def test_a_state_that_grows(examine):
    assert blamed(examine(Scan(0.5), {"x": normal(2, 40, 8)})) == ("precision", "", "to", "input-cast-overflow")


def test_a_state_that_fades(examine):
    assert blamed(examine(Scan(-0.5), {"x": normal(2, 40, 8)})) == HEALTHY


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


def test_one_expert_overflows(examine):
    report = examine(Mixture(sick=2), {"x": 30 * normal(16, 8)})
    assert blamed(report) == ("precision", "experts.2.2", "linear", "matmul-overflow")


def test_experts_that_nobody_chose_are_innocent(examine):
    assert blamed(examine(Mixture(), {"x": normal(1, 8)})) == HEALTHY


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


@pytest.mark.parametrize(("bias", "found"), [(0.0, HEALTHY), (92.0, ("numerics", "", "exp", "exp-overflow"))])
def test_a_normalising_flow(examine, bias, found):
    def loss(output, _):
        return (output[0].float().square().sum(-1) - output[1]).mean()

    assert blamed(examine(Flow(bias), {"x": normal(4, 8)}, loss=loss)) == found


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


@pytest.mark.parametrize(("opacity", "found"), [(1.0, HEALTHY), (1e3, ("numerics", "", "div", "division-by-zero"))])
def test_a_radiance_field(examine, opacity, found):
    batch = {"points": normal(2, 5, 3), "opacity": torch.tensor([opacity])}
    assert blamed(examine(Radiance(), batch)) == found


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


@pytest.mark.parametrize(
    ("regulariser", "found"), [(5.0, HEALTHY), (1e-3, ("numerics", "", "reciprocal", "division-by-zero"))]
)
def test_optimal_transport(examine, regulariser, found):
    assert blamed(examine(Transport(regulariser), {"x": 5 * normal(4, 8)})) == found


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


@pytest.mark.parametrize(("eps", "found"), [(1e-3, HEALTHY), (1e-8, ("precision", "", "div", "eps-underflow"))])
def test_a_blank_image_between_two_towers(examine, eps, found):
    image = normal(4, 8)
    image[2] = 0
    report = examine(Towers(eps), {"image": image, "text": normal(4, 8)})
    assert blamed(report) == found
    assert report.origin is None or report.origin.elements.samples == (2,)


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


@pytest.mark.parametrize(("last", "found"), [(0.99, HEALTHY), (1.0, ("numerics", "<loss>", "div", "division-by-zero"))])
def test_the_weight_of_a_step_without_noise(examine, last, found):
    def loss(output, batch):
        squares = (output - batch["image"]).float().square().mean((1, 2, 3))
        return (squares / (1 - batch["signal"])).mean()

    batch = {"image": normal(2, 3, 8, 8), "time": torch.tensor([3.0, 900.0]), "signal": torch.tensor([0.5, last])}
    assert blamed(examine(Diffusion(), batch, loss=loss, inputs="image,time")) == found


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


@pytest.mark.parametrize(("bias", "found"), [(0.0, HEALTHY), (92.0, ("numerics", "<loss>", "exp", "exp-overflow"))])
def test_the_divergence_of_a_variational_autoencoder(examine, bias, found):
    def loss(output, batch):
        spread = output["log_variance"]
        divergence = -0.5 * (1 + spread - output["mean"] ** 2 - spread.exp()).sum(1).mean()
        return mse_loss(output["decoded"].float(), batch["x"]) + divergence

    assert blamed(examine(Autoencoder(bias), {"x": normal(4, 8)}, loss=loss)) == found


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "beside"])
def test_a_graph_that_is_a_sparse_tensor(examine, sparse, is_read):
    """It has no samples to leave out and no values to vary; rows of nodes are none either."""

    class Convolution(nn.Linear):
        def forward(self, x, adjacency=None):
            hidden = super().forward(x)
            hidden = hidden if adjacency is None else (adjacency @ hidden.float()).to(hidden.dtype)
            return hidden * hidden

    batch = {"x": 1e4 * normal(6, 4), "adjacency" if is_read else "edges": sparse(torch.eye(6))}
    report = examine(Convolution(4, 4), batch, loss=lambda output, _: output.float().mean())
    assert blamed(report) == ("precision", "", "mul", "elementwise-overflow")
    assert (report.origin.elements.samples is None) == is_read
