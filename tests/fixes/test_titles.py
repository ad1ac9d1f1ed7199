"""Patches are what a person would write."""

from nandoctor.changes.clamp import ClampArgument
from nandoctor.changes.constant import SetArgument
from nandoctor.changes.state import ResetBuffers
from nandoctor.evidence.edits import OpSite
from nandoctor.evidence.trace import SourceLine
from nandoctor.fixes.writing import write_title


def at(text, op="div", line=45):
    return OpSite(module="norm", type="Norm", op=op, source=SourceLine(file="/somewhere/unet.py", line=line, text=text))


def test_titles_name_the_line_and_numbers_as_code_does():
    eps = SetArgument(site=at("y = x / (std + 1e-8)", "add"), argument="other", was=1e-8, value=1e-4)
    assert write_title(eps) == "Use an eps of 1e-4 instead of 1e-8 in line 45 of unet.py"
    mask = SetArgument(site=at("s.masked_fill(m, -1e9)", "masked_fill"), argument="value", was=-1e9, value=None)
    assert write_title(mask) == "Use the lowest number of its format instead of -1e9 in line 45 of unet.py"
    clamp = ClampArgument(site=at("return torch.log(p)", "log"), argument="self", low=1e-12, high=None)
    assert write_title(clamp) == "Clamp the argument of log to at least 1e-12 in line 45 of unet.py"


def test_titles_count_and_name_what_they_change():
    assert write_title(ResetBuffers(names=("door.running_mean",))) == "Reset the buffer door.running_mean"
    clamp = ClampArgument(site=at("y = a / b"), argument="other", low=1e-6, high=None)
    assert write_title(clamp) == "Clamp the divisor of div to at least 1e-6 in line 45 of unet.py"
    away = ClampArgument(site=at("y = a / b"), argument="other", low=1e-12, high=None, keeps_sign=True)
    assert write_title(away) == "Keep the divisor of div at least 1e-12 away from 0 in line 45 of unet.py"
