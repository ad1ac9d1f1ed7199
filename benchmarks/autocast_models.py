"""Models that are as different from each other as possible, to compare the emulated autocast on.

`MODELS` has by name a function that builds a model with random weights, and the shapes of its inputs.
"""

# ruff: noqa: D102, D103 - each function is named after its model

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import custom_bwd, custom_fwd


class Net(nn.Module):
    """Named layers, and a function (layers, *inputs) -> output as the forward."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        self.layers = nn.ModuleDict(layers)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.run(self.layers, *inputs)


class Swish(torch.autograd.Function):
    """A custom Function whose inputs autocast casts to fp32."""

    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


class Product(torch.autograd.Function):
    """A custom Function that runs in the autocast state around it."""

    @staticmethod
    @custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


def linear(width: int = 16, out: int | None = None) -> nn.Linear:
    return nn.Linear(width, width if out is None else out)


def attend(layers: Any, x: torch.Tensor) -> torch.Tensor:
    scores = layers["q"](x) @ layers["k"](x).transpose(-2, -1) / 4
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -1e4).softmax(-1) @ layers["v"](x)


def fused_attention(layers: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (layers[name](x).unflatten(-1, (2, 8)).transpose(1, 2) for name in "qkv")
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def root_mean_square(layers: Any, x: torch.Tensor) -> torch.Tensor:
    x = layers["a"](x)
    return layers["b"](x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def gated(layers: Any, x: torch.Tensor) -> torch.Tensor:
    return layers["down"](F.silu(layers["gate"](x)) * layers["up"](x))


def encode_and_sample(layers: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean, logvar = layers["encode"](x).chunk(2, -1)
    z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
    kl = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(-1)
    return layers["decode"](z), kl.mean()


def contrast(layers: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    left, right = F.normalize(layers["a"](a), dim=-1), F.normalize(layers["b"](b), dim=-1)
    return F.cross_entropy(torch.einsum("ad,bd->ab", left, right) / 0.07, torch.arange(len(a)))


def pass_messages(layers: Any, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    messages = layers["message"](nodes[edges[0]])
    total = torch.zeros_like(messages[: len(nodes)]).index_add(0, edges[1], messages)
    return layers["renew"](torch.cat([nodes.to(total.dtype), total], -1))


def pool_points(layers: Any, points: torch.Tensor) -> torch.Tensor:
    features = F.relu(layers["norm"](layers["conv"](points)))
    return layers["head"](features.max(-1).values)


def dilate(layers: Any, waves: torch.Tensor) -> torch.Tensor:
    x = layers["in"](waves)
    return layers["out"](torch.tanh(layers["filter"](x)) * torch.sigmoid(layers["gate"](x)))


def skip(layers: Any, image: torch.Tensor) -> torch.Tensor:
    down = F.gelu(layers["norm"](layers["down"](image)))
    up = F.interpolate(down, scale_factor=2, mode="bilinear")
    return layers["out"](torch.cat([up, image], 1))


def transform(layers: Any, image: torch.Tensor) -> torch.Tensor:
    theta = layers["where"](F.adaptive_avg_pool2d(image, 2).flatten(1)).view(-1, 2, 3)
    return F.grid_sample(image, F.affine_grid(theta, list(image.shape), align_corners=False), align_corners=False)


def mixture(layers: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits, mean, scale = layers["head"](x).chunk(3, -1)
    density = -0.5 * ((y - mean) / F.softplus(scale)) ** 2 - F.softplus(scale).log()
    return -torch.logsumexp(F.log_softmax(logits, -1) + density, -1).mean()


def own_region(layers: Any, x: torch.Tensor) -> torch.Tensor:
    x = layers["a"](x)
    with torch.autocast("cuda", enabled=False):
        x = F.softmax(x.float() @ x.float().transpose(-2, -1), -1) @ x.float()
    return layers["b"](x)


def lower_region(layers: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        x = layers["a"](x).relu()
    return layers["b"](x.float())


def custom(layers: Any, x: torch.Tensor) -> torch.Tensor:
    return layers["b"](Product.apply(Swish.apply(layers["a"](x)), layers["b"].weight))


def kernel_features(layers: Any, x: torch.Tensor) -> torch.Tensor:
    distance = torch.cdist(layers["a"](x), layers["a"](x).flip(0))
    return torch.exp(-distance.square() / 2).sum(-1)


def spectrum(layers: Any, waves: torch.Tensor) -> torch.Tensor:
    power = torch.stft(waves, 16, window=torch.hann_window(16), return_complex=True).abs().pow(2)
    return layers["head"](torch.log1p(power).transpose(1, 2))


def transcribe(layers: Any, x: torch.Tensor) -> torch.Tensor:
    scores = F.log_softmax(layers["head"](x), -1).transpose(0, 1)
    return F.ctc_loss(
        scores, torch.ones(len(x), 2, dtype=torch.long), torch.full((len(x),), 8), torch.full((len(x),), 2)
    )


def recommend(layers: Any, users: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
    return (layers["users"](users) * layers["bags"](bags)).sum(-1).sigmoid()


def decay(layers: Any, x: torch.Tensor) -> torch.Tensor:
    steps = F.softplus(layers["a"](x))
    return torch.cumsum(steps, 1) / torch.cumprod(1 + steps, 1).clamp_min(1e-3)


def quantize(layers: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = layers["a"](x)
    codes = layers["book"].weight
    distance = z.pow(2).sum(-1, keepdim=True) - 2 * z @ codes.T + codes.pow(2).sum(-1)
    chosen = layers["book"](distance.argmin(-1))
    return layers["b"](z + (chosen - z).detach()), F.mse_loss(chosen, z)


def triplet(layers: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    left, right = layers["a"](a), layers["a"](b)
    return F.triplet_margin_loss(left, right, right.roll(1, 0)) + (1 - F.cosine_similarity(left, right)).mean()


def rotate(layers: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = layers["a"](x).unflatten(-1, (2, 3)).unbind(-2)
    a = F.normalize(a, dim=-1)
    b = F.normalize(b - (a * b).sum(-1, keepdim=True) * a, dim=-1)
    matrix = torch.stack([a, b, torch.linalg.cross(a, b)], -2)
    return torch.acos(((matrix.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2).clamp(-0.999, 0.999))


def mix_experts(layers: Any, x: torch.Tensor) -> torch.Tensor:
    weights, chosen = layers["gate"](x).softmax(-1).topk(2, -1)
    outputs = torch.stack([layers["one"](x), layers["two"](x), layers["three"](x)], -2)
    picked = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, outputs.shape[-1]))
    return (picked * weights[..., None]).sum(-2)


def three(**layers: nn.Module) -> dict[str, nn.Module]:
    return {"q": linear(), "k": linear(), "v": linear(), **layers}


ROWS, TOKENS, IMAGE = (4, 16), (2, 8, 16), (2, 3, 16, 16)
INDEX = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]])
WORDS = torch.tensor([[1, 2, 3], [4, 5, 6]])

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "perceptron": (lambda: nn.Sequential(linear(), nn.ReLU(), nn.Dropout(0.1), linear()), (ROWS,)),
    "convolutions with batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        (IMAGE,),
    ),
    "depthwise, group norm, hardswish": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.GroupNorm(2, 6), nn.Hardswish(), nn.AvgPool2d(2)),
        (IMAGE,),
    ),
    "generator": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 4, 2, 1), nn.InstanceNorm2d(4), nn.PReLU(), nn.Tanh()),
        (IMAGE,),
    ),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.ELU(), nn.AdaptiveAvgPool3d(2)), ((2, 1, 6, 6, 6),)),
    "super-resolution": (lambda: nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2)), (IMAGE,)),
    "U-Net": (
        lambda: Net(skip, down=nn.Conv2d(3, 8, 2, 2), norm=nn.BatchNorm2d(8), out=nn.Conv2d(11, 1, 1)),
        (IMAGE,),
    ),
    "spatial transformer": (lambda: Net(transform, where=nn.Linear(12, 6)), (IMAGE,)),
    "LSTM": (lambda: Net(lambda m, x: m["rnn"](x)[0], rnn=nn.LSTM(16, 8, 2, batch_first=True)), (TOKENS,)),
    "GRU, two ways": (
        lambda: Net(lambda m, x: m["rnn"](x)[0], rnn=nn.GRU(16, 8, batch_first=True, bidirectional=True)),
        (TOKENS,),
    ),
    "plain recurrence": (lambda: Net(lambda m, x: m["rnn"](x)[1], rnn=nn.RNN(16, 8, batch_first=True)), (TOKENS,)),
    "recurrent cell": (lambda: Net(lambda m, x: m["cell"](x)[0], cell=nn.LSTMCell(16, 8)), (ROWS,)),
    "attention by hand": (lambda: Net(attend, **three()), (TOKENS,)),
    "fused attention": (lambda: Net(fused_attention, **three()), (TOKENS,)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True), (TOKENS,)),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), (TOKENS, TOKENS)),
    "root mean square norm": (lambda: Net(root_mean_square, a=linear(), b=linear()), (TOKENS,)),
    "torch's RMSNorm": (lambda: nn.Sequential(linear(), nn.RMSNorm(16), nn.Mish()), (TOKENS,)),
    "gated feed-forward": (lambda: Net(gated, gate=linear(16, 32), up=linear(16, 32), down=linear(32, 16)), (TOKENS,)),
    "mixture of experts": (
        lambda: Net(mix_experts, gate=linear(16, 3), one=linear(), two=linear(), three=linear()),
        (TOKENS,),
    ),
    "variational autoencoder": (lambda: Net(encode_and_sample, encode=linear(16, 8), decode=linear(4, 16)), (ROWS,)),
    "vector quantization": (lambda: Net(quantize, a=linear(), b=linear(), book=nn.Embedding(9, 16)), (TOKENS,)),
    "contrastive": (lambda: Net(contrast, a=linear(), b=linear()), (ROWS, ROWS)),
    "triplets": (lambda: Net(triplet, a=linear()), (ROWS, ROWS)),
    "graph": (lambda: Net(pass_messages, message=linear(), renew=linear(32, 16)), (ROWS, INDEX)),
    "points": (
        lambda: Net(pool_points, conv=nn.Conv1d(3, 16, 1), norm=nn.BatchNorm1d(16), head=linear()),
        ((2, 3, 20),),
    ),
    "dilated waves": (
        lambda: Net(
            dilate,
            **{"in": nn.Conv1d(1, 4, 1), "out": nn.Conv1d(4, 1, 1)},
            filter=nn.Conv1d(4, 4, 2, dilation=4),
            gate=nn.Conv1d(4, 4, 2, dilation=4),
        ),
        ((2, 1, 40),),
    ),
    "spectrogram": (lambda: Net(spectrum, head=linear(9, 4)), ((2, 64),)),
    "transcription loss": (lambda: Net(transcribe, head=linear()), (TOKENS,)),
    "mixture density": (lambda: Net(mixture, head=linear(16, 9)), (ROWS, (4, 1))),
    "recommender": (
        lambda: Net(recommend, users=nn.Embedding(9, 16), bags=nn.EmbeddingBag(9, 16)),
        (WORDS[0, :2], WORDS),
    ),
    "radial kernel": (lambda: Net(kernel_features, a=linear()), (ROWS,)),
    "cumulative decay": (lambda: Net(decay, a=linear()), (TOKENS,)),
    "rotations": (lambda: Net(rotate, a=linear(16, 6)), (ROWS,)),
    "region in fp32": (lambda: Net(own_region, a=linear(), b=linear()), (TOKENS,)),
    "region in bf16": (lambda: Net(lower_region, a=linear(), b=linear()), (TOKENS,)),
    "custom functions": (lambda: Net(custom, a=linear(), b=linear()), (ROWS,)),
    "bilinear": (lambda: Net(lambda m, a, b: m["a"](a, b), a=nn.Bilinear(16, 16, 4)), (ROWS, ROWS)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(linear()), (ROWS,)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(linear()), (ROWS,)),
}


def make_inputs(shapes: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return the same normal random numbers of each shape every time; tensors are passed on unchanged."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        shape if isinstance(shape, torch.Tensor) else torch.randn(*shape, generator=generator) for shape in shapes
    )
