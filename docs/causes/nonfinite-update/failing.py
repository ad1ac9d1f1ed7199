"""The warm-up divides by a number of steps that is 0, so the learning rate is infinite."""

import torch
from torch import nn

import nandoctor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(x)


def loss_of(output, batch):
    return output.float().square().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    model, warmup = Net(), torch.tensor(0.0)
    recorder = nandoctor.Recorder(model, loss=loss_of, threshold=1, folder="dumps")
    optimizer = torch.optim.SGD(model.parameters(), lr=float(0.1 / warmup))
    batch = {"x": torch.randn(4, 8)}
    with recorder.step(batch):
        loss = loss_of(model(batch["x"]), batch)
        recorder.watch(loss)
        loss.backward()
        optimizer.step()
    recorder.close()
