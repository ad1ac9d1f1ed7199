"""Words that this project once made up do not return: the field has its own."""

from pathlib import Path

from private_words import find_words

ROOT = Path(__file__).parent.parent
READ = ("nandoctor", "docs", "tests", "benchmarks", "sample_dumps")
ENDINGS = {".py", ".md", ".j2", ".js", ".css", ".ipynb"}

FILES = sorted(
    path
    for name in READ
    for path in (ROOT / name).rglob("*")
    if path.suffix in ENDINGS and path.name not in ("test_words.py", "private_words.py")
)


def test_nobody_uses_private_words():
    assert len(FILES) > 300
    found = {str(path.relative_to(ROOT)): find_words(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: words for name, words in found.items() if words} == {}
