import torch

from .config import CFG
from .model import Net


def run():
    torch.manual_seed(0)
    model = Net(CFG)
    optimizer = torch.optim.Adam(model.parameters())
    for i in range(5):
        x, y = torch.randn(16, 8), torch.randint(0, CFG.classes, (16,))
        if i == 2:
            x[7] = 0
        with torch.autocast("cpu", dtype=torch.float16):
            logit = model(x)
        loss = torch.nn.functional.cross_entropy(logit.float(), y)
        if torch.isnan(logit).any():
            torch.save({"state_dict": model.state_dict(), "x": x.numpy(), "y": y.numpy(), "logit": logit.detach().numpy()}, "net_nan.pth")
            raise RuntimeError
        optimizer.zero_grad(); loss.backward(); optimizer.step()


run()
