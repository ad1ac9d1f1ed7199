"""Samples are those with which the step fails and without which it does not, wherever their rows go; else unknown."""

import torch
from torch import nn

from strangers.rows import Rows
from strangers.visits import mean_square, normal

rows = Rows()
HOT = 1


def hot(*shape):
    values = normal(*shape)
    values[HOT] *= 1e4
    return values


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry, self.steps = nn.Linear(8, 8), nn.LSTM(8, 8)

    def end(self, h):
        return h * 300


def net(forward):
    return type("Net", (Base,), {"forward": forward})()


def packed(self, x, lengths):
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return self.end(self.entry(rows.data))


def messages(self, x, edge_index):
    return self.end(self.entry(x)[edge_index[0]])


def attended(steps_first):
    def forward(self, x):
        q = self.entry(x / 1e3)
        q = q.transpose(0, 1) if steps_first else q
        mixed = torch.bmm(torch.softmax(torch.bmm(q, q.transpose(1, 2)), -1), q)
        return self.end((mixed.transpose(0, 1) if steps_first else mixed) * 1e4)

    return forward


EDGES = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]])
FLAT, SERIES = {"x": hot(4, 8)}, {"x": hot(4, 6, 8)}
UNKNOWN = {
    "edges of a graph": (messages, {"x": hot(6, 8), "edge_index": EDGES}),
    "tokens": (lambda self, x: self.end(self.entry(x.reshape(-1, 8))), SERIES),
    "steps in time": (lambda self, x: self.end(self.steps(x)[0] * 1e6), {"x": normal(5, 3, 8)}),
    "attention along the first": (attended(steps_first=True), SERIES),
    "average over the first": (lambda self, x: self.end(self.entry(x)).mean(0), SERIES),
    "added up over the batch": (lambda self, x: self.end(self.entry(x).half().amax(dim=(0, 2))), {"x": hot(6, 6, 8)}),
    "positions": (lambda self, x: x + self.end(torch.arange(4.0)[:, None].half() * 1e3), FLAT),
}
KNOWN = {
    "plain": (lambda self, x: self.end(self.entry(x)), FLAT),
    "nothing but a sequence": (lambda self, x: self.end(self.entry(x)), SERIES),
    "with its target": (lambda self, x, y: self.end(self.entry(x)) - y[:, None], {**FLAT, "y": normal(4)}),
    "tokens and back": (
        lambda self, x, y: self.end(self.entry(x.reshape(-1, 8)).view(4, 6, 8)) - y[:, None, None],
        {**SERIES, "y": normal(4)},
    ),
    "attention along the second": (attended(steps_first=False), {"x": hot(4, 6, 8)}),
    "maps": (lambda self, x: self.end(self.entry(x).half().amax(dim=(1, 2))), {"x": hot(8, 8, 8, 8)}),
    "a column of numbers": (lambda self, x, y: self.end(y[:, None].half() - self.entry(x)), {**FLAT, "y": normal(4)}),
    "first token": (lambda self, x: self.end(self.entry(x)[:, 0]), SERIES),
    "pairs apart": (lambda self, a, b: self.end(self.entry(a)) + self.entry(b), {"a": hot(4, 8), "b": normal(4, 8)}),
    "similarities": (lambda self, a, b: self.end(a @ b.T), {"a": hot(4, 8) / 8, "b": normal(4, 8)}),
    "packed rows": (packed, {"x": hot(4, 6, 8), "lengths": torch.ones(4, dtype=torch.int64)}),
    "pairs": (lambda self, a, b: self.end(self.entry(torch.cat([a, b]))), {"a": hot(4, 8), "b": normal(4, 8)}),
    "sorted": (lambda self, x: self.end(self.entry(x[x[:, 0].argsort()])), FLAT),
    "mixed up": (lambda self, x: self.end(self.entry(x + x[torch.tensor([1, 2, 3, 0])])), FLAT),
    "columns": (lambda self, x: self.end(self.entry(x.T)), {"x": hot(8, 8)}),
}


for is_known, kinds in ((False, UNKNOWN), (True, KNOWN)):
    for index, (name, (forward, batch)) in enumerate(kinds.items()):
        # All overflow at the same line: fixes are searched for one in five.
        options = {} if index % 5 == 0 else {"fixes": False}
        rows("precision", batch, forward, name=name, samples=(HOT,) if is_known else None, **options)(net)


def seen(self, turn, move):
    return self.end(self.entry(turn.ravel()[:8] + move[1]))[:, None]


def keeps_the_order(report):
    return all(it.status == "not-checked" for it in report.fixes[0].checks if it.name == "samples in another order")


CAMERA = {"name": "a camera and no batch", "samples": None, "fix": "verified *", "holds": keeps_the_order}
rows("precision", {"turn": hot(3, 3), "move": normal(3)}, seen, loss=mean_square, **CAMERA)(net)


def contrastive(output, label):
    alike = torch.eq(label[:, None], label).float() - torch.eye(len(label))
    return -((torch.log_softmax(output.float() @ output.float().T, 1) * alike).sum(1) / alike.sum(1)).mean()


class Tower(nn.Embedding):
    def __init__(self):
        super().__init__(9, 4, padding_idx=0)

    def forward(self, ids):
        mean = super().forward(ids).mean(1)
        return mean / mean.norm(dim=1, keepdim=True)


def tokens(samples, length, empty=None):
    ids = torch.arange(samples * length).reshape(samples, length) % 8 + 1
    return ids if empty is None else torch.where(torch.arange(samples)[:, None] == empty, 0, ids)


ROWS = {"x": torch.cat([normal(2, 8), 1e4 * normal(1, 8)])}
OF_A_WEIGHT = {"name": "rows of a weight", "samples": (2,), "loss": mean_square, "fix": "verified *"}
rows("precision . linear gradient-overflow", ROWS, 8, 3, **OF_A_WEIGHT)(nn.Linear)
LABELS = {"x": normal(8, 8), "label": torch.tensor([0, 0, 1, 1, 2, 2, 3, 1])}
rows("numerics", LABELS, lambda self, x: self.entry(x), name="a lone label", samples=(6,), loss=contrastive)(net)
GRID = {**FLAT, "grid": normal(6, 8), "label": normal(4)}
BESIDE = {"name": "beside a grid", "samples": (HOT,), "inputs": "x,grid"}
rows("precision", GRID, lambda self, x, grid: self.end(self.entry(x))[:, None] + grid, **BESIDE)(net)


def sizes(output, batch):
    pairs = zip(output, batch["targets"], strict=True)
    return sum((row[: len(it["sizes"])] / it["sizes"]).log1p().mean() for row, it in pairs)


WIDTHS = [torch.ones(2), torch.ones(2), torch.tensor([1.0, 0.0, 2.0]), torch.ones(1)]
for kind in (list, tuple):
    LISTED = {"x": normal(4, 8), "targets": kind({"sizes": width} for width in WIDTHS)}
    IN_LISTS = {"name": f"a {kind.__name__} of dicts", "samples": None, "loss": sizes, "inputs": "x"}
    rows("numerics <loss> div", LISTED, lambda self, x: self.entry(x).abs(), **IN_LISTS)(net)


@rows("numerics query div division-by-zero", {"ids": tokens(8, 5, empty=2), "others": tokens(8, 12)}, samples=(2,))
class Towers(nn.Module):
    """The similarity of each text of one kind with each of another, one of which is padding alone."""

    def __init__(self):
        super().__init__()
        self.query, self.other = Tower(), Tower()

    def forward(self, ids, others):
        return self.query(ids) @ self.other(others).T
