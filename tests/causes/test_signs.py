"""What is said to be never negative must follow from the code, not from the batch that failed."""

import pytest
import torch
from made_traces import make_step
from torch import nn

from nandoctor.changes.signs import is_nonnegative
from nandoctor.engine.runner import Watch
from nandoctor.evidence.trace import OpTensor

PROVED = (
    "h.abs().sum(-1)",
    "h * h",
    "(h * h).mean(-1).sqrt()",
    "h.pow(2).sum(-1).float()",
    "h.norm(dim=-1)",
    "torch.exp(h) + 1e-3",
    "h.softmax(-1) * x.relu()",
    "h.clamp(min=0).amax(-1)",
    "torch.maximum(h, h.abs())",
    "h.var(dim=-1, keepdim=True).expand(3, 4)",
    "torch.cat([h.abs(), x.sigmoid()])",
)
UNPROVED = (
    "h",
    "x",  # positive in this batch
    "weight.sum()",
    "h.sum(-1)",
    "x * h",
    "h.abs() - 1e-3",
    "h.abs() * -1",
    "torch.mul(*h.chunk(2, -1))",  # one op gave both halves
    "h.pow(3)",
    "h.clamp(max=1)",
    "torch.minimum(h, h.abs())",
    "torch.cat([h.abs(), x])",
    "lengths.float()",
    "h.abs() * lengths[:, None]",
    "torch.where(x > 0, h.abs(), h)",
)


class Everything(nn.Linear):
    def forward(self, x, lengths):
        names = {"h": super().forward(x), "x": x, "lengths": lengths, "weight": self.weight, "torch": torch}
        return {text: eval(text, names) for text in (*PROVED, *UNPROVED)}


@pytest.fixture(scope="module")
def trace():
    model, batch = Everything(4, 4, bias=False), {"x": torch.rand(3, 4), "lengths": torch.tensor([1, 2, 3])}
    return make_step(model, batch).run(watch=Watch(stage="signs", ops=True)).trace


@pytest.mark.parametrize("text", [*PROVED, *UNPROVED])
def test_only_what_follows_from_the_code_is_proved(text, trace):
    stats = trace.output[[*PROVED, *UNPROVED].index(text)]
    tensor = OpTensor(name="other", stats=stats, producer=stats.producer)
    assert is_nonnegative(tensor, trace.ops) == (text in PROVED)
