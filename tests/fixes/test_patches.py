"""Patches are what a person would write."""

import pytest

from nandoctor.evidence.edits import (
    ClampArgument,
    KeepModule,
    KeepOp,
    OpSite,
    ResetBuffers,
    ScaleFirst,
    SetArgument,
    SetAttribute,
    Together,
    UnmaskRows,
    UseFormat,
)
from nandoctor.evidence.formats import BF16
from nandoctor.evidence.trace import SourceLine
from nandoctor.remedies.patches import write_patch, write_title


def at(text, op="div", line=45):
    return OpSite(module="norm", type="Norm", op=op, source=SourceLine(file="/somewhere/unet.py", line=line, text=text))


@pytest.mark.parametrize(
    ("text", "op", "was", "value", "after"),
    [
        ("y = x / (std + 1e-8)", "add", 1e-8, 1e-4, "y = x / (std + 1e-4)"),
        ("return x / x.norm().clamp(min=1e-12)", "clamp", 1e-12, 1e-6, "return x / x.norm().clamp(min=1e-6)"),
        (
            "scores = scores.masked_fill(mask, -1e9)",
            "masked_fill",
            -1e9,
            None,
            "scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
        ),
        ("n = x.norm(); y = x / (n + 1e-8)", "add", 1e-8, 1e-4, "n = x.norm(); y = x / (n + 1e-4)"),
        ("s = torch.where(mask, s, -1e9)", "where", -1e9, None, "s = torch.where(mask, s, torch.finfo(x.dtype).min)"),
    ],
)
def test_a_constant_in_its_line(text, op, was, value, after):
    patch = write_patch(SetArgument(site=at(text, op), argument="other", was=was, value=value))
    assert patch.splitlines() == ["# unet.py:45, in Norm.forward", f"- {text}", f"+ {after}"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("y = x / (std + eps)", "eps = 1e-4 where it is set"),
        ("y = x / (std + self.eps).sqrt()", "self.eps = 1e-4 where it is set"),
        ("y = (x + shift) / (std + eps)", "1e-4 here"),
        ("y = stable_divide(x, std)", "1e-4 here"),
    ],
)
def test_a_constant_that_is_not_in_the_line_is_told_in_words(text, what):
    patch = write_patch(SetArgument(site=at(text, "add"), argument="other", was=1e-8, value=1e-4))
    assert patch.splitlines()[1:] == [f"#   {text}", f"# {what}; it is 1e-8 now"]


def test_rows_within_torchs_attention_are_opened_by_its_mask():
    site = OpSite(
        module="attention", type="MultiheadAttention", op="softmax", source=at("y = self.attention(x)").source
    )
    patch = write_patch(UnmaskRows(site=site))
    assert patch.startswith("# unet.py:45, where the MultiheadAttention is called\n#   y = self.attention(x)\n")
    assert "scores" not in patch  # nobody's code holds them


@pytest.mark.parametrize(
    ("text", "op", "argument", "low", "high", "after"),
    [
        ("return torch.log(p)", "log", "self", 1e-6, None, "return torch.log(p.clamp(min=1e-6))"),
        ("return p.log().sum()", "log", "self", 1e-6, None, "return p.clamp(min=1e-6).log().sum()"),
        ("y = a / (b - c)", "div", "other", 1e-6, None, "y = a / (b - c).clamp(min=1e-6)"),
        ("y = torch.acos(u @ v)", "acos", "self", -1, 1, "y = torch.acos((u @ v).clamp(min=-1, max=1))"),
    ],
)
def test_a_clamp_in_its_line(text, op, argument, low, high, after):
    patch = write_patch(ClampArgument(site=at(text, op), argument=argument, low=low, high=high))
    assert patch.splitlines()[1:] == [f"- {text}", f"+ {after}"]


def test_a_line_in_fp32_names_its_tensors():
    assert write_patch(KeepOp(site=at("return (x - mean) / torch.sqrt(variance + 1e-8)", ""))).splitlines() == [
        "# unet.py:45, in Norm.forward",
        'with torch.autocast("cuda", enabled=False):',
        "    x, mean, variance = x.float(), mean.float(), variance.float()",
        "    return (x - mean) / torch.sqrt(variance + 1e-8)",
    ]


def test_calls_of_submodules_stay_outside():
    assert write_patch(KeepOp(site=at("x = x + self.mlp(self.norm(x))", ""))).splitlines() == [
        "# unet.py:45, in Norm.forward",
        "h = self.mlp(self.norm(x))  # as it was, outside",
        'with torch.autocast("cuda", enabled=False):',
        "    x, h = x.float(), h.float()",
        "    x = x + h",
    ]


