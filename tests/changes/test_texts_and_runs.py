"""What a change writes does the same as the change of a run; docs/adding_a_change.md, followed."""

import importlib.util
import math
import pkgutil
import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from report_schema import report_schema
from written import run_both, step_of

from nandoctor import changes
from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.constant import SetArgument, SetFlag
from nandoctor.changes.guard import GuardArgument
from nandoctor.changes.keep_fp32 import KeepOp
from nandoctor.changes.places import site_of
from nandoctor.changes.softmax_rows import UnmaskRows
from nandoctor.engine.runner import CLOSELY
from nandoctor.evidence import edits
from nandoctor.evidence.codec import from_plain, to_plain
from nandoctor.evidence.edits import OpSite, Together, only_widens
from nandoctor.fixes.candidates import line_of
from nandoctor.fixes.writing import ChangeWriter, write_title

CLAMP = partial(ClampArgument, argument="self", low=0.5)
AWAY = partial(ClampArgument, argument="other", low=0.5, keeps_sign=True)
EMPTY = partial(ClampArgument, argument="", nan=True)
GUARD = partial(GuardArgument, argument="self", safe=1.0, low=0.0)
EPS = partial(SetArgument, argument="eps", value=1e-2)
TERM = partial(SetArgument, argument="other", was=1e-6, value=1e-2)
NORM = "return F.layer_norm(x, (3,){})"
CTC = "return F.ctc_loss(x.log_softmax(-1)[:, None], torch.ones(1, 3).long(), torch.tensor([2]), torch.tensor([3]){})"

