"""Bugs in losses and layers for images, spectra and waves."""

from __future__ import annotations

from functools import partial

import torch
from sick_models import LOSS
from sick_models.case import Batch, rand, randn, seeded
from torch import Tensor, nn

from real_bugs.bug import Bug
from real_bugs.parts import Gain, mean


class Restore(nn.Module):
    """Images -> restored images and their MS-SSIM to the target, as a model that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.restore = nn.Conv2d(1, 1, 1)
        nn.init.constant_(self.restore.weight, 1.0)
        nn.init.zeros_(self.restore.bias)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        """One similarity for each image."""
        from pytorch_msssim import ms_ssim

        similarity: Tensor = ms_ssim(self.restore(image).float(), target, data_range=1, size_average=False)
        return similarity


class Listener(Gain):
    """Waves through a learned gain -> the magnitudes of their spectrogram."""

    def __init__(self) -> None:
        super().__init__()
        from nnAudio.features.stft import STFT

        self.stft = STFT(n_fft=32, hop_length=16, output_format="Magnitude", verbose=False)

    def forward(self, waves: Tensor) -> Tensor:
        """Magnitudes [batch, bins, frames]."""
        magnitudes: Tensor = self.stft(super().forward(waves))
        return magnitudes


class Features(Gain):
    """Images -> features of unit length at every pixel, as a perceptual loss takes them."""

    def forward(self, image: Tensor) -> Tensor:
        """Features [batch, channels, height, width]."""
        from monai.losses.perceptual import normalize_tensor

        normalized: Tensor = normalize_tensor(super().forward(image))
        return normalized


class Magnitudes(nn.Module):
    """Magnitudes of a spectrogram -> cleaned ones, none of which is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.clean = nn.Linear(4, 4)
        nn.init.eye_(self.clean.weight)
        nn.init.zeros_(self.clean.bias)

    def forward(self, noisy: Tensor) -> Tensor:
        """Magnitudes [batch, 4]."""
        return torch.relu(self.clean(noisy)).float()


def make_vision_transformer() -> nn.Module:
    """25 patches and a class token."""
    from vit_pytorch import ViT

    model: nn.Module = ViT(image_size=20, patch_size=4, num_classes=3, dim=8, depth=2, heads=2, mlp_dim=8, channels=1)
    return model


def magnitude_loss(output: Tensor, batch: Batch) -> Tensor:
    """The distance of log magnitudes."""
    from auraloss.freq import STFTMagnitudeLoss

    loss: Tensor = STFTMagnitudeLoss()(output, batch["clean"])
    return loss


def edge_loss(output: Tensor, batch: Batch) -> Tensor:
    """How much the edges of two pictures differ."""
    from piq import GMSDLoss

    loss: Tensor = GMSDLoss()(output.float(), batch["target"])
    return loss


def angle_loss(output: Tensor, batch: Batch) -> Tensor:
    """The mean angle between spectra."""
    from torchmetrics.functional.image import spectral_angle_mapper

    loss: Tensor = spectral_angle_mapper(output, batch["target"])
    return loss


def images(*, negative: bool) -> Batch:
    """Images, and targets that are their negatives or themselves with a little noise."""
    image = rand(2, 1, 192, 192)
    return {"image": image, "target": 1 - image if negative else image + 0.01 * rand(2, 1, 192, 192, seed=1)}


def waves(*, silent: bool) -> Batch:
    """Two waves, the second one perhaps silence."""
    both = randn(2, 128)
    both[1] *= not silent
    return {"waves": both}


def pictures(*, blank: bool) -> Batch:
    """Two pictures, the second one perhaps black, and targets."""
    image = 0.1 + 0.8 * rand(2, 1, 32, 32)
    image[1] *= not blank
    return {"image": image, "target": rand(2, 1, 32, 32, seed=1)}


def spectra(*, black: bool) -> Batch:
    """Spectra of 8 x 8 pixels, one pixel of the second image perhaps black."""
    image = 0.1 + rand(2, 3, 8, 8)
    image[1, :, 5, 3] *= not black
    return {"image": image, "target": 0.1 + rand(2, 3, 8, 8, seed=1)}


def magnitudes(*, silent: bool) -> Batch:
    """Magnitudes of four bins, one of the second frame perhaps silent."""
    noisy = 0.1 + rand(3, 4)
    noisy[1, 2] *= not silent
    return {"noisy": noisy, "clean": torch.full((3, 4), 0.5)}


def patches(*, padded: bool) -> Batch:
    """Two images of 5 x 5 patches, the lower rows of the second perhaps padding."""
    real = torch.ones(2, 5, 5, dtype=torch.bool)
    real[1, 2:] = not padded
    return {"image": rand(2, 1, 20, 20), "real": real}


