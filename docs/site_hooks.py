"""Replaces links to files outside docs/ by their paths, since the site has no such pages.

In: a page's Markdown. Out: the same, with only links that the site can follow.
"""

import re
from pathlib import PurePosixPath

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")
_PAGES = (".md", ".ipynb", ".png", ".svg", ".json")


def on_page_markdown(markdown, page, **_):
    """Take the links to sources and folders out of a page."""
    folder = PurePosixPath(page.file.src_uri).parent

    def follow(match):
        target = match["target"]
        outside = str(folder).count("/") + (folder != PurePosixPath("."))
        if target.count("../") <= outside and target.endswith(_PAGES):
            return match[0]
        path, text = target.replace("../", ""), match["text"].strip("`")
        longer, shorter = sorted((path, text), key=len, reverse=True)
        return f"`{longer}`" if longer.endswith(shorter) else f"{match['text']} (`{path}`)"

    return _LINK.sub(follow, markdown)
