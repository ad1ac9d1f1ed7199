"""The same training with the norm in fp32: the fix of docs/tutorial.md. It needs torch and nandoctor, no GPU."""

import torch
from torch import nn
from torch.nn import functional as F

import nandoctor


class Norm(nn.Module):
    """Divides every row by its root mean square."""

    def forward(self, x):
        x = x.float()  # 1e-8 is zero in fp16
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 64, bias=False)
        self.norm = Norm()
        self.head = nn.Linear(64, 3)

    def forward(self, features):
        return self.head(F.relu(self.norm(self.embed(features))))


def loss(output, batch):
    return F.cross_entropy(output, batch["target"])


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(16, 12, generator=generator)
    if step == 7:
        features[5] = 0  # a customer without a single purchase
    return {"features": features, "target": features[:, :3].argmax(-1)}


def main():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        batch = make_batch(step)
        with nandoctor.cuda_autocast():  # on a GPU: torch.autocast("cuda", dtype=torch.float16)
            logit = model(batch["features"])
        if not torch.isfinite(logit).all():
            arrays = {name: array.numpy() for name, array in batch.items()}
            torch.save({"state_dict": model.state_dict(), **arrays, "logit": logit.detach().numpy()}, "nan.pth")
            raise SystemExit(f"step {step}: non-finite output, wrote nan.pth")
        loss(logit.float(), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
