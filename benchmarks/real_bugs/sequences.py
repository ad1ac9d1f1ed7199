"""Bugs in attention, losses over classes and spans, and forecasting."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sick_models import LOSS
from sick_models.case import Batch, rand, randn, seeded
from torch import Tensor, nn

from real_bugs.bug import Bug


class Chooser(nn.Module):
    """Scores over classes, of which those that are not on offer are -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 5)

    def forward(self, x: Tensor, closed: Tensor) -> Tensor:
        """Scores [batch, 5]."""
        return self.score(x).float().masked_fill(closed, -torch.inf)


class Pairs(nn.Module):
    """Features of candidate spans and of tokens -> logits of both."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.start, self.end = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)
        nn.init.ones_(self.pair.weight)

    def forward(self, spans: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Logits of spans [batch, queries, spans] and of the tokens that they begin and end with."""
        pairs, starts, ends = self.pair(spans), self.start(tokens), self.end(tokens)
        return {"pair": pairs.squeeze(-1), "start": starts.squeeze(-1), "end": ends.squeeze(-1)}


class Forecast(nn.Module):
    """A series through the attention of a temporal fusion transformer, each day looking at the days before it."""

    def __init__(self) -> None:
        super().__init__()
        from pytorch_forecasting.models.temporal_fusion_transformer import sub_modules

        self.attend = sub_modules.InterpretableMultiHeadAttention(n_head=2, d_model=8)

    def forward(self, days: Tensor, hidden: Tensor) -> Tensor:
        """Features [batch, days, 8]."""
        output: Tensor = self.attend(days, days, days, hidden if hidden.any() else None)[0]
        return output


def make_linear_attention() -> nn.Module:
    """Causal attention whose keys are far below 0 where the features are far above."""
    from linear_attention_transformer.linear_attention_transformer import SelfAttention

    attention: nn.Module = SelfAttention(dim=8, heads=2, causal=True)
    nn.init.constant_(attention.to_k.weight, -1.0)
    return attention


def make_number_model() -> nn.Module:
    """A language model of tokens and the numbers that stand beside token 3."""
    from x_transformers import Decoder
    from x_transformers.xval import XValAutoregressiveWrapper, XValTransformerWrapper

    layers = Decoder(dim=16, depth=1, heads=2)
    model = XValTransformerWrapper(num_tokens=6, numerical_token_id=3, max_seq_len=8, attn_layers=layers)
    wrapper: nn.Module = XValAutoregressiveWrapper(model)
    return wrapper


def sparse_loss(output: Tensor, batch: Batch) -> Tensor:
    """The mean of entmax's loss."""
    from entmax import sparsemax_loss

    loss: Tensor = sparsemax_loss(output, batch["label"]).mean()
    return loss


def consistency(output: Any, batch: Batch) -> Tensor:
    """How far the logits of spans and of tokens disagree."""
    from gliner2.models.boundary import losses

    keep = torch.ones_like(output["start"], dtype=torch.bool)
    loss: Tensor = losses.marginal_pair_consistency_loss(
        output["pair"], batch["places"], batch["valid"], output["start"], output["end"], keep
    )
    return loss


def choices(*, closed: bool) -> Batch:
    """Six features, one class that may be closed, and labels among the others."""
    hidden = torch.zeros(4, 5, dtype=torch.bool)
    hidden[:, 4] = closed
    return {"x": randn(4, 6), "closed": hidden, "label": torch.tensor([0, 1, 2, 3])}


def spans(*, certain: bool) -> Batch:
    """Three spans over five tokens for one query, one of them perhaps with a logit far above the others."""
    features = 0.5 * randn(1, 1, 3, 4)
    features[0, 0, 1] = 40.0 if certain else 0.4
    places = torch.tensor([[[[0, 1], [1, 3], [2, 4]]]])
    valid = torch.ones(1, 1, 3, dtype=torch.bool)
    return {"spans": features, "tokens": randn(1, 1, 5, 4, seed=1), "places": places, "valid": valid}


def series(*, masked: bool) -> Batch:
    """Three series of five days, and which days are hidden from which."""
    later = torch.ones(5, 5, dtype=torch.bool).triu(1) & masked
    return {"days": randn(3, 5, 8), "hidden": later.expand(3, 5, 5).clone()}


