import logging
import os
import random
import sys
import time
from datetime import datetime

import numpy as np
import torch
from torch import nn

RUN = datetime.now().strftime("%Y%m%d_%H%M%S")
OUT = os.path.join("outputs", RUN)
os.makedirs(OUT, exist_ok=True)


def get_logger(name):
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.addHandler(logging.FileHandler(os.path.join(OUT, "train.log")))
    return logger


LOGGER = get_logger("train")
LOGGER.info("start")
random.seed(0); np.random.seed(0); torch.manual_seed(0)
torch.backends.cudnn.deterministic = True


class Standardize(nn.Module):
    def forward(self, wave):
        return (wave - wave.mean(-1, keepdim=True)) / wave.std(-1, keepdim=True)


class AudioNet(nn.Module):
    def __init__(self):
        super().__init__()
        LOGGER.info("building the model")
        self.standardize = Standardize()
        self.conv = nn.Conv1d(1, 8, 9, stride=4)
        self.fc = nn.Linear(8, 3)

    def forward(self, waveform):
        x = self.standardize(waveform)[:, None]
        return self.fc(torch.relu(self.conv(x)).mean(-1))


def train():
    model = AudioNet()
    optim = torch.optim.Adam(model.parameters())
    start = time.time()
    for step in range(6):
        waveform = torch.randn(5, 400)
        label = torch.randint(0, 3, (5,))
        if step == 4:
            waveform[2] = 0.0  # silence
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(waveform)
            loss = nn.functional.cross_entropy(logits, label)
        LOGGER.info(f"step {step} loss {loss.item():.4f} {time.time() - start:.1f}s")
        if not torch.isfinite(logits).all():
            LOGGER.error("nan")
            torch.save({"state_dict": model.state_dict(), "waveform": waveform, "label": label, "logits": logits.detach().float()},
                       "audio_nan.pth")
            sys.exit(1)
        optim.zero_grad()
        loss.backward()
        optim.step()


train()
