import os, gc, random
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class CFG:
    seed = 42
    img_size = 24
    in_chans = 3
    target_size = 7
    hidden = 24
    gem_p = 3
    epochs = 3
    debug = False
    device = "cpu"


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


seed_everything(CFG.seed)


class GeM(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        x = x.clamp(min=self.eps)
        cubes = x * x * x
        pooled = cubes.mean((-2, -1))
        return pooled.float().pow(1.0 / 3)


class CustomModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.conv1 = nn.Conv2d(cfg.in_chans, cfg.hidden, 3, padding=1)
        self.conv2 = nn.Conv2d(cfg.hidden, cfg.hidden, 3, padding=1)
        self.pool = GeM()
        self.fc = nn.Linear(cfg.hidden, cfg.target_size)

    def forward(self, image):
        x = F.relu(self.conv1(image))
        x = F.relu(self.conv2(x))
        return self.fc(self.pool(x))


def train_fn():
    model = CustomModel(CFG).to(CFG.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(CFG.epochs * 2):
        image = torch.rand(4, CFG.in_chans, CFG.img_size, CFG.img_size) * (1 if step < 4 else 2000)
        label = torch.randint(CFG.target_size, (4,))
        with torch.autocast("cpu", dtype=torch.float16):
            logit = model(image)
        loss = F.cross_entropy(logit.float(), label)
        if not torch.isfinite(logit).all():
            torch.save({"state_dict": model.state_dict(), "image": image.numpy(), "label": label.numpy(),
                        "logit": logit.detach().float().numpy()}, "fold0_nan.pth")
            raise RuntimeError("nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save(model.state_dict(), "fold0_best.pth")


train_fn()
