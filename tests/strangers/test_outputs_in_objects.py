"""A check cannot tell where what was NaN cannot be computed."""

import pytest
import torch
from torch import nn

import nandoctor
from nandoctor.cli import main
from strangers.outputs_in_objects import BATCH


def test_check_cannot_tell_where_the_loss_is_missing(tmp_path, capsys):
    model = nn.Linear(8, 8)
    (tmp_path / "net.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(8, 8)\n")
    torch.save({"state_dict": model.state_dict(), **BATCH, "loss": float("nan")}, tmp_path / "dump.pth")
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(tmp_path / "dump.pth"), "--model", f"{tmp_path}/net.py:make", "--check"])
    assert ended.value.code == 125
    assert "loss was NaN" in capsys.readouterr().err
    case = nandoctor.replay(tmp_path / "dump.pth", model=model)
    assert (case.verdict, case.finite) == ("cannot-tell", False)
