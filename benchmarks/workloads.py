"""The two models that everything is measured on, healthy and made to fail, with random weights from a fixed seed.

A `Workload` has the model's builder, its batch and its losses; `dump_of` writes the dump of a step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nandoctor.autocast.policy import Policy, apply_policy
from nandoctor.evidence.formats import FP16

CUDA = Policy(name="cuda", format=FP16)
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and one batch for it.

    `build` always makes the model with the same weights. `middle` is the path of a weight in the middle of the model
    that, scaled up, overflows in fp16 but not in fp32. `loss` and its gradients are finite; `steep_loss` has the same
    value and NaN gradients.
    """

    name: str
    description: str
    build: Callable[[], nn.Module]
    batch: Batch
    middle: str
    pick: Callable[[Any], torch.Tensor]

    def loss(self, output: Any, batch: Batch) -> torch.Tensor:
        """Return the mean square of the output."""
        return self.pick(output).float().square().mean()

    def steep_loss(self, output: Any, batch: Batch) -> torch.Tensor:
        """Return the same value, plus the root of a sum that is zero: its gradient is infinity times zero."""
        values = self.pick(output).float()
        return values.square().mean() + (values - values).abs().sum().sqrt()

    def build_sick(self) -> nn.Module:
        """Build the model with its middle weight scaled so that the layer's product exceeds 65504."""
        model = self.build()
        with torch.no_grad():
            model.get_parameter(self.middle).mul_(3e5)
        return model


@contextmanager
def dump_of(workload: Workload, model: torch.nn.Module) -> Iterator[Path]:
    """Yield the path of the dump that a training script under autocast would have written at this step."""
    torch.manual_seed(0)
    with torch.no_grad(), apply_policy(CUDA, torch.device("cpu")):
        logit = workload.pick(model.train()(**workload.batch))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.pth"
        torch.save({"state_dict": model.state_dict(), **workload.batch, "logit": logit}, path)
        yield path


def make_encoder() -> Workload:
    """Return an encoder of BERT-base's size with four layers (768 wide, 12 heads), on 2 x 128 tokens."""
    from transformers import BertConfig, BertModel

    def build() -> nn.Module:
        torch.manual_seed(0)
        return BertModel(BertConfig(num_hidden_layers=4), add_pooling_layer=False)

    generator = torch.Generator().manual_seed(0)
    batch = {
        "input_ids": torch.randint(1000, 30000, (2, 128), generator=generator),
        "attention_mask": torch.ones(2, 128, dtype=torch.long),
    }
    return Workload(
        name="encoder",
        description="four layers of BERT-base (768 wide, 12 heads), 2 x 128 tokens",
        build=build,
        batch=batch,
        middle="encoder.layer.1.intermediate.dense.weight",
        pick=lambda output: output.last_hidden_state,
    )


def make_unet() -> Workload:
    """Return a plain U-Net (32, 64 and 64 channels, batch norm), on 4 x 3 x 128 x 128 pixels."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return UNet()

    image = torch.rand(4, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    return Workload(
        name="U-Net",
        description="32 to 64 channels, two levels, batch norm, 4 x 3 x 128 x 128 pixels",
        build=build,
        batch={"image": image},
        middle="down2.0.weight",
        pick=lambda output: output,
    )


class UNet(nn.Module):
    """Two levels down, two up, skips concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = _double_convolution(3, 32)
        self.down1 = _double_convolution(32, 64)
        self.down2 = _double_convolution(64, 64)
        self.up1 = _double_convolution(128, 32)
        self.up2 = _double_convolution(64, 32)
        self.head = nn.Conv2d(32, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return a logit for each pixel: (N, 3, H, W) to (N, 1, H, W)."""
        full = self.enter(image)
        half = self.down1(F.max_pool2d(full, 2))
        quarter = self.down2(F.max_pool2d(half, 2))
        half = self.up1(torch.cat([half, F.interpolate(quarter, scale_factor=2)], dim=1))
        full = self.up2(torch.cat([full, F.interpolate(half, scale_factor=2)], dim=1))
        return self.head(full)


def _double_convolution(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, 3, padding=1),
        nn.BatchNorm2d(num_out),
        nn.ReLU(),
        nn.Conv2d(num_out, num_out, 3, padding=1),
        nn.BatchNorm2d(num_out),
        nn.ReLU(),
    )
