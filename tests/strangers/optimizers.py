"""Weights that an optimizer spoils after a step in which everything was finite."""

import torch
from torch import nn

from strangers.rows import Rows

rows = Rows()
EXAMPLES = torch.ones(4, 6)


def after_step(make, **options):
    def batch(model):
        optimizer = make(model.parameters(), lr=1e-3, **options)
        model(EXAMPLES).float().mean().backward()
        optimizer.step()
        return {"x": EXAMPLES, "optimizer": optimizer.state_dict()}

    return batch


EPS_LOST = {"phase": "optimizer", "holds": lambda report: "poisoned-weights" in [it.cause.code for it in report.also]}
Adam, SGD = torch.optim.Adam, torch.optim.SGD


@rows(
    "state hidden addcdiv optimizer-eps-underflow", after_step(Adam), torch.half, fix="none", **EPS_LOST
)  # lost already
@rows(
    "* * * optimizer-eps-underflow", after_step(Adam, eps=0.0), says=("The optimizer's eps is 0, so",), name="eps of 0"
)
@rows("* * * optimizer-eps-underflow", after_step(torch.optim.RMSprop), torch.half, name="RMSprop")
@rows("healthy", after_step(Adam, eps=1e-4), torch.half, name="eps that fp16 holds")
@rows("healthy", after_step(Adam), name="fp32 weights")
@rows("healthy", after_step(SGD, momentum=0.9), torch.half, name="no second moments")
@rows("state * * poisoned-weights", after_step(SGD), torch.float32, True, name="weights spoilt before")
def detector(dtype=torch.float32, spoilt=False):
    model = Detector().to(dtype)
    with torch.no_grad():
        model.out.weight[0, 0] = float("nan") if spoilt else model.out.weight[0, 0]
    return model


class Detector(nn.Module):
    """Pure fp16, with a unit that never fires."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 4)
        self.out = nn.Linear(4, 1)
        with torch.no_grad():
            self.hidden.bias[2] = -50.0

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x.to(self.hidden.weight.dtype))))


@rows("* * * optimizer-eps-underflow", after_step(torch.optim.Adagrad), fix="none")
class Faint(nn.Linear):
    """Pure fp16, with gradients whose squares are 0 there: the step made all weights infinite."""

    def __init__(self):
        super().__init__(6, 4, dtype=torch.half)

    def forward(self, x):
        return 1e-4 * super().forward(x.half())
