"""Tensor classes, and modes of checkpoints, that answer each operation themselves: their operations are traced too."""

from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from strangers.rows import Rows
from strangers.visits import mean_square, normal

rows = Rows()


class Scaled(torch.Tensor):
    """fp8 numbers with a scale that refuse to become fp32, as torchao's do; `__tensor_flatten__` lists the parts."""

    @staticmethod
    def __new__(cls, data, scale, dtype):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype)
        made.data8, made.scale = data, scale
        return made

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is torch.ops.aten._to_copy.default:
            assert kwargs["dtype"] in (torch.float16, torch.bfloat16), "only under autocast"
            return cls(args[0].data8, args[0].scale, kwargs["dtype"])
        dtype = next(arg.dtype for arg in args if isinstance(arg, cls))

        def widen(value):
            is_tensor = isinstance(value, torch.Tensor)
            value = value.data8.float() / value.scale if isinstance(value, cls) else value
            return value.float() if is_tensor else value

        return op(*tree_map(widen, args), **tree_map(widen, kwargs or {})).to(dtype)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        scale = 400 / x.detach().float().abs().max()
        return torch.mm(Scaled((x.float() * scale).to(torch.float8_e4m3fn), scale, x.dtype), weight.t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient.to(x.dtype) @ weight.to(x.dtype), gradient.t().float() @ x.float()


class InFp8(nn.Linear):
    def forward(self, x):
        return Rounded.apply(x, self.weight)


class Opaque(torch.Tensor):
    """Numbers that nobody else is told how to find."""

    @staticmethod
    def __new__(cls, inside):
        made = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        plain = [
            tree_map(lambda value: value.inside if isinstance(value, cls) else value, part) for part in (args, kwargs)
        ]
        return op(*plain[0], **(plain[1] or {}))


class Hiding(nn.Linear):
    def forward(self, x):
        return super().forward(Opaque(x))


class Selective(nn.Linear):
    def forward(self, x):
        def choose(context, op, *args, **kwargs):
            return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, choose)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


class Ragged(nn.Linear):
    def forward(self, x):
        rows = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        return super().forward(rows).values()


class Net(nn.Module):
    def __init__(self, layer, before, after):
        super().__init__()
        self.entry, self.layer, self.before, self.after = nn.Linear(8, 8), layer(8, 8), before, after

    def forward(self, x):
        h = self.layer(self.entry(x) * self.before)
        return h * self.after


LAYERS = (InFp8, Hiding, Selective, Ragged)
BATCH, MUL = {"x": normal(4, 8)}, "precision . mul elementwise-overflow"
QUIET = {"never": ("ASSERT", "could not be traced"), "loss": mean_square}
for layer in LAYERS:
    rows("healthy", BATCH, layer, 1.0, 1.0, **QUIET)(Net)
    rows(MUL, BATCH, layer, 1.0, 1e6, line="return h * self.after", **QUIET)(Net)
    rows(MUL, BATCH, layer, 1e6, 1.0, line="h = self.layer(self.entry(x) * self.before)", **QUIET)(Net)


@rows("state * * poisoned-weights", BATCH)
def nan_weight_of_theirs():
    model = Net(InFp8, 1.0, 1.0)
    with torch.no_grad():
        model.layer.weight[2, 3] = torch.nan
    return model


@rows("healthy", BATCH, 1.0)
@rows(MUL, BATCH, 1e6)
class Packed(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.entry, self.factor = nn.Linear(8, 8), factor

    def forward(self, x):
        h = self.entry(x) * self.factor
        return Scaled(h, torch.ones(()), h.dtype)
