import torch
from torch import nn


class Fusion(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.img = nn.Linear(16, dim)
        self.meta = nn.Linear(4, dim)

    def forward(self, image, meta):
        a, b = self.img(image), self.meta(meta)
        ratio = a / b.relu().sum(1, keepdim=True)
        return ratio - ratio.mean(1, keepdim=True)


class MultiModal(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.fusion = Fusion(dim)
        self.cls = nn.Linear(dim, 3)
        self.reg = nn.Linear(dim, 1)

    def forward(self, image, meta):
        z = self.fusion(image, meta)
        return {"cls": self.cls(z), "reg": self.reg(z)}


if __name__ == "__main__":
    torch.manual_seed(0)
    model = MultiModal()
    with torch.no_grad():
        model.fusion.meta.bias.fill_(0)
    opt = torch.optim.SGD(model.parameters(), lr=0)
    for step in range(4):
        batch = {"inputs": {"image": torch.randn(5, 16), "meta": torch.rand(5, 4)},
                 "targets": {"cls": torch.randint(0, 3, (5,)), "reg": torch.rand(5, 1)}, "id": ["a", "b", "c", "d", "e"]}
        if step == 2:
            batch["inputs"]["meta"][0] = 0
        out = model(**batch["inputs"])
        loss = nn.functional.cross_entropy(out["cls"], batch["targets"]["cls"]) + (out["reg"] - batch["targets"]["reg"]).abs().mean()
        if not torch.isfinite(loss):
            torch.save({"state_dict": model.state_dict(), "batch": batch, "outputs": {k: v.detach() for k, v in out.items()}}, "mm_nan.pth")
            raise RuntimeError("loss")
        opt.zero_grad(); loss.backward(); opt.step()
