"""Operands by the text that the user wrote, or not at all; what cannot be negative by the code."""

import pytest
import torch
from made_traces import make_step
from torch import nn

from nandoctor.causes.sentences import operand, past, subject
from nandoctor.changes.log_space import is_nonnegative
from nandoctor.engine.runner import Watch
from nandoctor.evidence.formats import FP16
from nandoctor.evidence.trace import OpCall, OpTensor, Place, SourceLine


def op_call(op, expression, *, scalars=(), inputs=1):
    tensors = tuple(OpTensor(name=name, stats=None) for name in ("self", "other")[:inputs])
    return OpCall(
        op=op, order=0, place=Place(module="net", type="Net", call=1), nth=0, phase="forward",
        source=SourceLine(file="net.py", line=1, text=expression, expression=expression),
        inputs=tensors, outputs=(), scalars=scalars,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "expression", "name", "text"),
    [
        ("div", "(x - mean) / (variance + 1e-8)", "other", "`variance + 1e-8`"),
        ("rsub", "1 - p", "self", "`p`"),
        ("add", "1 + 2 * u", "self", "`2 * u`"),
        ("log", "torch.log(1 - p)", "self", "`1 - p`"),
        ("log", "(1 - p).log_()", "self", "`1 - p`"),
        ("div", "x /= count", "other", "`count`"),
        ("reciprocal", "1 / x.sum()", "self", "`x.sum()`"),
        ("div", "F.normalize(x)", "other", None),  # a division inside of a function of torch's
        ("log", "loss_of(x)", "self", None),
        ("log", "torch.log(x, out=y)", "self", "`x`"),
        ("mul", "x / y", "other", None),
        ("log", "torch.log(input=p)", "self", None),
        ("log", "torch.log(*p)", "self", None),
        ("log", "not python (", "self", None),
        ("log", "", "self", None),
    ],
)
def test_operands(op, expression, name, text):
    assert operand(op_call(op, expression), name) == text


@pytest.mark.parametrize(
    ("op", "expression", "name", "text"),
    [
        ("div", "x.div_(keep)", "other", "`keep`"),
        ("div", "torch.div(x, keep.sum())", "other", "`keep.sum()`"),
        ("div", "x.div(keep, rounding_mode=None)", "self", "`x`"),
        ("pow", "norm.pow(power)", "exponent", "`power`"),
        ("div", "torch.div(x, other=keep)", "other", None),
        ("div", "torch.div(input=x, other=keep)", "self", None),
        ("div", "torch.div(*pair)", "other", None),
        ("addcdiv", "torch.addcdiv(x, y)", "other", None),
    ],
)
def test_operands_of_calls_with_two(op, expression, name, text):
    assert operand(op_call(op, expression, inputs=2), name) == text


def test_the_subject_is_the_expression_or_the_op_and_its_module():
    assert subject(op_call("matmul", "q @ k")) == "`q @ k`"
    assert subject(op_call("matmul", "")) == "matmul in net (2nd call)"
    assert len(subject(op_call("matmul", "x" * 500))) == 62


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (210_400.0, "reaches 210,400; fp16 stops at 65,504"),
        (-75_248.0, "reaches -75,248; fp16 stops at -65,504"),
        (65_520.0, "reaches 65,520; fp16 stops at 65,504"),
        (100.0, "overflows fp16 on its way to 100"),
        (None, "is too large even for float64"),
    ],
)
def test_a_value_past_its_format(value, text):
    assert past(value, FP16) == text


PROVED = (
    "h.abs().sum(-1)",
    "h * h",
    "(h * h).mean(-1).sqrt()",
    "h.pow(2).sum(-1).float()",
    "h.norm(dim=-1)",
    "torch.exp(h) + 1e-3",
    "h.softmax(-1) * x.relu()",
    "h.clamp(min=0).amax(-1)",
    "torch.maximum(h, h.abs())",
    "h.var(dim=-1, keepdim=True).expand(3, 4)",
    "torch.cat([h.abs(), x.sigmoid()])",
)
UNPROVED = (
    "h",
    "x",  # positive in this batch
    "weight.sum()",
    "h.sum(-1)",
    "x * h",
    "h.abs() - 1e-3",
    "h.abs() * -1",
    "torch.mul(*h.chunk(2, -1))",  # one op gave both halves
    "h.pow(3)",
    "h.clamp(max=1)",
    "torch.minimum(h, h.abs())",
    "torch.cat([h.abs(), x])",
    "lengths.float()",
    "h.abs() * lengths[:, None]",
    "torch.where(x > 0, h.abs(), h)",
)


class Everything(nn.Linear):
    def forward(self, x, lengths):
        names = {"h": super().forward(x), "x": x, "lengths": lengths, "weight": self.weight, "torch": torch}
        return {text: eval(text, names) for text in (*PROVED, *UNPROVED)}


@pytest.fixture(scope="module")
def trace():
    model, batch = Everything(4, 4, bias=False), {"x": torch.rand(3, 4), "lengths": torch.tensor([1, 2, 3])}
    return make_step(model, batch).run(watch=Watch(stage="signs", ops=True)).trace


@pytest.mark.parametrize("text", [*PROVED, *UNPROVED])
def test_only_what_follows_from_the_code_is_proved(text, trace):
    stats = trace.output[[*PROVED, *UNPROVED].index(text)]
    tensor = OpTensor(name="other", stats=stats, producer=stats.producer)
    assert is_nonnegative(tensor, trace.ops) == (text in PROVED)
