"""Logarithms and quotients in log space: what is written, and what is left alone because it may mean something else."""

import ast
import math
import textwrap

import pytest
import torch

import nandoctor
from nandoctor.changes.definitions import Definitions
from nandoctor.changes.expression import number_in
from nandoctor.changes.source_tree import parse_source

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"


def replay(folder, code, **batch):
    """The report on `Net.forward` of this code, from files in a folder."""
    body = textwrap.indent(textwrap.dedent(code), " " * 4)
    made = f"{HEAD}class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    made += f"        self.fc = nn.Linear(4, 3)\n        self.softmax = nn.Softmax(dim=-1)\n{body}"
    (folder / "model.py").write_text(made)
    torch.manual_seed(0)
    torch.save({"state_dict": torch.nn.Linear(4, 3).state_dict(prefix="fc."), **batch}, folder / "dump.pth")
    return nandoctor.replay(folder / "dump.pth", model=f"{folder / 'model.py'}:Net").report


def added(report):
    """The lines that the first verified fix of the code adds."""
    fix = next(item for item in report.fixes if item.verified and item.kind == "source")
    return [line[1:].strip() for line in fix.patch.splitlines() if line.startswith("+") and line[1:2] != "+"]


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(4, 4) * torch.tensor([[1.0], [900.0], [1.0], [1.0]])


def test_a_logarithm_over_several_statements(tmp_path, x):
    code = """
    def forward(self, x):
        score = self.fc(x)
        density = torch.exp(score)
        total = density.sum(dim=-1)
        return -torch.log(total)
    """
    # What nothing reads any more is taken out with it.
    assert added(replay(tmp_path, code, x=x)) == ["return -torch.logsumexp(score.float(), dim=-1)"]


@pytest.mark.slow
def test_a_layer_is_called_once(tmp_path, x):
    code = """
    def forward(self, x):
        p = self.softmax(self.fc(x))
        return -(p * torch.log(p)).sum(-1)
    """
    lines = [
        "logits = self.fc(x)",
        "p = self.softmax(logits)",
        "return -(p * torch.log_softmax(logits, dim=-1)).sum(-1)",
    ]
    assert added(replay(tmp_path, code, x=x)) == lines


@pytest.mark.slow
def test_both_logarithms_of_a_statement(tmp_path, x):
    code = """
    def forward(self, x, label):
        p = torch.sigmoid(self.fc(x))
        return label * p.log() + (1 - label) * (1 - p).log()
    """
    made = added(replay(tmp_path, code, x=x, label=torch.ones(4, 1)))
    assert made[-1] == "return label * F.logsigmoid(logits.float()) + (1 - label) * F.logsigmoid(-logits.float())"


@pytest.mark.slow
def test_a_softmax_by_hand(tmp_path, x):
    code = """
    def forward(self, x):
        score = self.fc(x)
        weight = torch.exp(score)
        return weight / weight.sum(-1, keepdim=True)
    """
    report = replay(tmp_path, code, x=x)
    assert added(report) == ["weight = torch.exp(score - score.amax(-1, keepdim=True).detach())"]
    # Two scores beyond the bound would have the same weight, which no run of this batch shows: float64 overflows too.
    assert not any(item.verified for item in report.fixes if item.edit.kind == "clamp")


SOFTMAXES = {
    "with an eps": (
        "s = self.fc(x)\n    e = torch.exp(s) * mask\n    return e / (e.sum(-1) + 1e-8)[:, None]",
        "return e / (e.sum(-1) + (1e-8 * torch.exp(-largest.squeeze(-1))))[:, None]",
    ),
    "in a lambda": (
        "share = lambda s: s.exp() / s.exp().sum(-1, keepdim=True)\n    return share(self.fc(x))",
        "share = lambda s: torch.softmax(s, -1)",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "in a lambda")) for name in SOFTMAXES]
)
def test_forms_of_a_softmax_by_hand(name, tmp_path, x):
    body, line = SOFTMAXES[name]
    mask = torch.tensor([1.0, 0.0, 1.0]).repeat(4, 1)
    assert added(replay(tmp_path, f"def forward(self, x, mask):\n    {body}\n", x=x, mask=mask))[-1] == line


