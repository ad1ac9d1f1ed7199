"""How a replay builds what was recorded: without flags, or it says what to add."""

import dataclasses
import functools
import logging
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from trainings import Segmenter, loss_of

import nandoctor
from nandoctor import Recorder
from nandoctor.capture.step_policy import say_next
from nandoctor.errors import ModelError

HERE = Path(__file__).parent


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@dataclasses.dataclass
class Config:
    width: int = 3


class Flexible(nn.Module):
    """It takes whatever has a width."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.linear = nn.Linear(4, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class CFG:
    """As notebooks of competitions have it."""

    width = 3


@pytest.mark.slow  # which imports transformers
def test_a_config_of_transformers_in_an_own_class_is_built(tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=3, attn_implementation="eager")
    advice, command, path = record(tmp_path, caplog, Hidden(config, 2), arguments={"config": config, "factor": 2})
    assert (advice, command) == ([], f"nandoctor replay {path}")
    assert nandoctor.replay(path, fixes=False).report.reproduction.grade == "exact"


class Hidden(Wide):
    def __init__(self, config: Any, factor: int) -> None:
        assert config._attn_implementation == "eager"
        super().__init__(config.hidden_size * factor)


def build_wide() -> nn.Module:
    return Wide(3)


def build_stack(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU())


def make_compiled_in_part() -> nn.Module:
    model = Wide(3)
    model.linear = torch.compile(model.linear, backend="eager")
    return model


def record(folder, caplog, model, **options):
    """What is logged when the recorder is made, and the command that it names for its dump."""
    with caplog.at_level(logging.WARNING), Recorder(model, folder=folder, **options) as recorder:
        advice = list(caplog.messages)
        recorder.watch(model(torch.full((1, 4), float("nan"))).sum(), torch.zeros(1))
    command = caplog.messages[-1].partition("; next: ")[2]
    return advice, command, recorder.written[0]


REPLAYED = {
    "arguments": (lambda: Wide(3), {"arguments": {"width": 3}}),
    "compiled": (make_compiled_in_part, {"arguments": {"width": 3}}),
    "partial": (lambda: Wide(3), {"builder": functools.partial(Wide, width=3)}),
    "a class of torch": (lambda: nn.Linear(4, 2), {"arguments": {"in_features": 4, "out_features": 2}}),
    "builder": (lambda: Wide(3), {"builder": build_wide}),
    "sequential": (build_stack, {"builder": build_stack}),
    "builder with arguments": (lambda: build_stack(5), {"builder": build_stack, "arguments": {"width": 5}}),
    "its partial": (lambda: build_stack(5), {"builder": functools.partial(build_stack, width=5)}),
    "named config": (lambda: Flexible(Config()), {"arguments": {"config": Config()}}),
    "config": (lambda: Flexible(Config()), {}),
    "class as config": (lambda: Flexible(CFG), {}),
}


@pytest.mark.parametrize(("model", "options"), REPLAYED.values(), ids=REPLAYED)
def test_replays_that_need_no_flags(tmp_path, caplog, model, options):
    advice, command, path = record(tmp_path, caplog, model(), **options)
    assert advice == []
    assert command == f"nandoctor replay {path}"
    report = nandoctor.replay(path, fixes=False).report
    assert report.reproduction.grade == "exact"


class Factory:
    @staticmethod
    def build() -> nn.Module:
        return Wide(3)


@pytest.mark.parametrize(
    "options",
    [{"builder": Factory.build}, {"builder": build_stack, "arguments": {"width": np.int64(4)}}],
    ids=["method", "odd argument"],
)
def test_other_builders_are_asked_for_by_the_replay(tmp_path, caplog, options):
    advice, command, path = record(tmp_path, caplog, Wide(3), **options)
    assert (advice, command) == ([], f"nandoctor replay {path}")
    with pytest.raises(ModelError, match="does not import that by itself") as caught:
        nandoctor.replay(path)
    assert "--model " in caught.value.remedy


class Local:
    @staticmethod
    def make():
        class Inner(Wide):
            pass

        return Inner(3)


def test_arguments_that_were_not_given_are_found_in_the_file(tmp_path, caplog):
    advice, command, path = record(tmp_path, caplog, Wide(3))
    assert (advice, command) == ([], f"nandoctor replay {path}")
    report = nandoctor.replay(path, fixes=False).report
    assert report.reproduction.grade == "exact"
    assert any(note.startswith("Built as your own code or the file shows: --model ") for note in report.notes)


@pytest.mark.parametrize("make", [build_stack, Local.make])
def test_what_a_replay_cannot_build_it_asks_for(tmp_path, caplog, make):
    *_, path = record(tmp_path, caplog, make())
    with pytest.raises(ModelError) as caught:
        nandoctor.replay(path)
    assert "--model " in caught.value.remedy


def test_weights_that_the_recorded_class_does_not_fit(tmp_path, caplog):
    *_, path = record(tmp_path, caplog, Wide(3), arguments={"width": 5})
    with pytest.raises(ModelError, match="do not fit Wide") as caught:
        nandoctor.replay(path)
    assert "in the training, give Recorder the arguments" in caught.value.remedy
    with pytest.raises(ModelError, match="do not fit Wide") as caught:
        nandoctor.replay(path, Wide(5))
    assert "Recorder" not in caught.value.remedy


class Counting(Wide):
    """Its constructor changes what the training uses, and ends the process without an argument."""

    made: ClassVar[list[nn.Module]] = []
    generator = np.random.default_rng(0)

    def __init__(self, width: int | None = None) -> None:
        self.made.append(self)
        self.generator.normal()
        if width is None:
            sys.exit("usage: train.py WIDTH")
        super().__init__(width)


@pytest.mark.parametrize(
    "options",
    [{}, {"arguments": {"width": 3}}, {"builder": functools.partial(Counting, width=3)}, {"builder": Counting}],
    ids=["no arguments", "arguments", "partial", "class"],
)
def test_no_constructor_runs_in_the_training(tmp_path, options):
    model = Counting(3)
    before = len(Counting.made), Counting.generator.bit_generator.state
    Recorder(model, folder=tmp_path, **options).close()
    assert (len(Counting.made), Counting.generator.bit_generator.state) == before


CELL = """
class Head(nn.Linear):
    def forward(self, x):
        return super().forward(x) / x.sum()

