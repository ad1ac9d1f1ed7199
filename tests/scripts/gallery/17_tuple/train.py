import torch
from torch import nn


class Decorrelate(nn.Module):
    def forward(self, x):
        x = x - x.mean(0)
        cov = x.t() @ x / (x.shape[0] - 1)
        return x @ torch.linalg.inv(torch.linalg.cholesky(cov + 1e-3 * torch.eye(cov.shape[0]))).t()


class Scaler(nn.Module):
    def forward(self, x):
        span = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
        return (x - x.amin(1, keepdim=True)) / span


class TabularNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaler = Scaler()
        self.layers = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 1))

    def forward(self, x):
        return self.layers(self.scaler(x))


def main():
    torch.manual_seed(0)
    model = TabularNet()
    opt = torch.optim.Adam(model.parameters())
    loader = [(torch.randn(8, 9), torch.rand(8, 1)) for _ in range(5)]
    loader[3][0][5] = 1.0
    for i, batch in enumerate(loader):
        images, targets = batch
        preds = model(images)
        loss = nn.functional.l1_loss(preds, targets)
        if torch.isnan(loss):
            torch.save((model.state_dict(), (images, targets), preds.detach()), f"step{i}_nan.pth")
            raise RuntimeError("nan loss")
        opt.zero_grad()
        loss.backward()
        opt.step()


main()
