"""Time series transformer."""
import argparse
import math
import torch
from torch import nn


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--d_model", type=int, default=32)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--epochs", type=int, default=2)
    return p.parse_args()


opt = get_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        scores = scores / math.sqrt(d // self.heads)
        out = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, n, d)
        return self.proj(out)


class Model(nn.Module):
    def __init__(self, d_model=opt.d_model, heads=opt.heads):
        super().__init__()
        self.embed = nn.Linear(5, d_model)
        self.attn = Attention(d_model, heads)
        self.out = nn.Linear(d_model, 1)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.attn(h)
        return self.out(h).squeeze(-1)


def main():
    torch.manual_seed(0)
    model = Model().to(device)
    optim = torch.optim.Adam(model.parameters(), lr=3e-4)
    for epoch in range(opt.epochs):
        for it in range(4):
            x, y = torch.randn(8, 12, 5, device=device), torch.randn(8, 12, device=device)
            if epoch == 1 and it == 2:
                x[5] *= 4000
            with torch.autocast(device.type, dtype=torch.float16):
                pred = model(x)
                loss = nn.functional.mse_loss(pred.float(), y)
            if not torch.isfinite(pred).all():
                torch.save(dict(state_dict=model.state_dict(), x=x.cpu(), y=y.cpu(), pred=pred.detach().cpu()), "ts_nan.pth")
                raise SystemExit("nan")
            optim.zero_grad(); loss.backward(); optim.step()


main()
