"""Gives the keywords of `nandoctor.replay` their meanings on the API page.

In: options.md, whose table the tests hold to the settings, and the TypedDicts that griffe has read. Out: the TypedDicts
with a docstring for each key, which griffe's unpack_typeddict puts into the signatures.
"""

import re
from pathlib import Path

import griffe

_ROW = re.compile(r"^\| `--(no-)?[^`]*` \| `(\w+)` \|.*\| (.+) \|$", re.MULTILINE)
_RECORDS = ("StepOptions", "ReplayOptions")


class OptionMeanings(griffe.Extension):
    """Written before unpack_typeddict reads them."""

    def on_package(self, *, pkg, **_):
        """Write the meanings as docstrings."""
        rows = _ROW.findall(Path(__file__).with_name("options.md").read_text(encoding="utf-8"))
        meanings = {name: f"False to {text[0].lower()}{text[1:]}" if off else text for off, name, text in rows}
        for record in _RECORDS:
            for name, key in pkg["replaying.settings"][record].attributes.items():
                key.docstring = griffe.Docstring(meanings[name], parent=key)
