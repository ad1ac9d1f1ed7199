"""Torch's own larger layers as patients: attention, encoders, recurrent and transposed layers, embeddings, norms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import local_response_norm, scaled_dot_product_attention
from torch.nn.utils.parametrizations import weight_norm

from strangers.visits import Between, blamed, louder, normal

HEALTHY = ("healthy",)


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


def test_scores_of_multi_head_attention_overflow(examine):
    report = examine(SelfAttention(400.0), {"x": 4 * normal(2, 5, 16)})
    assert blamed(report) == ("precision", "attention", "bmm", "matmul-overflow")


def test_multi_head_attention_with_a_sample_of_padding_alone(examine):
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1] = True
    report = examine(SelfAttention(), {"x": normal(3, 5, 16), "padding": padding})
    assert blamed(report) == ("numerics", "attention", "softmax", "fully-masked-softmax")
    assert report.cause.evidence[0].value == 2 * 5  # heads x queries of the sample that has no key


def test_partly_padded_attention_is_healthy(examine):
    padding = torch.arange(5) >= torch.tensor([[5], [3], [1]])
    assert blamed(examine(SelfAttention(), {"x": normal(3, 5, 16), "padding": padding})) == HEALTHY


class FusedAttention(nn.Module):
    """Torch's fused kernels give zeros for a row without keys, since 2.5."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x, keep):
        mask = keep[:, None, :].expand(-1, x.shape[1], -1)
        return self.out(scaled_dot_product_attention(self.query(x), self.query(x), x, attn_mask=mask))


def test_a_fully_masked_row_of_fused_attention_is_healthy(examine):
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[1] = False
    assert blamed(examine(FusedAttention(), {"x": normal(3, 5, 8), "keep": keep})) == HEALTHY


@pytest.mark.parametrize("mode", ["train", "eval"])  # eval takes the encoder's fused path, if it may
def test_the_third_layer_of_an_encoder_overflows(examine, mode):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    louder(encoder.layers[2].linear1, 5e4)
    report = examine(encoder, {"src": 2 * normal(4, 5, 16)}, mode=mode)
    assert blamed(report) == ("precision", "layers.2.linear1", "linear", "matmul-overflow")
    assert report.origin.source is None  # no line of the user's own led there


def test_a_recurrence_that_grows_step_by_step(examine):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = louder(nn.RNN(8, 8, nonlinearity="relu"), 9.0)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.cells(x)[0][-1])

    assert blamed(examine(Reader(), {"x": normal(40, 3, 8)}))[1:] == ("cells", "rnn_relu", "matmul-overflow")


def test_a_bounded_recurrence_before_the_layer_is_innocent(examine):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = nn.LSTM(8, 8, 2, bidirectional=True)
            self.head = nn.Linear(16, 2)

        def forward(self, x):
            states, (_, cell) = self.memory(x)
            return self.head(states * 1e6) + cell.sum() * 0

    assert blamed(examine(Tagger(), {"x": normal(4, 3, 8)})) == ("precision", "", "mul", "elementwise-overflow")


def test_a_transposed_convolution_overflows_under_its_norm(examine):
    model = nn.Sequential(louder(nn.ConvTranspose2d(3, 4, 3, stride=2), 3e4), nn.BatchNorm2d(4))
    report = examine(model, {"image": 20 * normal(2, 3, 5, 5)})
    assert blamed(report) == ("precision", "0", "conv_transpose2d", "matmul-overflow")


def test_an_embedding_bag_sums_more_than_fp32_holds(examine):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.EmbeddingBag(20, 8, mode="sum")
            self.head = nn.Linear(8, 2)

        def forward(self, ids, counts):
            return self.head(self.words(ids, per_sample_weights=counts))

    counts = torch.full((2, 10), 3e38)
    report = examine(Bags(), {"ids": torch.arange(20).view(2, 10), "counts": counts})
    assert blamed(report) == ("numerics", "words", "embedding_bag", "reduction-overflow")


def test_dropout_scales_what_it_keeps_past_the_limit(examine):
    class Thinned(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(8, 8, bias=False)
            self.thin = nn.Dropout(0.9)
            self.head = nn.Linear(8, 2)
            with torch.no_grad():
                self.wide.weight.copy_(1e4 * torch.eye(8))

        def forward(self, x):
            return self.head(self.thin(self.wide(x)))

    model, batch = Thinned(), {"x": torch.ones(64, 8)}
    report = examine(model, batch)
    assert blamed(report) == ("precision", "thin", "dropout", "elementwise-overflow")
    assert report.origin.would_be == pytest.approx(1e5)
    assert blamed(examine(model, batch, mode="eval")) == HEALTHY


def test_weight_norm_of_a_dead_row(examine):
    model = nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].parametrizations.weight.original1[0].zero_()
    report = examine(model, {"x": normal(3, 8)})
    assert blamed(report) == ("numerics", "0.parametrizations.weight.0", "_weight_norm", "division-by-zero")


def test_tied_weights_share_no_blame(examine):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = louder(nn.Embedding(20, 8), 300.0)
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.body(self.words(ids))).log_softmax(-1)

    report = examine(Tied(), {"ids": torch.arange(12).view(3, 4)})
    assert blamed(report) == ("precision", "head", "linear", "matmul-overflow")


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d(8, eps=1e-12), nn.LayerNorm(8, eps=1e-12), nn.GroupNorm(2, 8, eps=1e-12)],
    ids=lambda norm: type(norm).__name__,
)
def test_torch_norms_of_a_constant_with_a_tiny_eps_are_healthy(examine, norm):
    assert blamed(examine(Between(norm), {"x": torch.zeros(4, 8)})) == HEALTHY


def test_an_instance_norm_of_a_blank_image_is_healthy(examine):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, eps=1e-12), nn.Conv2d(4, 1, 1))
    assert blamed(examine(model, {"image": torch.zeros(2, 3, 8, 8)})) == HEALTHY


def test_a_layer_that_a_cpu_has_no_fp16_kernel_for(examine):
    class Response(nn.Module):
        def forward(self, x):
            return local_response_norm(x.view(len(x), 4, 2), 3)[:, :, 0].repeat(1, 2)

    assert blamed(examine(Between(Response()), {"x": normal(3, 8)})) == HEALTHY


def test_a_temperature_that_grew_overflows_with_its_exponential(examine):
    class Contrast(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(8, 8)
            self.log_scale = nn.Parameter(torch.tensor(12.0))

        def forward(self, x):
            unit = nn.functional.normalize(self.encode(x), dim=-1)
            return (unit @ unit.T) * self.log_scale.exp()

    report = examine(Contrast(), {"x": normal(5, 8)})
    assert blamed(report) == ("precision", "", "mul", "exp-overflow")
    assert report.origin.would_be == pytest.approx(math.exp(12), rel=0.01)
