"""Which classes are suggested for a dump without a model, from the text of the files near it."""

import os

import pytest

from nandoctor.replaying.model_search import suggest_models

UNET = """
import torch.nn as nn
import no_such_package
raise SystemExit("this file is read, not run")

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 3, 3)

class UNet(Base):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.skip = nn.Conv2d(3, width, 3), None
        self.register_buffer("scale", None)
"""
NAMES = ["down.weight", "down.bias", "up.weight", "scale"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, path, text=UNET):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "model.", "net."])
def test_a_class_by_the_names_of_its_weights(wrapper, folder):
    write(folder, "models/unet.py")
    write(folder, "other.py", "import torch\n\nclass Net(torch.nn.Module):\n    def f(self):\n        self.down = 1\n")
    assert suggest_models([wrapper + name for name in NAMES], (folder, folder)) == ["models/unet.py:UNet"]


@pytest.mark.parametrize("line", ["train()", "for _ in range(9):\n    print()"])
def test_what_may_train_is_not_suggested(line, folder):
    write(folder, "train.py", UNET + f"\ndef train():\n    pass\n\n{line}\n")
    assert suggest_models(NAMES, (folder,)) == []
    write(
        folder, "train.py", "class Plain:\n    def __init__(self):\n        self.down = self.up = self.scale = None\n"
    )
    assert suggest_models(NAMES, (folder,)) == []


def test_what_is_no_code_of_the_project(folder):
    for path in (".venv/unet.py", "site-packages/unet.py", "a/b/unet.py"):
        write(folder, path)
    write(folder, "broken.py", UNET + "\ndef (:\n")
    (folder / "gone.py").symlink_to("nowhere.py")
    os.mkfifo(folder / "pipe.py")
    (folder / "large.py").write_text(UNET + "#" * (1 << 20))
    assert suggest_models(NAMES, (folder,)) == []
    assert suggest_models(["0.weight"], (folder,)) == []
    assert suggest_models([], (folder,)) == []


def test_folders_of_others_are_passed_over(folder, monkeypatch):
    """As below /home, where one may list a folder and look into none of its own."""
    write(folder, "mine/unet.py")
    write(folder, "theirs/unet.py")
    look, may = os.stat, os.access

    def refuse(path, *args, **kwargs):
        if "theirs" in str(path):
            raise PermissionError(path)
        return look(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path) and may(path, mode))
    assert suggest_models(NAMES, (folder,)) == ["mine/unet.py:UNet"]
