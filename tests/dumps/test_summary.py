"""The summary counts exactly, and can be printed anywhere."""

import forge
import pytest
import torch

from nandoctor.dumps.dump import summarize
from nandoctor.dumps.reader import read_dump
from nandoctor.views.inspect_dump import file_blocks

NAN, INF = float("nan"), float("inf")
WEIGHTS = {"conv.weight": torch.ones(4, 3), "norm.running_mean": torch.zeros(4), "norm.weight": torch.ones(4)}


@pytest.fixture
def summary_of(tmp_path):
    def save_and_summarize(**saved):
        path = tmp_path / "dump.pth"
        path.write_bytes(forge.saved({"state_dict": WEIGHTS} | saved))
        return summarize(read_dump(path))

    return save_and_summarize


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_are_exact_in_every_format(dtype, summary_of):
    values = torch.tensor([NAN, INF, -INF, -INF, 1.0, 0.0, NAN, NAN]).to(dtype)
    (entry,) = summary_of(x=values).arrays
    assert (entry.num_nan, entry.num_posinf, entry.num_neginf) == (3, 1, 2)
    assert entry.num_bad == 6
    assert entry.dtype == str(dtype).removeprefix("torch.")


def test_a_notebook_shows_a_dump_in_one_line(tmp_path):
    path = tmp_path / "dump.pth"
    torch.save({"state_dict": {"a.weight": torch.zeros(2)}, **{f"x{i}": torch.ones(1000) for i in range(20)}}, path)
    assert repr(read_dump(path)) == f"Dump({path}: 1 weight; {', '.join(f'x{i}' for i in range(12))} and 8 more)"


def test_failures_and_outputs_stand_first_in_a_long_list(summary_of):
    boxes = [torch.ones(2)] * 25
    (*_, table) = file_blocks(summary_of(boxes=boxes, logit=torch.ones(1), x=torch.tensor([NAN])))
    assert table.columns[0].cells[:3] == ["x", "logit", "boxes.0"]


def test_text_of_the_file_is_fit_for_a_terminal(summary_of):
    summary = summary_of(note="\x1b[31mred\n" + "x" * 1000, widths=list(range(10_000)))
    note, widths = (value for _, value in summary.scalars)
    assert note.startswith("\\x1b[31mred\\nxxx")
    assert max(len(note), len(widths)) < 200
    assert "…" in widths
    many = summary_of(texts=["x" * 100_000] * 10_000)  # one text, of which the file has the place alone
    assert len(many.scalars[0][1]) <= 120
