from dataclasses import dataclass, field
import torch
import torch.nn as nn


@dataclass
class ModelConfig:
    d_model: int = 32
    n_layers: int = 2
    vocab: int = 64
    dims: list = field(default_factory=lambda: [32, 128])


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm = nn.LayerNorm(cfg.d_model)
        self.up = nn.Linear(cfg.d_model, cfg.dims[1])
        self.gate = nn.Linear(cfg.d_model, cfg.dims[1])
        self.down = nn.Linear(cfg.dims[1], cfg.d_model)

    def forward(self, x):
        h = self.norm(x)
        hidden = self.up(h) * self.gate(h)
        return x + self.down(hidden)


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.tok = nn.Embedding(config.vocab, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.lm_head = nn.Linear(config.d_model, config.vocab)

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)
