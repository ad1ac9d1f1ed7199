import lightning as L
import torch
from torch import nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, dim, latent):
        super().__init__()
        self.enc = nn.Linear(dim, 2 * latent)
        self.dec = nn.Linear(latent, dim)

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, -1)
        sigma = torch.exp(logvar)
        z = mu + sigma * 0.1
        recon = self.dec(z)
        return recon / recon.norm(dim=-1, keepdim=True), mu, logvar


class LitVAE(L.LightningModule):
    def __init__(self, dim=20, latent=4, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.vae = VAE(dim, latent)

    def forward(self, x):
        return self.vae(x)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        recon, mu, logvar = self(x)
        loss = F.mse_loss(recon, x) + 1e-3 * (mu.square() + logvar.exp() - logvar).mean()
        if not torch.isfinite(loss):
            torch.save({"state_dict": self.state_dict(), "hyper_parameters": dict(self.hparams), "x": x, "recon": recon.detach()}, "vae_nan.pth")
            raise RuntimeError("nan")
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    L.seed_everything(0)
    lit = LitVAE(dim=16, latent=6)
    optimizer = lit.configure_optimizers()
    for i in range(5):
        x = torch.randn(8, 16)
        if i == 3:
            x[4] *= 500
        loss = lit.training_step((x, None), i)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