CASES = {
    "softmax over the last dim": ("return torch.softmax(x, -1)", "softmax", UnmaskRows, ".all(-1, keepdim=True)"),
    "over another": ("return torch.softmax(x.t(), 0)", "softmax", UnmaskRows, ".all(0, keepdim=True)"),
    "by keyword": ("return x.t().softmax(dim=0)", "softmax", UnmaskRows, ".all(0, keepdim=True)"),
    "by a name": ("d = 1\nreturn F.softmax(x, dim=d)", "softmax", UnmaskRows, ".all(d, keepdim=True)"),
    "attention": (
        "q = x.nan_to_num(0, 0, 0)[None]\nreturn F.scaled_dot_product_attention(q, q, q, attn_mask=x[None] > 0)",
        "scaled_dot_product_attention", UnmaskRows, "~(x[None] > 0).any(-1, keepdim=True)",
    ),
    "clamp of a method": ("return x.log()", "log", CLAMP, "x.clamp(min=0.5).log()"),
    "of a function": ("return torch.log(x + 1)", "log", CLAMP, "torch.log((x + 1).clamp(min=0.5))"),
    "by its keyword": ("return torch.log(input=x)", "log", CLAMP, "torch.log(input=x.clamp(min=0.5))"),
    "one of einsum's": (
        'return torch.einsum("i,i", x[0], x[2])', "einsum", partial(CLAMP, argument="tensors[1]"), ".clamp(min=0.5)",
    ),
    "divisor": ("return 1 / x", "reciprocal", partial(AWAY, argument="self"), "torch.where(x.abs() < 0.5, 0.5, x)"),
    "divisor by keyword": ("return torch.div(x, other=x)", "div", AWAY, "other=torch.where(x.abs() < 0.5, 0.5, x)"),
    "mean of nothing": ("return x[:0].mean()", "mean", EMPTY, "averaged.sum() / max(averaged.numel(), 1)"),
    "along a dim": ("return x[:0].mean(0)", "mean", EMPTY, "averaged.sum(0) / max(averaged.shape[0], 1)"),
    "along a kept dim": (
        "return x[:0].mean(dim=0, keepdim=True)", "mean", EMPTY,
        "averaged.sum(dim=0, keepdim=True) / max(averaged.shape[0], 1)",
    ),
    "spread of one": ("return x[:1].std(0)", "std", EMPTY, "values.std(0, correction=min(1, values.shape[0] - 1))"),
    "by keywords": ("return x[:1].std(dim=0, correction=1)", "std", EMPTY, "correction=min(1, values.shape[0] - 1))"),
    "loss of nothing": ("return F.mse_loss(x[:0], x[:0])", "mse_loss", EMPTY, 'reduction="none"'),
    "guard of a method": ("return x.sqrt()", "sqrt", GUARD, "torch.where(x <= 0, 1.0, x).sqrt()"),
    "guard of a function": ("return torch.sqrt(x - 1)", "sqrt", GUARD, "torch.where(guarded <= 0, 0.0, torch.sqrt("),
    "eps by default": (NORM.format(""), "layer_norm", partial(EPS, was=1e-5), ", eps=0.01)"),
    "eps by keyword": (NORM.format(", eps=1e-6"), "layer_norm", partial(EPS, was=1e-6), ", eps=0.01)"),
    "eps as a term": ("return x + 1e-6", "add", TERM, "x + 0.01"),
    "number first": ("return 1e-6 + x", "add", TERM, "0.01 + x"),
    "number 0": ("return x / (len(x) - 3)", "div", partial(TERM, was=0.0, value=1.0), "x / (len(x) - 3 or 1)"),
    "lowest number": (
        "return x.masked_fill(x > 0, -1e9)", "masked_fill",
        partial(SetArgument, argument="value", was=-1e9, value=None), "torch.finfo(x.dtype).min",
    ),
    "flag": (CTC.format(""), "ctc_loss", partial(SetFlag, argument="zero_infinity"), ", zero_infinity=True)"),
    "flag by keyword": (
        CTC.format(", zero_infinity=False"), "ctc_loss", partial(SetFlag, argument="zero_infinity"),
        ", zero_infinity=True)",
    ),
    "op in fp32": ("h = x.half()\nreturn h * h", "mul", KeepOp, "h.float() * h"),
    "product in fp32": ("h = x.half()\nreturn (h @ h.t()).exp()", "matmul", KeepOp, "= h.float() @ h.t().float()"),
    "cast to fp32": ("return x.to(dtype=torch.float16) * 1", "to", KeepOp, "x.to(dtype=torch.float32) * 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_text_does_what_the_change_does(name, tmp_path):
    code, op, kind, expected = CASES[name]
    x = torch.tensor([[0.0, 0.25, 4.0], [-math.inf] * 3, [1.0, -2.0, 3.0]])
    lines, by_run, by_text = run_both(code, tmp_path, x, op, lambda site: kind(site=site))
    assert expected in "\n".join(lines)
    torch.testing.assert_close(by_text, by_run, equal_nan=True, rtol=1e-6, atol=1e-6)


LINES = {
    "a branch that calls something": ("return x.exp() if self.training else self.other(x)", None),
    "an operand that calls something": ("return x.exp() * (1.0 or self.other(x))", None),
    "a branch that is a number": ("return x.exp() if self.training else 0.0", "x.float().exp() if"),
    "whole numbers for a module": ("return self.read(x.int()) * x.exp()", "self.read(x.int()) * x.float().exp()"),
    "the same by a name": ("i = x.int()\nreturn self.read(i) * x.exp()", "self.read(i) * x.float().exp()"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_in_fp32_is_one_that_was_run_as_a_whole(name, tmp_path):
    code, expected = LINES[name]
    step = step_of(code, tmp_path, torch.ones(3))
    step.model.read = torch.nn.Embedding(2, 3)
    ops = step.run(watch=CLOSELY).trace.ops
    edit = KeepOp(site=line_of(site_of(next(op for op in ops if op.op == "exp"))))
    texts = [written.text for written in ChangeWriter(step.model, None, ops).write(edit)]
    assert [expected in text for text in texts] == [True] * (expected is not None)


SUGGESTED = """
from nandoctor import pipeline
from nandoctor.evidence import edits
print(*(kind.__name__ for kind in edits.KINDS.values()))
"""
PAGE = Path(__file__).parents[2] / "docs" / "adding_a_change.md"
BLOCK = re.compile(r'```python title="(?P<path>[^"]+)"\n(?P<code>.*?)```', re.DOTALL)


@pytest.fixture
def absolute(tmp_path, monkeypatch):
    """The page's kind of change, from its one file."""
    (block,) = BLOCK.finditer(PAGE.read_text(encoding="utf-8"))
    path = tmp_path / Path(block["path"]).name
    path.write_text(block["code"])
    spec = importlib.util.spec_from_file_location("absolute", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "absolute", module)
    spec.loader.exec_module(module)
    yield module.AbsoluteArgument
    del edits.KINDS["absolute"]


def test_it_is_written_and_run(absolute, tmp_path):
    x = torch.tensor([4.0, -9.0])
    make = lambda site: absolute(site=site, argument="self")  # noqa: E731
    lines, by_run, by_text = run_both("return torch.sqrt(x)", tmp_path, x, "sqrt", make)
    assert lines == ["return torch.sqrt(x.abs())"]
    assert by_run.tolist() == by_text.tolist() == [2.0, 3.0]


def test_it_is_named_and_kept_in_reports(absolute):
    edit = absolute(site=OpSite(module="", type="Net", op="sqrt"), argument="self")
    assert write_title(edit) == "Take the absolute value of the argument of sqrt"
    assert (edit.size, only_widens(edit)) == (3, False)
    both = Together(edits=(edit,))
    assert from_plain(Together, to_plain(both)) == both
    assert report_schema()["$defs"]["AbsoluteArgument"]["properties"]["kind"] == {"const": "absolute"}


def test_every_kind_that_is_shipped_is_suggested_by_somebody(tmp_path, ready_python):
    """Nobody lists the kinds: one that the search does not import is never tried."""
    (tmp_path / "suggested.py").write_text(SUGGESTED)
    suggested = ready_python.run(tmp_path / "suggested.py", cwd=tmp_path)
    modules = [import_module(f"nandoctor.changes.{found.name}") for found in pkgutil.iter_modules(changes.__path__)]
    shipped = {item for module in modules for item in vars(module).values() if is_kind(item, module)}
    assert {kind.__name__ for kind in shipped} == set(suggested.stdout.split())


def is_kind(item, module):
    return isinstance(item, type) and issubclass(item, edits.SingleEdit) and item.__module__ == module.__name__
