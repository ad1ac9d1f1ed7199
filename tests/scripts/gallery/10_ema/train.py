import copy
import torch
from torch import nn
import torch.nn.functional as F


class WhitenedStats(nn.Module):
    def forward(self, x):
        mean = x.mean((2, 3))
        std = torch.sqrt((x * x).mean((2, 3)) - mean * mean)
        return torch.cat([mean, std], 1)


class Regressor(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.conv = nn.Conv2d(1, ch, 3, bias=True)
        self.bn = nn.BatchNorm2d(ch)
        self.stats = WhitenedStats()
        self.out = nn.Linear(2 * ch, 1)

    def forward(self, img):
        return self.out(self.stats(self.bn(self.conv(img))))[:, 0]


class ModelEma:
    def __init__(self, model, decay=0.99):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    def update(self, model):
        with torch.no_grad():
            for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
                e.copy_(self.decay * e + (1 - self.decay) * m)


def train(steps=8):
    torch.manual_seed(5)
    model = Regressor()
    ema = ModelEma(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(steps):
        img, target = torch.rand(6, 1, 14, 14), torch.rand(6)
        if step >= 3:
            img[1:5] = 0.7123
        pred = model(img)
        loss = F.mse_loss(pred, target)
        if not torch.isfinite(pred).all():
            torch.save({"model": model.state_dict(), "ema": ema.module.state_dict(), "optimizer": optimizer.state_dict(),
                        "scaler": scaler.state_dict(), "step": step, "img": img, "target": target, "pred": pred.detach()},
                       "ckpt_nan.pth")
            raise RuntimeError("nan")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        ema.update(model)
        torch.save(ema.module.state_dict(), "ema.pth")


train()
