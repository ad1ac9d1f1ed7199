import torch
from torch import nn

FEATURES = 5


class Calibrate(nn.Module):
    def forward(self, x, gain):
        return x * torch.rsqrt(gain.mean(1))[:, None]


class TwoBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.tab = nn.Linear(FEATURES, 6)
        self.calibrate = Calibrate()
        self.head = nn.Linear(12, 1)

    def forward(self, image, tabular):
        a = self.calibrate(self.cnn(image), tabular)
        return self.head(torch.cat([a, self.tab(tabular)], 1))


torch.manual_seed(0)
model = TwoBranch()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    images, tab_features, targets = torch.rand(6, 1, 12, 12), torch.rand(6, FEATURES), torch.rand(6, 1)
    if step == 2:
        tab_features[3] -= 1
    logits = model(images, tab_features)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, targets)
    if not torch.isfinite(logits).all():
        torch.save({"state_dict": model.state_dict(), "images": images.numpy(), "tab_features": tab_features.numpy(),
                    "targets": targets.numpy(), "logits": logits.detach().numpy()}, "two_nan.pth")
        raise RuntimeError("non-finite output")
    optimizer.zero_grad(); loss.backward(); optimizer.step()