@pytest.mark.parametrize("text", ["", "def run(x): return x * x", "x = torch.cat([", "f(a,", "    ]) + 1e-8)"])
def test_part_of_a_statement_is_quoted_as_it_is(text):
    site = at(text, "add")
    for edit in (
        KeepOp(site=site),
        SetArgument(site=site, argument="other", was=1e-8, value=1e-4),
        ClampArgument(site=site, argument="self", low=0.0),
        UnmaskRows(site=site),
        ScaleFirst(product=site, scale=site, factor=0.5),
    ):
        assert text.strip() in write_patch(edit)
        assert write_title(edit)


def test_modules():
    one, other = KeepModule(module="blocks.3.mlp"), KeepModule(module="head")
    assert "self.mlp(x.float())" in write_patch(one)
    assert "blocks.3" in write_patch(one)
    assert 'for name in ["stem.0"]:' in write_patch(KeepModule(module="stem.0"))  # a Sequential calls it, nobody's code
    assert write_title(Together(edits=(one, other))) == "Keep 2 modules in fp32: blocks.3.mlp, head"
    many = Together(edits=tuple(KeepModule(module=name) for name in "abc"))
    assert 'for name in ["a", "b", "c"]:' in write_patch(many)
    compile(write_patch(many), "patch", "exec")


@pytest.mark.parametrize(
    "edit",
    [
        KeepModule(module="a.b"),
        KeepModule(module="<loss>"),
        KeepModule(module="a", children=False),
        SetAttribute(type="Norm", name="eps", was=1e-8, value=1e-4),
        UseFormat(format=BF16),
        KeepOp(site=at("y = x + 1", "add")),
        Together(edits=(KeepModule(module="a"), UseFormat(format=BF16))),
    ],
    ids=lambda edit: edit.kind,
)
def test_whole_patches_are_python(edit):
    compile(write_patch(edit), "patch", "exec")


def test_titles_name_the_line_and_numbers_as_code_does():
    eps = SetArgument(site=at("y = x / (std + 1e-8)", "add"), argument="other", was=1e-8, value=1e-4)
    assert write_title(eps) == "Use an eps of 1e-4 instead of 1e-8 in line 45 of unet.py"
    mask = SetArgument(site=at("s.masked_fill(m, -1e9)", "masked_fill"), argument="value", was=-1e9, value=None)
    assert write_title(mask) == "Use the lowest number of its format instead of -1e9 in line 45 of unet.py"
    clamp = ClampArgument(site=at("return torch.log(p)", "log"), argument="self", low=1e-12, high=None)
    assert write_title(clamp) == "Clamp the argument of log to at least 1e-12 in line 45 of unet.py"


def test_an_fp32_operand_is_not_lifted_out_with_its_module():
    site = at("return self.norm(self.conv(x) * (1 + gain) + shift)", "")
    assert write_patch(KeepOp(site=site)).splitlines()[1:] == [
        "h = self.conv(x)  # as it was, outside",
        'with torch.autocast("cuda", enabled=False):',
        "    h, gain, shift = h.float(), gain.float(), shift.float()",
        "    h1 = h * (1 + gain) + shift",
        "return self.norm(h1)  # as it was, outside",
    ]
    site = at("return self.head(torch.exp(x))", "")
    assert write_patch(KeepOp(site=site)).splitlines()[2:] == [
        "    x = x.float()",
        "    h = torch.exp(x)",
        "return self.head(h)  # as it was, outside",
    ]


def test_titles_count_and_name_what_they_change():
    assert write_title(ResetBuffers(names=("door.running_mean",))) == "Reset 1 buffer: door.running_mean"
    clamp = ClampArgument(site=at("y = a / b"), argument="other", low=1e-6, high=None)
    assert write_title(clamp) == "Clamp the divisor of div to at least 1e-6 in line 45 of unet.py"


def test_a_loop_on_one_line_is_not_taken_apart():
    patch = write_patch(KeepOp(site=at("for m in self.children(): x = m(x) * 3e4", "")))
    assert patch.splitlines()[1:] == [
        'with torch.autocast("cuda", enabled=False):',
        "    for m in self.children(): x = m(x) * 3e4  "
        "# with every tensor that goes in as x.float(), submodules called outside of it",
    ]


def test_variables_of_a_comprehension_are_nobody_elses():
    patch = write_patch(KeepOp(site=at("y = torch.stack([t * scale for t in (a, b)])", "")))
    assert "scale, a, b = scale.float(), a.float(), b.float()" in patch


def test_a_module_whose_name_python_cannot_write():
    assert "y = getattr(self, 'a-b')(x.float())" in write_patch(KeepModule(module="net.a-b"))
