"""torch.func, parametrizations and hooks: what runs a module's forward from elsewhere, or computes its weights."""

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
BATCH = {"x": normal(4, 8)}
DIVISION = "numerics . div division-by-zero"
WITH_BACKWARD = {
    "loss": lambda output, _: output.float().square().mean(),
    "holds": lambda report: not report.bad_gradients,
}


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)


@rows("healthy", BATCH, **WITH_BACKWARD)
class PerSampleGradients(Layered):
    """As private training and meta learning take them."""

    def forward(self, x):
        def energy(weights, row):
            return functional_call(self.inner, weights, (row,)).square().sum()

        weights = dict(self.inner.named_parameters())
        slopes = vmap(grad(energy), in_dims=(None, 0))(weights, x)
        return self.head(slopes["bias"])


@rows("numerics 0 div division-by-zero", BATCH, ignores=(".*spectral_norm",))
def dead_weight_with_its_norm_in_a_hook():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight_orig.zero_()
    return model


@rows("numerics . linalg_slogdet log-of-zero", BATCH)
class Determinant(Layered):
    """Two results of one shape, of which the second is infinite."""

    def forward(self, x):
        return self.head(x), torch.linalg.slogdet(0 * self.inner.weight.float())[1]


@rows(DIVISION, BATCH, grad, line="(rows - rows).sum()")
@rows(DIVISION, BATCH, lambda f: lambda x: jvp(f, (x,), (x,))[1], name="jvp", line="(rows - rows).sum()")
@rows(DIVISION, BATCH, jacrev, line="(rows - rows).sum()")
class InsideATransform(Layered):
    def __init__(self, transform):
        super().__init__()
        self.transform = transform

    def forward(self, x):
        slope = self.transform(lambda rows: (self.inner(rows) / (rows - rows).sum()).float().sum())(x)
        return self.head(x) + slope.sum()


@rows("numerics . _unpack_dual -", BATCH)
class ForwardModeAtASingularPoint(Layered):
    def forward(self, x):
        return self.head(x) + jvp(lambda rows: (0 * self.inner(rows)).sqrt(), (x,), (x,))[1].sum()


@rows("precision inner linear matmul-overflow", {"x": 100 * normal(4, 8)}, says=("fp16 stops at",))
class Ensemble(Layered):
    """vmap adds the bias in fp32 to a product that fp16 could not hold."""

    def forward(self, x):
        weights = torch.stack([self.inner.weight, 3e4 * self.inner.weight])
        return vmap(lambda weight: functional_call(self.inner, {"weight": weight}, (x,)))(weights).mean(0)
