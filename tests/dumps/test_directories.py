"""A directory in place of a dump: what it is, and what to do."""

from __future__ import annotations

import pytest

from nandoctor.dumps.reader import read_dump
from nandoctor.errors import DumpError

KINDS = [
    ((".metadata", "__0_0.distcp"), "DCP", "dcp_to_torch"),
    (("zero_to_fp32.py", "latest"), "DeepSpeed", "zero_to_fp32.py"),
    (("model.safetensors.index.json", "model-00001-of-00002.safetensors"), "Hugging Face", "--weights"),
    (("pytorch_model.bin", "config.json"), "Hugging Face", "--weights"),
    (("nan-step000001.pth",), "dumps", "nandoctor triage"),
    ((), "a directory", "torch.save"),
]


@pytest.mark.parametrize(("names", "kind", "remedy"), KINDS)
def test_a_directory_is_named_with_its_command(tmp_path, names, kind, remedy):
    folder = tmp_path / "some folder"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    with pytest.raises(DumpError) as caught:
        read_dump(folder)
    assert kind in caught.value.message
    assert remedy in caught.value.remedy
    if "some folder" in caught.value.remedy:
        assert f"'{folder}'" in caught.value.remedy