@pytest.mark.slow
def test_a_constant_may_be_computed(tmp_path, x):
    code = """
    def forward(self, x):
        mean, log_std, y = self.fc(x / 300).chunk(3, dim=-1)
        density = torch.exp(-0.5 * ((y - mean) / log_std.exp()) ** 2) / (log_std.exp() * (2 * torch.pi) ** 0.5)
        return density.log()
    """
    patches = [item.patch for item in replay(tmp_path, code, x=x).fixes]
    assert any("+        return logits - (log_std.float() + 0.91893853)\n" in patch for patch in patches)


@pytest.mark.parametrize(
    ("text", "value"),
    [("-2 ** -24", -(2**-24)), ("math.sqrt(2 * math.pi)", math.sqrt(2 * math.pi)), ('float("-inf")', -math.inf)]
    + [
        (text, None)
        for text in ("x + 1", "2 * self.pi", "10 ** 10 ** 10", "(-1) ** 0.5", "1 / 0", "math.log(-1)", "+x")
    ],
)
def test_a_number_is_one_of_numbers_alone(text, value):
    assert number_in(ast.parse(text, mode="eval").body) == value


@pytest.mark.slow
def test_an_eps_in_the_divisor_is_not_dropped(tmp_path, x):
    code = """
    def forward(self, x, mask):
        score = self.fc(x).masked_fill(mask == 0, -torch.inf)
        weight = torch.exp(score)
        return weight / (weight.sum(-1, keepdim=True) + 1e-8)
    """
    report = replay(tmp_path, code, x=x, mask=torch.ones(4, 3))
    # Of a row of -Inf the eps makes zeros, a softmax NaN; and -Inf less the largest, which is -Inf, is NaN too.
    assert not any("torch.softmax" in item.patch for item in report.fixes)
    assert added(report)[0] == "largest = score.amax(-1, keepdim=True).clamp(min=0).detach()"


@pytest.mark.slow
@pytest.mark.parametrize("row", [[2.0, 3.0, 5.0], [1.0, 1.0, 1.0]], ids=["of all sizes", "1 in this batch"])
def test_a_factor_of_either_sign_has_no_logarithm(row, tmp_path, x):
    code = """
    def forward(self, x, weight):
        return torch.log((torch.exp(self.fc(x)) * weight).sum(-1))
    """
    report = replay(tmp_path, code, x=x, weight=torch.tensor([row]).repeat(4, 1))
    assert not any("logsumexp" in item.patch for item in report.fixes)


@pytest.mark.slow
def test_a_line_with_subscripts_and_a_number_first(tmp_path):
    code = """
    def forward(self, x):
        h = self.fc(x)
        square = (h * h).sum(-1)
        return torch.sqrt(square[:, None] + square[None, :] - 2 * h @ h.t() + 1e-4)
    """
    made = added(replay(tmp_path, code, x=torch.randn(6, 4, generator=torch.Generator().manual_seed(0)) * 9))
    assert any("- 2 * h.float() @ h.float().t()" in line for line in made)


