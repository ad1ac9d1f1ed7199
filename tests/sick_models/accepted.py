"""The smallest known fix of every sick model: what the first verified fix has to be.

Each is an edit's kind and its place: a module, the source line, the constant and what it becomes. None stands for an
illness that no change of one operation fixes: lost weights, an argument that the program puts outside a domain, or a
value that float64 alone holds on its way and that every bound would change. A workaround replaces a value where the
formula has none and no limit either.
"""

# ruff: noqa: E501  (source lines as they stand)

ACCEPTED = {
    "product/decoder-feed-forward": "keep-module layers.1.feed.down",
    "product/patch-attention-scores": "keep-op scores = (before * self.query(x)) @ self.key(x).transpose(-2, -1) * after",
    "residual/vision-transformer": "keep-op return x + self.mlp(self.norm(x))",
    "residual/upscaler-in-place": "keep-module trunk.0 (forward alone) + keep-module trunk.1 (forward alone) + keep-module trunk.1.first",
    "gate/geglu": "keep-module late.narrow + keep-op return self.narrow(F.gelu(gate) * value)",
    "gate/dropout-scale": "keep-module drop",
    "square/rms-silent": "keep-op power = (x * x).mean(dim=-1, keepdim=True)",
    "square/channel-variance-silent": "keep-op spread = x.var(dim=(2, 3), keepdim=True)",
    "input/microscope-counts": "keep-module stem",
    "input/telemetry-clock": "keep-module clock",
    "long-sum/linear-attention": "keep-module blend (forward alone)",
    "long-sum/graph-hub": "keep-op return total.index_add(0, target, messages)",
    "exponential/softplus-by-hand": "stable-log return F.softplus(x) if self.stable else torch.log(1 + torch.exp(x))",
    "exponential/temperature": "keep-op return (similarity * self.logit_scale.exp()).softmax(dim=-1)",
    "sigmoid/spam": 'keep-op return {"probability": torch.sigmoid(self.last(F.relu(self.hidden(inputs["words"])))).squeeze(-1)}',
    "sigmoid/log-of-softmax": "stable-log return torch.log(scores.softmax(dim=-1))",
    "mask-constant/where": "set-argument -1e+09 -> None",
    "mask-constant/two-masks": "clamp both = padding.float() * lowest + blocked.float() * lowest",
    "full-row/multihead-attention": "keep-samples (2,)",
    "full-row/no-legal-move": 'unmask-rows return {"policy": F.log_softmax(logits, dim=-1).clamp(min=-100.0), "value": torch.tanh(self.value(body))}',
    "eps/digital-silence": "keep-op return torch.log(energy + self.eps)",
    "eps/relu-attention": "set-attribute ReluAttention.eps = 0.0001",
    "ratio/empty-sentence": "clamp return (words * mask.unsqueeze(-1)).sum(dim=1) / count",
    "ratio/no-organ": "clamp return (1 - 2 * overlap / (probability + organ).sum(dim=(1, 2, 3, 4))).mean()",
    "ratio/nothing-measured": 'clamp return (output - batch["depth"])[batch["valid"]].abs().mean()',
    "ratio/all-labels-ignored": 'clamp return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)',
    "domain/one-pass-variance": "keep-module moments",
    "domain/angle-with-itself": "clamp return torch.acos(cosine.clamp(-self.limit, self.limit) * 0.9999)",
    "form/multiplied-mask": "set-argument -inf -> -10000.0",
    "form/gated-mask": "workaround: clamp weights = (scores + self.gate * self.causal).softmax(dim=-1)",
    "singularity/same-signature": "clamp return torch.sqrt(difference.square().sum(dim=-1) + self.eps)",
    "singularity/identity-rotation": "clamp return torch.acos((trace - 1) / 2).mean()",
    "where/pair-distances": "clamp return torch.where(apart, torch.sqrt(safe), 0.0)",
    "where/click-rate": "clamp return torch.where(views > 0, clicks / divisor, 0.0)",
    "gradient/long-memory": "keep-module recur + keep-module hear",
    "gradient/small-denominator": "keep-module mix (forward alone)",
    "function/swish": "clamp grown_x = torch.exp(x.float())",
    "function/log-cosh": "clamp up, down = torch.exp(x.float()), torch.exp(-x.float())",
    "scale/bike-counts": "loss-scale 128",
    "scale/two-towers": "loss-scale 4096",
    "weights/one-nan": None,
    "weights/embedding-row": None,
    "buffers/running-variance": "reset-buffers stages.1.1.running_var",
    "buffers/codebook": "reset-buffers book.codes",
    "batch/nan-pixel": "keep-samples (0,)",
    "batch/inf-in-a-table": "keep-samples (0, 1)",
    "batch/nan-target": "keep-samples (1,)",
    "batch/inf-target": "keep-samples (0, 2)",
    "optimizer/unseen-words": "keep-module the model",
    "optimizer/small-gradient": "keep-module the model",
}
