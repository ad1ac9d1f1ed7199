import torch
from torch import nn


class MaskedPool(nn.Module):
    def forward(self, x, valid):
        total = (x * valid[..., None]).sum(1)
        return total / valid.sum(1, keepdim=True)


class Tagger(nn.Module):
    def __init__(self, in_dim, hidden, out_dim):
        super().__init__()
        self.rnn = nn.GRU(in_dim, hidden, batch_first=True)
        self.pool = MaskedPool()
        self.out = nn.Linear(hidden, out_dim)

    def forward(self, features, valid):
        x, _ = self.rnn(features)
        return self.out(self.pool(x, valid))


def build_model(in_dim, hidden, out_dim):
    return Tagger(in_dim=in_dim, hidden=hidden, out_dim=out_dim)