def loss_of(output, batch):
    return output.mean()
"""


def test_what_a_notebook_defines_is_replayed_in_it(tmp_path, caplog, monkeypatch):
    main = types.ModuleType("__main__")
    exec(CELL, vars(main) | {"nn": nn}, vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    model = main.Head(2, 1)
    arguments = {"in_features": 2, "out_features": 1}
    with Recorder(model, folder=tmp_path, loss=main.loss_of, arguments=arguments) as recorder:
        recorder.watch(main.loss_of(model(torch.zeros(3, 2)), None), torch.zeros(1))
    assert caplog.messages[0].endswith(f"; next, here: nandoctor.replay({str(recorder.written[0])!r})")
    case = nandoctor.replay(recorder.written[0], fixes=False)
    assert (case.report.reproduction.grade, case.report.origin.op) == ("exact", "div")
    assert case.report.arguments == ()  # a command could not find the class
    monkeypatch.delattr(sys, "ps1")
    with pytest.raises(ModelError, match="typed into a notebook") as caught:
        nandoctor.replay(recorder.written[0])
    assert "--model FILE.py:Head" in caught.value.remedy


def test_a_training_from_another_folder_names_its_file(here, caplog, monkeypatch):
    _, command, path = record(here, caplog, Wide(3), arguments={"width": 3}, loss=loss_of)
    assert command.startswith(f"nandoctor replay {path} --model {HERE / 'test_rebuild.py'}:Wide --model-arg width=3 ")
    written = {"model": {"module": "net", "name": "Net", "file": ""}, "loss_function": None}
    for started, typed in [(HERE, f"{Path.cwd()}/a.pth"), (Path.cwd(), "a.pth")]:
        monkeypatch.setenv("PWD", str(started))
        assert say_next(Path("a.pth"), written).endswith(f"next: nandoctor replay {typed}")
    with pytest.raises(ModelError) as caught:
        nandoctor.replay(path)
    assert f"--model {HERE / 'test_rebuild.py'}:Wide --model-arg width=3" in caught.value.remedy


def test_a_class_that_needs_arguments_is_no_loss(tmp_path):
    torch.save({"state_dict": nn.Linear(2, 1).state_dict(), "input": torch.zeros(3, 2)}, tmp_path / "nan.pth")
    with pytest.raises(ModelError, match="class that needs arguments") as caught:
        nandoctor.replay(tmp_path / "nan.pth", model=lambda: nn.Linear(2, 1), loss=Wide)
    assert "loss_of = Wide(...)" in caught.value.remedy


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, batch: output.sum(),
        nn.CrossEntropyLoss(),
        torch.nn.functional.mse_loss,
        functools.wraps(loss_of)(lambda output, batch: output.sum()),
    ],
    ids=["lambda", "instance", "of torch", "wrapped"],
)
def test_a_loss_that_cannot_be_imported_is_said_beforehand(tmp_path, caplog, loss):
    Recorder(Segmenter(), folder=tmp_path, loss=loss).close()
    assert len(caplog.messages) == 1
    assert "cannot import the loss" in caplog.messages[0]
