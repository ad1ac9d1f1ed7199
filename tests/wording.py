"""What a printed text says, without what follows the processor: other kernels sum in another order.

In: what a command, a renderer or a notebook printed. Out: its words, to be compared with those of another machine.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?(e[+-]?\d+)?")
BAR = re.compile(r"[█░]+")
AGREEMENT = re.compile(
    r"(?<=non-finite, )all others (identical|within # % of the largest)"
    r"|(?<=finite in both, )(and identical|its values within # % of the largest)"
)
"""A replay that agrees to the last bit here may agree within rounding there, and the other way round."""


def words(text: str) -> list[str]:
    """The words of `text`: each number is #, the bars of a table are left out, and two ways to agree are one."""
    plainer = " ".join(NUMBER.sub("#", BAR.sub("", text)).split())
    return AGREEMENT.sub("AGREES", plainer).split()
