import torch
from torch import nn

from .registry import register_model


class SqueezeExcite(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.fc = nn.Conv2d(ch, ch, 1)

    def forward(self, x):
        s = x.mean((2, 3), keepdim=True)
        energy = s * s * 1024.0
        return x * torch.sigmoid(self.fc(energy - energy.amax(1, keepdim=True)))


class TinyNet(nn.Module):
    def __init__(self, num_classes=1000, in_chans=3, width=8):
        super().__init__()
        self.conv_stem = nn.Conv2d(in_chans, width, 3, 2, 1)
        self.se = SqueezeExcite(width)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.classifier(self.se(self.conv_stem(x)).mean((2, 3)))


@register_model
def tiny_net(pretrained=False, **kwargs):
    return TinyNet(**kwargs)
