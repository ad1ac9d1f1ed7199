"""Files with several state dicts: the model takes the one that fits, and none of them hides its NaN."""

import pytest
import torch
from torch import nn

from nandoctor import replay
from nandoctor.dumps.dump import summarize
from nandoctor.dumps.reader import read_dump, read_weights
from nandoctor.errors import DumpError
from nandoctor.step.weights import fit_state


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 4)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.judge = nn.Linear(4, 1)

    def forward(self, x):
        return self.judge(x)


def read(folder, **contents):
    torch.save(contents, folder / "pair.pth")
    return read_dump(folder / "pair.pth")


@pytest.mark.parametrize(
    ("first", "second", "model"),
    [
        (Generator(), nn.DataParallel(Discriminator()), Discriminator()),
        (nn.Linear(4, 8), nn.Linear(2, 8), nn.Linear(2, 8)),
        (nn.Sequential(nn.Linear(4, 8)), Generator(), Generator()),
    ],
    ids=["other names", "other shapes", "the larger one"],
)
def test_the_state_that_fits_is_taken(tmp_path, first, second, model):
    dump = read(tmp_path, model=first.state_dict(), partner=second.state_dict(), x=torch.ones(2, 4))
    assert dump.state_name == "model"
    fitted = fit_state(dump, model)
    assert (fitted.state_name, set(fitted.state)) == ("partner", set(model.state_dict()))
    assert "'partner'" in fitted.notes[-1]


def test_where_both_fit_the_usual_one_stays(tmp_path):
    dump = read(tmp_path, model=nn.Linear(4, 8).state_dict(), ema=nn.Linear(4, 8).state_dict(), x=torch.ones(2, 4))
    fitted = fit_state(dump, nn.Linear(4, 8))
    assert fitted.state_name == "model"
    assert fitted.notes == (f"The weights under 'ema' fit as well: try --weights {tmp_path / 'pair.pth'}:ema.",)
    chosen = read_weights(f"{tmp_path / 'pair.pth'}:ema")
    assert torch.equal(chosen["weight"], dump.other_states["ema"]["weight"])
    with pytest.raises(DumpError, match="no weights"):
        read_weights(f"{tmp_path / 'pair.pth'}:swa")


def poisoned():
    model = Discriminator()
    nn.init.constant_(model.judge.bias, float("nan"))
    return model.state_dict()


@pytest.mark.parametrize("batch", [{"x": torch.ones(2, 4)}, {}], ids=["that ran", "beside others"])
def test_the_report_is_of_the_weights_that_are_not_finite(tmp_path, batch):
    dump = read(tmp_path, generator=Generator().state_dict(), discriminator=poisoned(), **batch)
    assert any("'discriminator'" in note and "judge.bias" in note for note in summarize(dump).notes)
    report = replay(dump, Discriminator() if batch else None, fixes=False).report
    assert (report.verdict, [array.name for array in report.dump.bad_weights]) == ("state", ["judge.bias"])
