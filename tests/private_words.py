"""Words that this project once made up, and what the field says instead.

In: a text. Out: those of its words that no reader knows.
"""

import re

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
    r"num[ _]bad\w*|first_bad_index|bad_(weights|buffers|gradients)",  # fields of reports and dumps
    r"(?i)BadParameter|BadZipFile|bad zip|bad_alloc",  # other libraries' names
)


def find_words(text):
    """The private words in a text, each with its line."""
    for allowed in ALLOWED:
        text = re.sub(allowed, "", text)
    pattern = rf"(?i)(?<![a-z])({'|'.join(INSTEAD)})(?![a-z])"
    return [(text.count("\n", 0, found.start()) + 1, found[0]) for found in re.finditer(pattern, text)]
