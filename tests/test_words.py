"""Words that this project once made up do not return: the field has its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READ = ("nandoctor", "docs", "tests", "benchmarks", "sample_dumps")
ENDINGS = {".py", ".md", ".j2", ".js", ".css", ".ipynb"}

INSTEAD = {
    r"bad(ly)?": "non-finite",
    r"cure[sd]?|curing": "fix",
    r"own[ _]ops": "a forward without its submodules",
    r"exams?": "analysis",
    r"census": "counts",
    r"islands?": "sets of modules in fp32",
    r"fates?": "rounding",
    r"born": "arise, begin",
    r"in vain": "what came of it",
    r"sightings?": "place",
    r"circumstances?": "environment, variations",
}
ALLOWED = (
    r"num[ _]bad\w*|first_bad_index|bad_(weights|buffers|gradients)|recent_bad_losses",  # fields of reports and dumps
    r"(?i)BadParameter|BadZipFile|bad zip",  # other libraries' names
)
FILES = sorted(
    path for name in READ for path in (ROOT / name).rglob("*") if path.suffix in ENDINGS and path != Path(__file__)
)


def find_words(text):
    """The private words in a text, each with its line."""
    for allowed in ALLOWED:
        text = re.sub(allowed, "", text)
    pattern = rf"(?i)(?<![a-z])({'|'.join(INSTEAD)})(?![a-z])"
    return [(text.count("\n", 0, found.start()) + 1, found[0]) for found in re.finditer(pattern, text)]


@pytest.mark.parametrize("text", ["a Cure", "the first_bad row", "own ops", "BAD_ROW", "tried in vain"])
def test_a_private_word_is_found(text):
    assert len(find_words(text)) == 1


@pytest.mark.parametrize("text", ["secure", "example", "num_bad", "badge", "a precursor"])
def test_words_of_the_field_are_not(text):
    assert find_words(text) == []


def test_nobody_uses_private_words():
    assert len(FILES) > 300
    found = {str(path.relative_to(ROOT)): find_words(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: words for name, words in found.items() if words} == {}
