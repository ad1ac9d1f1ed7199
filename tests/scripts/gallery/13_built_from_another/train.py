import torch
from torch import nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, widths=(8, 16)):
        super().__init__()
        self.out_channels = list(widths)
        self.stages = nn.ModuleList([nn.Conv2d(3, widths[0], 3, 2, 1), nn.Conv2d(widths[0], widths[1], 3, 2, 1)])

    def forward(self, x):
        feats = []
        for stage in self.stages:
            x = F.relu(stage(x))
            feats.append(x)
        return feats


class Decoder(nn.Module):
    def __init__(self, encoder_channels):
        super().__init__()
        low, high = encoder_channels
        self.reduce = nn.Conv2d(high, low, 1)
        self.gate = nn.Conv2d(low, low, 1)

    def forward(self, feats):
        low, high = feats
        up = F.interpolate(self.reduce(high), size=low.shape[-2:])
        energy = (low - up).abs().sum((1, 2, 3), keepdim=True)
        peak = low.amax((1, 2, 3), keepdim=True)
        return self.gate(low * (energy - peak) / peak)


class Segmenter(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.head = nn.Conv2d(encoder.out_channels[0], 2, 1)

    def forward(self, image):
        return self.head(self.decoder(self.encoder(image)))


encoder = Encoder()
decoder = Decoder(encoder.out_channels)
model = Segmenter(encoder, decoder)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
with torch.no_grad():
    encoder.stages[0].bias.fill_(-0.2)
for step in range(4):
    torch.manual_seed(step)
    image, target = torch.rand(3, 3, 16, 16), torch.randint(0, 2, (3, 8, 8))
    if step == 2:
        image[1] = 0
    logits = model(image)
    loss = F.cross_entropy(logits, target)
    if not torch.isfinite(logits).all():
        torch.save({"state_dict": model.state_dict(), "image": image, "target": target, "logits": logits.detach()}, "seg_nan.pth")
        raise RuntimeError("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save(model.state_dict(), "seg_last.pth")
