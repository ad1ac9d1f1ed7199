import json
import sys
from pathlib import Path

import torch

from models import build_model

cfg = json.loads(Path("configs/base.json").read_text())
torch.manual_seed(0)
model = build_model(**cfg["model"])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    features = torch.randn(cfg["bs"], 9, 12)
    valid = (torch.rand(cfg["bs"], 9) > 0.3).float()
    if step == 3:
        valid[1] = 0
    target = torch.randint(0, 3, (cfg["bs"],))
    out = model(features, valid)
    loss = torch.nn.functional.cross_entropy(out, target)
    if not torch.isfinite(out).all():
        torch.save({"state_dict": model.state_dict(), "features": features, "valid": valid, "target": target, "out": out.detach()},
                   "tagger_nan.pth")
        sys.exit("nan at step %d" % step)
    opt.zero_grad(); loss.backward(); opt.step()
