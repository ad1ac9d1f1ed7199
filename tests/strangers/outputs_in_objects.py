"""Outputs that are no plain containers: what can be read is found, and nothing is healthy unseen."""

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import normal

rows = Rows()
BATCH = {"x": normal(4, 8)}
MUL = "precision . mul"
QUIETLY = {"ignores": ("Sparse", "The PyTorch API of MaskedTensors")}


class Head(nn.Module):
    """Scales its output until fp16 overflows, if it is sick, and hands it over in a container."""

    def __init__(self, wrap, sick):
        super().__init__()
        self.score, self.wrap, self.scale = nn.Linear(8, 8), wrap, 1e6 if sick else 1.0

    def forward(self, x):
        return self.wrap(self.score(x) * self.scale)


READ = {
    "distribution": lambda logits: torch.distributions.Normal(logits, 1.0, validate_args=False),
    "csr": lambda logits: logits.float().to_sparse_csr(),
    "numpy": lambda logits: {"logits": logits.detach().numpy()},
    "closure": lambda logits: {"later": lambda: logits},
}
UNREAD = {
    "generator": lambda logits: ({"row": row} for row in logits),
    "masked": lambda logits: torch.masked.masked_tensor(logits, torch.ones_like(logits).bool()),
}


for name, wrap in READ.items():
    rows(MUL, BATCH, wrap, True, name=f"overflow in {name}", fixes=False, **QUIETLY)(Head)
    rows("healthy", BATCH, wrap, False, name=name, **QUIETLY)(Head)
for name, wrap in UNREAD.items():
    for sick in (True, False):
        rows("cannot-tell", BATCH, wrap, sick, name=f"{name} {sick}", says=("cannot be inspected",), **QUIETLY)(Head)


def as_well(model, batch):
    return model(batch["x"]), model.kept


@rows("cannot-tell", BATCH, 1.0, says=("returned no floating-point values",))
@rows("cannot-tell", BATCH, 1e6, says=("returned no floating-point values",))
@rows(MUL, BATCH, 1e6, name="what the call returns as well", call=as_well)
class Keeping(nn.Linear):
    """What a model keeps to itself is looked at where a call returns it."""

    def __init__(self, factor):
        super().__init__(8, 8)
        self.factor = factor

    def forward(self, x):
        self.kept = super().forward(x) * self.factor


@rows("cannot-tell", BATCH, 8, 8)
class NanThatCameToNothing(nn.Linear):
    def forward(self, x):
        made = super().forward(x)
        return iter(torch.nan_to_num((made - made) / (made - made)))


@rows("cannot-tell", {**BATCH, "loss": float("nan")}, 8, 8, name="saved loss")
@rows("cannot-tell", {**BATCH, "train_loss": torch.tensor(float("inf"))}, 8, 8, name="saved loss of another name")
@rows("healthy", {**BATCH, "loss": 0.5}, 8, 8, name="finite loss")
@rows("cannot-tell", {**BATCH, "loss_scale": float("inf")}, 8, 8, name="loss scale")
@rows(
    "not-reproduced",
    {**BATCH, "loss": float("nan")},
    8,
    8,
    name="saved loss that does not come back",
    loss=lambda output, _: output.mean(),
)
class Plain(nn.Linear):
    pass