BUGS: tuple[Bug, ...] = (
    Bug(
        title="pytorch-msssim: anti-correlated images",
        url="https://github.com/VainF/pytorch-msssim/issues/7",
        packages=("pytorch-msssim==0.1.5",),
        model=Restore,
        inputs=("image", "target"),
        batch=partial(images, negative=True),
        healthy_batch=partial(images, negative=False),
        reason="the contrast of negatives is negative, and its power to a fraction is not a real number",
        upstream="version 0.2 replaces negative contrasts by 0",
        upstream_replaces=True,
        op="pow",
        line="msssim_val = torch.prod((mcs[:-1] ** weights[:-1].unsqueeze(1))",
        cause="invalid-domain",
    ),
    Bug(
        title="nnAudio: silence",
        url="https://github.com/KinWaiCheuk/nnAudio/issues/138",
        packages=("nnAudio==0.3.3", "scipy==1.14.1"),
        model=Listener,
        inputs=("waves",),
        batch=partial(waves, silent=True),
        healthy_batch=partial(waves, silent=False),
        loss=mean,
        reason="the derivative of sqrt at the power of silence, 0, is infinite",
        phase="backward",
        module="stft",
        op="sqrt",
        line="return torch.sqrt(spec)",
        cause="gradient-singularity",
    ),
    Bug(
        title="monai: features of a black pixel",
        url="https://github.com/Project-MONAI/MONAI/pull/8982",
        packages=("monai==1.3.0",),
        model=Features,
        inputs=("image",),
        batch=partial(spectra, black=True),
        healthy_batch=partial(spectra, black=False),
        loss=mean,
        reason="the length of the features of a black pixel is sqrt(0), whose derivative is infinite",
        upstream="the eps is added inside of the root",
        phase="backward",
        op="sqrt",
        line="norm_factor = torch.sqrt(torch.sum(x**2, dim=1, keepdim=True))",
        cause="gradient-singularity",
    ),
    Bug(
        title="auraloss: the logarithm of a silent bin",
        url="https://github.com/csteinmetz1/auraloss/issues/63",
        packages=("auraloss==0.4.0",),
        model=Magnitudes,
        inputs=("noisy",),
        batch=partial(magnitudes, silent=True),
        healthy_batch=partial(magnitudes, silent=False),
        loss=magnitude_loss,
        reason="the magnitude of a silent bin is 0, and the loss takes its logarithm",
        upstream="pull request 68 adds an eps to the argument of the logarithm",
        upstream_replaces=True,
        phase="loss",
        module=LOSS,
        op="log",
        line="x_mag = torch.log(x_mag)",
        cause="log-of-zero",
    ),
    Bug(
        title="piq: the edges of a blank picture",
        url="https://github.com/photosynthesis-team/piq/issues/308",
        packages=("piq==0.7.0", "torchvision==0.2.0", "six==1.16.0", "scipy==1.14.1"),
        model=Gain,
        inputs=("image",),
        batch=partial(pictures, blank=True),
        healthy_batch=partial(pictures, blank=False),
        loss=edge_loss,
        reason="a blank picture has no edges: the derivative of sqrt at the sum of their squares, 0, is infinite",
        phase="backward",
        module=LOSS,
        op="sqrt",
        line="return torch.sqrt(torch.sum(grads ** 2, dim=-3, keepdim=True))",
        cause="gradient-singularity",
    ),
    Bug(
        title="torchmetrics: the angle of a black pixel",
        url="https://github.com/Lightning-AI/torchmetrics/issues/3322",
        packages=("torchmetrics==1.8.0",),
        model=Gain,
        inputs=("image",),
        batch=partial(spectra, black=True),
        healthy_batch=partial(spectra, black=False),
        loss=angle_loss,
        reason="the spectrum of a black pixel has length 0, and the cosine divides by it",
        phase="loss",
        module=LOSS,
        op="div",
        line="sam_score = torch.clamp(dot_product / (preds_norm * target_norm), -1, 1).acos()",
        cause="division-by-zero",
    ),
    Bug(
        title="vit-pytorch: patches of padding",
        url="https://github.com/lucidrains/vit-pytorch/issues/26",
        packages=("vit-pytorch==0.2.6", "einops==0.8.0"),
        model=seeded(make_vision_transformer),
        inputs=("image", "real"),
        batch=partial(patches, padded=True),
        healthy_batch=partial(patches, padded=False),
        reason="a patch of padding attends to nothing: its row of scores is -inf throughout",
        upstream="the mask's constant is the lowest number instead of -inf",
        module="transformer.layers.0.0.fn.fn",
        op="softmax",
        line="attn = dots.softmax(dim=-1)",
        cause="fully-masked-softmax",
    ),
)