def sentences(*, beside_words: float) -> Batch:
    """Two sentences: the numbers of token 3 are 0.7, and beside every other token stands this."""
    tokens = torch.tensor([[1, 3, 2, 3, 4], [2, 2, 3, 1, 5]])
    return {"tokens": tokens, "numbers": torch.where(tokens == 3, 0.7, beside_words)}


BUGS: tuple[Bug, ...] = (
    Bug(
        title="entmax: a class that is closed",
        url="https://github.com/deep-spin/entmax/issues/9",
        packages=("entmax==1.3",),
        model=Chooser,
        inputs=("x", "closed"),
        batch=partial(choices, closed=True),
        healthy_batch=partial(choices, closed=False),
        loss=sparse_loss,
        reason="the probability of the closed class is 0 and its score -inf: their product is NaN",
        phase="loss",
        module=LOSS,
        op="einsum",
        line='loss += torch.einsum("ij,ij->i", p_star, X)',
        cause="indeterminate-form",
    ),
    Bug(
        title="gliner2: a bound that fp16 rounds to one",
        url="https://github.com/fastino-ai/GLiNER2/pull/155",
        packages=(
            "gliner2==2.0.0",
            "requests==2.32.3",
            "urllib3==2.2.3",
            "charset-normalizer==3.3.2",
            "certifi==2024.8.30",
        ),
        model=seeded(Pairs),
        inputs=("spans", "tokens"),
        batch=partial(spans, certain=True),
        healthy_batch=partial(spans, certain=False),
        loss=consistency,
        reason="1 - 1e-6 is 1 in fp16, so the bound keeps nothing from log1p(-1)",
        upstream="the loss is computed in fp32",
        verdict="precision",
        phase="backward",
        module=LOSS,
        op="log1p",
        line="log_survival = torch.log1p(-probabilities.clamp(max=1.0 - 1e-6))",
        cause="eps-underflow",
    ),
    Bug(
        title="linear-attention-transformer: keys that fp16 cannot hold",
        url="https://github.com/lucidrains/linear-attention-transformer/issues/6",
        packages=(
            "linear-attention-transformer==0.18.0",
            "linformer==0.2.1",
            "product-key-memory==0.1.10",
            "axial-positional-embedding==0.2.1",
            "local-attention==1.2.1",
            "einops==0.8.0",
        ),
        model=seeded(make_linear_attention),
        inputs=("x",),
        batch=lambda: {"x": 2 + rand(2, 4, 8)},
        healthy_batch=lambda: {"x": randn(2, 4, 8)},
        reason="exp of the keys, near -20, is rounded to 0 by the cast to fp16; the denominator is its sum",
        upstream="version 0.18.1 adds an eps to the sums of keys",
        upstream_replaces=True,
        verdict="precision",
        op="reciprocal",
        line="D_inv = 1. / einsum('bhud,bhund->bhun', b_k_cumsum, b_q)",
        cause="division-by-zero",
    ),
    Bug(
        title="pytorch-forecasting: the constant of a mask",
        url="https://github.com/sktime/pytorch-forecasting/issues/1325",
        packages=(
            "pytorch-forecasting==1.3.0",
            "scikit-learn==1.7.2",
            "joblib==1.5.2",
            "threadpoolctl==3.6.0",
            "scipy==1.14.1",
        ),
        model=seeded(Forecast),
        inputs=("days", "hidden"),
        batch=partial(series, masked=True),
        healthy_batch=partial(series, masked=False),
        reason="-1e9 is past fp16's range, and masked_fill of fp16 scores raises",
        upstream="the constant is a parameter, and -inf by default",
        verdict="precision",
        module="attend.attention",
        op="masked_fill",
        line="attn = attn.masked_fill(mask, -1e9)",
        cause="mask-constant-overflow",
    ),
    Bug(
        title="x-transformers: NaN beside tokens that are no numbers",
        url="https://github.com/lucidrains/x-transformers/commit/1bfe0157b6b246b705e729b70ab6f36d78f0912a",
        packages=("x-transformers==1.27.20", "einops==0.8.0"),
        model=seeded(make_number_model),
        inputs=("tokens", "numbers"),
        batch=partial(sentences, beside_words=float("nan")),
        healthy_batch=partial(sentences, beside_words=0.0),
        reason="the package writes NaN where no number stands, selects it away from the input, and not from the target",
        upstream="the target is masked as the input is",
        verdict="input",
        phase="input",
        cause="poisoned-target",
    ),
)
