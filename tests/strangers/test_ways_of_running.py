"""Unusual ways of running a forward: loops, checkpoints, compilers, hooks, views, vmap, regions without autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from strangers.visits import Between, blamed, line, louder, normal

HEALTHY = ("healthy",)

# Reentrant checkpoints remark that no input needs a gradient: in a run of the forward alone nothing does.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Square(nn.Module):
    def forward(self, x):
        return x * x


def test_only_the_third_of_three_calls_fails(examine):
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = louder(nn.Linear(8, 8), 80.0)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            for _ in range(3):
                x = self.step(x)
            return self.head(x)

    report = examine(Repeated(), {"x": normal(3, 8)})
    assert blamed(report) == ("precision", "step", "linear", "matmul-overflow")
    assert report.origin.place.call == 2


def test_an_in_place_accumulation(examine):
    class Doubling(nn.Module):
        def forward(self, x):
            for _ in range(30):
                x += x
            return x

    report = examine(Between(Doubling()), {"x": normal(3, 8)})
    assert blamed(report) == ("precision", "middle", "add", "elementwise-overflow")


def test_an_in_place_product_on_a_view_of_a_view(examine):
    class Columns(nn.Module):
        def forward(self, x):
            x[:, 2:6].mul_(100.0)
            x[:, 2:6][:, 1] *= 1e6
            return x.relu()

    report = examine(Between(Columns()), {"x": normal(30, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")
    assert line(report) == "x[:, 2:6][:, 1] *= 1e6"


class Checkpointed(nn.Module):
    def __init__(self, block, *, use_reentrant):
        super().__init__()
        self.entry = nn.Linear(8, 8)
        self.block = block
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.block, self.entry(x), use_reentrant=self.use_reentrant)


either_checkpoint = pytest.mark.parametrize("use_reentrant", [True, False])


@either_checkpoint
def test_a_checkpointed_block_overflows(examine, use_reentrant):
    model = Checkpointed(Square(), use_reentrant=use_reentrant)
    report = examine(model, {"x": 1e3 * normal(3, 8)}, loss=lambda output, _: output.sum())
    assert blamed(report) == ("precision", "block", "mul", "elementwise-overflow")


@either_checkpoint
def test_the_backward_of_a_checkpointed_block_is_singular(examine, use_reentrant):
    class Distance(nn.Module):
        def forward(self, x):
            return x + (x - x.detach()).float().abs().sum(-1, keepdim=True).sqrt()

    model = Checkpointed(Distance(), use_reentrant=use_reentrant)
    report = examine(model, {"x": normal(3, 8)}, loss=lambda output, _: output.sum())
    assert blamed(report) == ("numerics", "block", "sqrt", "gradient-singularity")
    assert line(report).endswith(".sqrt()")


def test_a_custom_function_overflows_in_its_forward(examine):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 3 * x * x * gradient

    class Cubes(nn.Module):
        def forward(self, x):
            return Cube.apply(x)

    report = examine(Between(Cubes()), {"x": 200 * normal(3, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")
    assert line(report) == "return x * x * x"


def test_a_model_that_raises_on_what_it_made_itself(examine):
    class Watchful(nn.Module):
        def forward(self, x):
            energy = x * x
            share = energy / energy.amax(-1, keepdim=True)
            if not share.isfinite().all():
                raise FloatingPointError("the shares are not finite")
            return share

    report = examine(Between(Watchful()), {"x": 1e3 * normal(3, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")
    assert "FloatingPointError" in report.runs.autocast.raised


def test_a_distribution_that_validates_its_arguments(examine):
    class Sampled(nn.Module):
        def forward(self, x):
            energy = x * x
            return torch.distributions.Normal(energy - energy.mean(), 1.0, validate_args=True).rsample()

    report = examine(Between(Sampled()), {"x": 1e3 * normal(30, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")
    assert "ValueError" in report.runs.autocast.raised


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda block: torch.jit.trace(block, normal(3, 8))])
def test_a_block_compiled_by_torchscript(examine, compiled):
    report = examine(Between(compiled(Square())), {"x": 1e3 * normal(3, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")


def test_a_block_under_torch_compile(examine):
    report = examine(Between(torch.compile(Square(), backend="eager")), {"x": 1e3 * normal(3, 8)})
    assert blamed(report) == ("precision", "middle._orig_mod", "mul", "elementwise-overflow")
    assert line(report) == "return x * x"


def test_a_forward_hook_of_the_user_does_it(examine):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].register_forward_hook(lambda module, inputs, output: output * 1e6)
    report = examine(model, {"x": normal(3, 8)})
    assert blamed(report) == ("precision", "0", "mul", "elementwise-overflow")
    assert "register_forward_hook" in line(report)


def test_under_vmap(examine):
    class Rows(nn.Module):
        def forward(self, x):
            return torch.vmap(lambda row: row * row.norm())(x)

    report = examine(Between(Rows()), {"x": 1e3 * normal(3, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")
    assert line(report) == "return torch.vmap(lambda row: row * row.norm())(x)"


def test_a_weight_made_in_the_forward_is_too_large_for_its_cast(examine):
    class Borrowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(8, 8)

        def forward(self, x):
            weights = {"weight": self.own.weight * 1e6, "bias": self.own.bias}
            return torch.func.functional_call(self.own, weights, (x,))

    report = examine(Between(Borrowed()), {"x": normal(3, 8)})
    assert blamed(report) == ("precision", "middle.own", "linear", "input-cast-overflow")


def test_a_region_without_autocast_is_innocent(examine):
    class Careful(nn.Module):
        def forward(self, x):
            with torch.autocast("cuda", enabled=False):
                squares = x.float() ** 2
                return squares / squares.sum(-1, keepdim=True)

    assert blamed(examine(Between(Careful()), {"x": 1e3 * normal(3, 8)})) == HEALTHY


def test_what_leaves_an_fp32_region_is_too_large_for_the_next(examine):
    class Careless(nn.Module):
        def forward(self, x):
            with torch.autocast("cuda", enabled=False):
                return x.float() ** 2

    report = examine(Between(Careless()), {"x": 1e3 * normal(3, 8)})
    assert blamed(report) == ("precision", "exit", "linear", "input-cast-overflow")


def test_an_einsum_of_three_operands(examine):
    class Bilinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = nn.Parameter(300 * normal(8, 8, 8))

        def forward(self, x):
            return torch.einsum("bi,bj,ijk->bk", x, x, self.core)

    report = examine(Between(Bilinear()), {"x": 30 * normal(3, 8)})
    assert blamed(report) == ("precision", "middle", "einsum", "matmul-overflow")


def test_a_spectrum_that_fp32_cannot_hold(examine):
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.rfft(x.float() * 1e38).abs()[:, :8]

    report = examine(
        Between(Spectrum(), width=64),
        {"x": normal(3, 64)},
        call=lambda model, batch: model.middle(model.entry(batch["x"])),
    )
    assert blamed(report) == ("numerics", "middle", "fft_rfft", "reduction-overflow")


def test_complex_numbers_divided_by_zero(examine):
    class Phase(nn.Module):
        def forward(self, x):
            z = torch.view_as_complex(x.float().view(-1, 4, 2))
            return torch.view_as_real(z / (z.abs() - z.abs())).flatten(1)

    report = examine(Between(Phase()), {"x": normal(3, 8)})
    assert blamed(report) == ("numerics", "middle", "div", "division-by-zero")


def test_jagged_tensors(examine):
    class Jagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = louder(nn.Linear(8, 8), 1e4)

        def forward(self, x):
            rows = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)
            return self.inner(rows * 30).values()

    report = examine(Between(Jagged()), {"x": 10 * normal(5, 8)})
    assert blamed(report) == ("precision", "middle.inner", "linear", "matmul-overflow")


def test_a_scratch_tensor_full_of_nan_that_is_overwritten(examine):
    class Scratch(nn.Module):
        def forward(self, x):
            result = torch.full_like(x, float("nan"))
            result[:] = x
            return result

    assert blamed(examine(Between(Scratch()), {"x": normal(3, 8)})) == HEALTHY


def in_halves(first, second):
    """A module that writes its result half by half, each multiplied by a number, into memory that is full of NaN."""

    class Halves(nn.Module):
        def forward(self, x):
            made = torch.full_like(x, float("nan"))
            made[:2] = x[:2] * first
            made[2:] = x[2:] * second
            return made.relu()

    return Between(Halves())


@pytest.mark.parametrize(("first", "second"), [(1e6, 1.0), (1.0, 1e6)])
def test_a_result_that_is_written_in_parts(examine, first, second):
    report = examine(in_halves(first, second), {"x": normal(4, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")
    assert line(report) == ("made[:2] = x[:2] * first" if first > second else "made[2:] = x[2:] * second")


def test_a_sound_result_that_is_written_in_parts(examine):
    assert blamed(examine(in_halves(1.0, 1.0), {"x": normal(4, 8)})) == HEALTHY


def test_a_part_that_nobody_wrote(examine):
    class Half(nn.Module):
        def forward(self, x):
            made = torch.full_like(x, float("nan"))
            made[:2] = x[:2]
            return made.relu()

    report = examine(Between(Half()), {"x": normal(4, 8)})
    assert blamed(report) == ("numerics", "middle", "full_like", "indeterminate-form")


def test_an_overflow_that_a_later_part_leaves_in_place(examine):
    class Marked(nn.Module):
        def forward(self, x):
            made = x * 1e6
            made[0] = 0.0
            return made.relu()

    report = examine(Between(Marked()), {"x": normal(4, 8)})
    assert blamed(report) == ("precision", "middle", "mul", "elementwise-overflow")


def test_a_layer_that_is_built_in_the_forward(examine):
    class Share(nn.Module):
        def forward(self, x):
            x = nn.Linear(8, 8, bias=False)(x * (torch.arange(3) != 1)[:, None])
            return x / x.abs().sum(-1, keepdim=True)

    report = examine(Between(Share()), {"x": normal(3, 8)})
    assert blamed(report) == ("numerics", "middle", "div", "division-by-zero")
    assert report.origin.elements.samples == (1,)
