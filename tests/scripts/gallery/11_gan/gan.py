import torch
import torch.nn as nn

nz, ngf, ndf = 16, 8, 8


class PixelNorm(nn.Module):
    def forward(self, x):
        return x / torch.sqrt((x ** 2).mean(1, keepdim=True))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf, 4, bias=False), nn.ReLU(True), PixelNorm(),
            nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(3, ndf, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(ndf, 1, 4))

    def forward(self, x):
        return self.main(x).view(-1)


torch.manual_seed(2)
netG, netD = Generator(), Discriminator()
optG = torch.optim.Adam(netG.parameters(), 2e-4)
optD = torch.optim.Adam(netD.parameters(), 2e-4)
bce = nn.BCEWithLogitsLoss()
for it in range(40):
    real = torch.rand(6, 3, 8, 8)
    z = torch.randn(6, nz, 1, 1)
    fake = netG(z)
    if not torch.isfinite(fake).all():
        torch.save({"netG": netG.state_dict(), "netD": netD.state_dict(), "optG": optG.state_dict(), "optD": optD.state_dict(),
                    "z": z, "real": real, "fake": fake.detach()}, "gan_nan.pth")
        raise SystemExit(1)
    lossD = bce(netD(real), torch.ones(6)) + bce(netD(fake.detach()), torch.zeros(6))
    optD.zero_grad(); lossD.backward(); optD.step()
    lossG = bce(netD(fake), torch.ones(6))
    optG.zero_grad(); lossG.backward(); optG.step()
