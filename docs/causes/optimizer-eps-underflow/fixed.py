"""The eps is one that fp16 holds."""

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 16).half(), nn.Linear(16, 3).half()

    def forward(self, x):
        return self.head(torch.relu(self.hidden(x.half())))


def loss(output, batch):
    return F.cross_entropy(output.float(), batch["label"])


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    model.hidden.bias.data[0] = -50  # a unit that no sample reaches
    batch = {"x": torch.randn(4, 8), "label": torch.tensor([0, 1, 2, 1])}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss(model(batch["x"]), batch).backward()
    optimizer.step()
    torch.save({"state_dict": before, "optimizer": optimizer.state_dict(), **batch}, "step.pth")
