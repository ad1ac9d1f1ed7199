"""Dumps of other versions of torch, from `sample_dumps/siamese_duplicate.py`; 2.4 has no emulation, only autocast."""

from pathlib import Path

import pytest
import torch

import nandoctor

EXPECTED = ("gradient-singularity", "sqrt", "distance")
SPEC = str(Path(__file__).parents[2] / "sample_dumps" / "siamese_duplicate.py") + ":"


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "made_by").glob("*.pth")), ids=lambda path: path.stem)
def test_a_dump_of_another_torch_is_diagnosed_alike(path):
    report = nandoctor.replay(path, SPEC + "Siamese", loss=SPEC + "contrastive_loss", fixes=False).report
    assert (report.cause.code, report.origin.op, report.origin.place.module) == EXPECTED
    assert report.reproduction.grade in ("exact", "same-mask")
    assert ("Recorded with torch" in str(report.notes)) == (f"{path.stem}." not in f"torch-{torch.__version__}")
