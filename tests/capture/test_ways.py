"""Ways of training that docs/capture.md has a recipe for and no other file here tests: GANs, closed trainers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor import Recorder
from nandoctor.dumps.reader import read_dump


class Discriminator(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(width, 1))

    def forward(self, x):
        return torch.sigmoid(self.layers(x))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, noise):
        return self.layer(noise)


def discriminator_loss(outputs, batch):
    """`outputs` are those of the two calls: of what is real, and of what was made up."""
    real, made_up = outputs
    return -(torch.log(real) + torch.log(1 - made_up)).mean()


def train(nets, recorders, guilty):
    discriminator, generator = nets
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in nets]
    for number in range(6):
        real, noise = torch.randn(8, 4), torch.randn(8, 2)
        if number == 3 and guilty == "discriminator":
            real[5] = 1e5  # sigmoid gives exactly 0 or 1
        with recorders[0].step({"real": real}):
            loss = discriminator_loss([discriminator(real), discriminator(generator(noise).detach())], None)
            recorders[0].watch(loss)
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
        if number == 3 and guilty == "generator":
            noise[2] = 1e30
        with recorders[1].step({"noise": noise}):
            made_up = generator(noise)
            loss = -torch.log(discriminator(made_up.square() * made_up)).mean()
            recorders[1].watch(loss)
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()


@pytest.mark.parametrize("guilty", ["discriminator", "generator"])
def test_of_a_gan_the_step_of_the_guilty_net_is_saved(tmp_path, guilty):
    torch.manual_seed(0)
    nets = Discriminator(), Generator()
    recorders = [
        Recorder(nets[0], folder=tmp_path / "d", loss=discriminator_loss, arguments={"width": 8}, in_a_row=1),
        Recorder(nets[1], folder=tmp_path / "g", in_a_row=1),
    ]
    with pytest.raises(nandoctor.NonFiniteTrainingError, match="step 3:"):
        train(nets, recorders, guilty)
    [path] = [path for recorder in recorders for path in recorder.written]
    assert path.parent.name == guilty[0]
    if guilty == "discriminator":
        report = nandoctor.replay(path, model=Discriminator, loss=discriminator_loss, fixes=False).report
        assert report.reproduction.grade == "exact"
        assert (report.origin.phase, report.origin.op, report.cause.code) == ("loss", "log", "log-of-zero")
    else:
        report = nandoctor.replay(path, model=Generator, fixes=False).report
        assert report.verdict == "cannot-tell"  # its own output is finite, and the loss is not in the file
        assert read_dump(path).scalars["reason"] == "loss"
