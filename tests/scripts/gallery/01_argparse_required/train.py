import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description="train a segmentation model")
parser.add_argument("--data-dir", required=True)
parser.add_argument("--fold", type=int, required=True)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

os.makedirs("checkpoints", exist_ok=True)


class ChannelNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        mean = x.mean((2, 3), keepdim=True)
        var = ((x - mean) * (x - mean)).mean((2, 3), keepdim=True)
        return self.gain[:, None, None] * (x - mean) / torch.sqrt(var + 1e-8)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, args.width, 3, padding=1, padding_mode="replicate")
        self.norm = ChannelNorm(args.width)
        self.head = nn.Conv2d(args.width, 1, 1)

    def forward(self, image):
        return self.head(F.relu(self.norm(self.stem(image))))


model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
torch.manual_seed(args.fold)
for step in range(6):
    image = torch.rand(4, 3, 16, 16)
    mask = (torch.rand(4, 1, 16, 16) > 0.5).float()
    if step == 3:
        image[2] = 0.0
    with torch.autocast("cpu", dtype=torch.float16):
        logit = model(image)
    loss = F.binary_cross_entropy_with_logits(logit.float(), mask)
    if not torch.isfinite(logit).all():
        torch.save({"state_dict": model.state_dict(), "image": image.numpy(), "mask": mask.numpy(),
                    "logit": logit.detach().numpy()}, f"unet_fold{args.fold}_{step:04d}_nan.pth")
        raise RuntimeError("non-finite output")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save(model.state_dict(), "checkpoints/last.pth")
