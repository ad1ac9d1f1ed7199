"""torch.func, parametrizations and hooks: what runs a module's forward from elsewhere, or computes its weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.utils.parametrizations import spectral_norm

from strangers.visits import blamed, line, normal

HEALTHY = ("healthy",)


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)


class PerSample(Layered):
    """A layer under vmap, with weights that want gradients."""

    def forward(self, x):
        return self.head(vmap(lambda row: self.inner(row).relu() * row)(x))


class PerSampleGradients(Layered):
    """As private training and meta learning take them."""

    def forward(self, x):
        def energy(weights, row):
            return functional_call(self.inner, weights, (row,)).square().sum()

        weights = dict(self.inner.named_parameters())
        slopes = vmap(grad(energy), in_dims=(None, 0))(weights, x)
        return self.head(slopes["bias"])


class Sensitive(Layered):
    def forward(self, x):
        slope = jacrev(lambda row: torch.tanh(self.inner(row)))(x[0])
        return self.head(vmap(lambda row: self.inner(row) / (row - row).sum())(x)) + slope.sum()


@pytest.mark.parametrize("model", [PerSample, PerSampleGradients])
def test_transforms_are_healthy_with_their_backward(examine, model):
    report = examine(model(), {"x": normal(4, 8)}, loss=lambda output, _: output.float().square().mean())
    assert blamed(report) == HEALTHY
    assert not report.bad_gradients


def test_a_division_between_transforms(examine):
    report = examine(Sensitive(), {"x": normal(4, 8)})
    assert blamed(report) == ("numerics", "", "div", "division-by-zero")
    assert "self.inner(row) / (row - row).sum()" in line(report)


def a_dead_weight_with_its_norm_in_a_hook():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight_orig.zero_()
    return model


def a_dead_weight_with_its_norm_in_a_module():
    model = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].parametrizations.weight.original.zero_()
    return model


@pytest.mark.parametrize(
    ("build", "module"),
    [
        (a_dead_weight_with_its_norm_in_a_hook, "0"),
        (a_dead_weight_with_its_norm_in_a_module, "0.parametrizations.weight.0"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm")
def test_the_spectral_norm_of_a_dead_weight(examine, build, module):
    report = examine(build(), {"x": normal(4, 8)})
    assert blamed(report) == ("numerics", module, "div", "division-by-zero")


def test_a_spectral_norm_is_healthy(examine):
    model = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    report = examine(model, {"x": normal(4, 8)}, loss=lambda output, _: output.float().mean())
    assert blamed(report) == HEALTHY


def test_the_log_determinant_of_a_singular_matrix(examine):
    """Two results of one shape, of which the second is infinite."""

    class Flow(Layered):
        def forward(self, x):
            return self.head(x), torch.linalg.slogdet(0 * self.inner.weight.float())[1]

    report = examine(Flow(), {"x": normal(4, 8)})
    assert blamed(report) == ("numerics", "", "linalg_slogdet", "log-of-zero")


@pytest.mark.parametrize("transform", [grad, lambda function: lambda x: jvp(function, (x,), (x,))[1], jacrev])
def test_a_division_inside_a_transform(examine, transform):
    class Slope(Layered):
        def forward(self, x):
            slope = transform(lambda rows: (self.inner(rows) / (rows - rows).sum()).float().sum())(x)
            return self.head(x) + slope.sum()

    report = examine(Slope(), {"x": normal(4, 8)})
    assert blamed(report) == ("numerics", "", "div", "division-by-zero")
    assert "(rows - rows).sum()" in line(report)


def test_the_derivative_of_forward_mode_at_a_singular_point(examine):
    class Slope(Layered):
        def forward(self, x):
            return self.head(x) + jvp(lambda rows: (0 * self.inner(rows)).sqrt(), (x,), (x,))[1].sum()

    assert blamed(examine(Slope(), {"x": normal(4, 8)})) == ("numerics", "", "_unpack_dual", None)


def test_a_product_that_vmap_takes_apart(examine):
    """vmap adds the bias in fp32 to a product that fp16 could not hold."""

    class Ensemble(Layered):
        def forward(self, x):
            weights = torch.stack([self.inner.weight, 3e4 * self.inner.weight])
            return vmap(lambda weight: functional_call(self.inner, {"weight": weight}, (x,)))(weights).mean(0)

    report = examine(Ensemble(), {"x": 100 * normal(4, 8)})
    assert blamed(report) == ("precision", "inner", "linear", "matmul-overflow")
    assert "fp16 stops at" in report.cause.headline
