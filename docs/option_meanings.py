"""Gives the keywords of `nandoctor.replay` their meanings on the API page.

In: options.md (tests compare its table with the settings), and the TypedDicts that griffe has read. Out: `replay` with
each of its keywords written out. `verify` and `repro` say in a line which of them they take.
"""

import re
from pathlib import Path

import griffe

_ROW = re.compile(r"^\| `--(no-)?[^`]*` \| ([^|]+) \| `(\w+)` \| [^|]+ \|$", re.MULTILINE)
_RECORDS = ("StepOptions", "ReplayOptions")


class OptionMeanings(griffe.UnpackTypedDictExtension):
    """Unpacks the keywords of one function, with their meanings and None as the default."""

    def on_package(self, *, pkg, **_):
        """Write the meanings as docstrings, before the records are read."""
        rows = _ROW.findall(Path(__file__).with_name("options.md").read_text(encoding="utf-8"))
        meanings = {name: f"False to {text[0].lower()}{text[1:]}" if off else text for off, text, name in rows}
        for record in _RECORDS:
            for name, key in pkg["step.settings"][record].attributes.items():
                key.docstring = griffe.Docstring(meanings[name], parent=key)

    def on_function(self, *, func, **kwargs):
        """Unpack the keywords of `replay`."""
        if func.path != "nandoctor.case.replay":
            return
        super().on_function(func=func, **kwargs)
        described = next(section for section in func.docstring.parsed if section.kind.value == "parameters")
        for parameter in [*func.parameters, *described.value]:
            if parameter.default == "...":
                parameter.default = "None"
