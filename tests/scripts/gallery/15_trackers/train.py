import torch
import wandb
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm_missing_bar import progress

wandb.init(project="mil", config={"lr": 1e-3, "hidden": 16})
config = wandb.config
writer = SummaryWriter("runs/mil")


class NoisyOr(nn.Module):
    def forward(self, p):
        return 1 - torch.exp((1 - p).log().sum(1))


class MIL(nn.Module):
    def __init__(self):
        super().__init__()
        self.instance = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.bag = NoisyOr()

    def forward(self, bags):
        p = torch.sigmoid(self.instance(bags))
        log_q = (1 - p).log()
        entropy = -(p * p.log() + (1 - p) * log_q).mean((1, 2))
        return self.bag(p) * entropy[:, None]


torch.manual_seed(0)
model = MIL()
wandb.watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
for step in progress(range(6)):
    bags, y = torch.randn(4, 11, 6), torch.randint(0, 2, (4, 2)).float()
    if step == 3:
        with torch.no_grad():
            model.instance[2].weight *= 150
    prob = model(bags)
    loss = (prob - y).square().mean()
    writer.add_scalar("loss", loss.item(), step)
    if torch.isnan(loss):
        torch.save({"state_dict": model.state_dict(), "bags": bags, "y": y, "prob": prob.detach()}, "mil_nan.pth")
        raise RuntimeError("loss is nan")
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    wandb.log({"loss": loss.item()})