OTHER_MEANINGS = {
    "dropout keeps 0, in training alone": """
        p = F.dropout(torch.exp(self.fc(x)), 0.5, False)
        return torch.log(p.sum(-1))
    """,
    "a summand may be negative": """
        return torch.log(torch.exp(self.fc(x)) + y).sum(-1)
    """,
    "a weight may be negative": """
        return torch.log((torch.exp(self.fc(x)) * y).sum(-1))
    """,
    "a weight that is learned has a gradient at 0": """
        weight = self.fc.bias * 0 + 1
        return torch.log((torch.exp(self.fc(x)) * weight).sum(-1))
    """,
    "a comprehension has names of its own": """
        p = torch.exp(self.fc(x))
        return torch.stack([torch.log(p.sum(-1)) for p in (p, p + 0)]).sum(0)
    """,
    "the score is written over": """
        score = self.fc(x)
        p = torch.exp(score)
        torch.clamp_(score, -900, 900)
        return torch.log(p.sum(-1)) + score.sum(-1)
    """,
    "the score is written over through a view": """
        score = self.fc(x)
        p = torch.exp(score[:, :2])
        score.view(-1).clamp_(-900, 900)
        return torch.log(p.sum(-1)) + score.sum(-1)
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_MEANINGS)
def test_what_may_mean_another_thing_is_left(tmp_path, x, name):
    code = "def forward(self, x, y):\n" + textwrap.indent(textwrap.dedent(OTHER_MEANINGS[name]), " " * 4)
    report = replay(tmp_path, code, x=x, y=torch.full((4, 3), 0.5))
    assert report.fixes
    assert not any(item.edit.kind == "stable-log" for item in report.fixes)


KEPT_MEANINGS = {
    "a condition stays whole": (
        """
        h = self.fc(x)
        p = torch.exp(h if self.training else h * 2)
        return torch.log(p * torch.exp(h)).sum(-1)
        """,
        "return ((h if self.training else h * 2).float() + h).sum(-1)",
    ),
    "a copy stays one": (
        """
        h = self.fc(x)
        y = torch.log(torch.exp(h))
        y += 1
        return y + h
        """,
        "y = h.float()",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT_MEANINGS)
def test_what_is_written_means_the_same(tmp_path, x, name):
    body, expected = KEPT_MEANINGS[name]
    code = "def forward(self, x, y):\n" + textwrap.indent(textwrap.dedent(body), " " * 4)
    fixes = replay(tmp_path, code, x=x, y=torch.ones(4, 3).index_fill(0, torch.tensor([2]), 0)).fixes
    assert any(expected in item.patch for item in fixes)


FUNCTION = """
def forward(x, sharp):
    p = x.exp()
    total = p.sum()
    if sharp:
        q = p
    else:
        q = p * 2
    for step in range(3):
        first = p + total
        total = first.log()
    p = p + 1
    later = lambda: p
    r = p
    lines = [r for r in (q, r)]
    relu(first, inplace=True)
    return (p, q, total, x, first)
"""


@pytest.mark.parametrize(
    ("name", "line", "value"),
    [
        ("p", 4, "x.exp()"),
        ("p", 10, "x.exp()"),
        ("total", 10, None),  # the loop binds it as well
        ("first", 11, "p + total"),
        ("p", 13, None),  # in a function that is called later
        ("r", 15, None),  # of a comprehension
        ("first", 17, None),  # written into
        ("p", 17, "p + 1"),
        ("q", 17, None),  # by a branch
        ("x", 17, None),  # a parameter
    ],
)
def test_what_a_name_stands_for(name, line, value):
    tree = parse_source(FUNCTION)
    (function,) = tree.module.body
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name)
    read = max((node for node in names if node.lineno == line), key=tree.span)
    found = Definitions(tree, function).value_of(read)
    assert (None if found is None else tree.code(found)) == value


@pytest.mark.slow
def test_a_diagonal_is_taken_of_the_scores(tmp_path, x):
    code = """
    def forward(self, x):
        z = self.fc(x)
        e = torch.exp(z @ z.t())
        return -torch.log(torch.diag(e) / e.sum(dim=1))
    """
    fixes = replay(tmp_path, code, x=x / 60).fixes
    assert any("torch.diag(logits)" in fix.patch for fix in fixes)


@pytest.mark.parametrize(
    "end",
    [
        "w / (1 + w.sum(dim=-1, keepdim=True))",  # the 1 would have to be scaled as well
        # So would an eps, which shows where all powers are small; the largest is known in the other function alone.
        "w / (w.sum(dim=-1, keepdim=True) + 1e-8)",
        "w / w.sum(dim=-1, keepdim=True) if len(x) else w",  # of an empty batch, or another, the powers themselves
        pytest.param("w / w.sum(dim=-1, keepdim=True) + self.powers(x * 0).sum() * 0", marks=pytest.mark.slow),
        pytest.param("(w * x[:, :3].abs()) / w.sum(dim=-1, keepdim=True).clamp(min=1)", marks=pytest.mark.slow),
        pytest.param("w / w.sum(dim=0, keepdim=True)", marks=pytest.mark.slow),
        pytest.param("w.log() + 0 * w.sum(dim=-1, keepdim=True)", marks=pytest.mark.slow),
    ],
)
def test_no_exponent_is_subtracted_where_it_makes_a_difference(end, tmp_path, x):
    code = f"""
    def forward(self, x):
        w = self.powers(x)
        return {end}

    def powers(self, x):
        return self.fc(x).exp() * 2
    """
    fixes = replay(tmp_path, code, x=x).fixes
    assert not any(fix.verified and "amax(-1" in fix.patch for fix in fixes)
