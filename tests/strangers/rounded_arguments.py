"""Arguments that low precision rounds onto a singular point: the range of the format has nothing to do with it."""

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import Lifted, mean, normal

rows = Rows()
WIDE, BATCH = {"x": normal(4, 16)}, {"x": normal(4, 8)}
ACOS, ONE = "precision . acos gradient-singularity", ("exactly 1",)


@rows(ACOS, WIDE, torch.acos, 0.01, name="fp16", says=ONE, loss=mean, amp_dtype="float16")
@rows(ACOS, WIDE, torch.acos, 0.01, name="bf16", says=ONE, loss=mean, amp_dtype="bfloat16")
@rows("precision . atanh invalid-domain", WIDE, torch.atanh, 0.01, says=("rounding to fp16",), loss=mean)
@rows("healthy", WIDE, torch.acos, 0.8, loss=mean)
@rows("healthy", WIDE, torch.atanh, 0.8, loss=mean)
class Angle(nn.Module):
    """The angle between two vectors, their cosine from a product that autocast runs in low precision."""

    def __init__(self, function, apart):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.function = function
        self.apart = apart

    def forward(self, x):
        one = nn.functional.normalize(self.layer(x).float(), dim=-1)
        other = nn.functional.normalize(one + self.apart * one.roll(1, -1), dim=-1)
        cosine = torch.bmm(one[:, None], other[:, :, None]).flatten()
        return self.function(cosine.float())


def tells_of_no_zero(report):
    return not any("zero" in item.text for item in report.cause.evidence)


@rows("precision . log1p log-of-zero", BATCH, 10.0, says=("exactly -1",), holds=tells_of_no_zero)
@rows("healthy", BATCH, 1.0)
def saturated(gain):
    return Lifted(lambda h, x: torch.log1p(-torch.sigmoid(h.abs() * gain)))


@rows("* * * input-cast-overflow", WIDE, says=("The line casts `(spread + 30.0).exp()` to fp16",))
class Sampled(nn.Module):
    """Casts a standard deviation, which it computes in fp32, back to the format of the mean."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 2)

    def forward(self, x):
        mean, spread = self.layer(x).chunk(2, -1)
        return mean + (spread + 30.0).exp().to(mean.dtype)
