"""Write records as JSON: the contract `nandoctor.report/2` that other tools read."""

from __future__ import annotations

import json
from typing import Any

from nandoctor.evidence.codec import to_plain


def dumps(record: Any) -> str:
    """Return a record as JSON text, ASCII only: names may hold characters that a terminal or encoding cannot take."""
    return json.dumps(to_plain(record), indent=1, allow_nan=False)
