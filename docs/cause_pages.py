"""Writes docs/causes.md and docs/causes/CODE.md: the docstring of a cause's module, and two programs that show it.

In: the modules of nandoctor.causes, and docs/causes/CODE/failing.py and fixed.py, which the tests run. Out: Markdown.
"""

import ast
import difflib
from pathlib import Path

from nandoctor.causes.registry import list_pages

DOCS = Path(__file__).parent
MADE = "`python docs/cause_pages.py` makes this page from the cause's module in `nandoctor/causes/`"


def table(pages, folder):
    """Return the causes as a Markdown table of codes and titles; the codes link to their pages in `folder`."""
    rows = (f"| [`{page.code}`]({folder}/{page.code}.md) | {page.title} |" for page in pages)
    return "\n".join(["| cause | what happens |", "|---|---|", *rows])


def program(code, name):
    """Return the text of one of the two programs of a cause."""
    return (DOCS / "causes" / code / f"{name}.py").read_text(encoding="utf-8")


def replay_options(text):
    """Return the options of a replay of the program's step; a recorder's file needs none."""
    if "Recorder" in text:
        return {}
    return {"model": "{file}:Net", **({"loss": "{file}:loss"} if "\ndef loss(" in text else {})}


def commands(text):
    """Return the commands that run the failing program and replay its step."""
    dump = "dumps/*.pth" if "Recorder" in text else "step.pth"
    flags = [f"--{name} {value.format(file='failing.py')}" for name, value in replay_options(text).items()]
    return "\n".join(["python failing.py", " ".join(["nandoctor replay", dump, *flags])])


def says(text):
    """Return the docstring of a program."""
    return ast.get_docstring(ast.parse(text))


def without_docstring(text):
    """Return the lines of a program after its docstring."""
    return text.split('"""\n\n', 1)[1].splitlines()


def page_markdown(page):
    """Return the page of one cause."""
    failing, fixed = program(page.code, "failing"), program(page.code, "fixed")
    before, after = without_docstring(failing), without_docstring(fixed)
    diff = list(difflib.unified_diff(before, after, lineterm="", n=1))[2:]
    return "\n".join(
        [
            *(f"# {page.code}", "", f"**{page.title}.** {page.summary[:1].upper()}{page.summary[1:]}"),
            *(line for heading, paragraph in page.sections for line in ("", f"## {heading}", "", paragraph)),
            *("", "## A program that fails", "", says(failing), "", "```python", *before, "```", ""),
            *("```bash", commands(failing), "```"),
            *("", "## The same program, fixed", "", says(fixed), "", "```diff", *diff, "```", ""),
            *("A replay of its step finds nothing non-finite.", ""),
            f"{MADE} and the programs in `docs/causes/{page.code}/`, which the tests run.",
        ]
    )


def documents():
    """Return every page by its path below docs/."""
    pages = list_pages()
    index = ["# The causes", "", "`nandoctor explain CODE` prints what a page says, without its programs.", ""]
    made = {"causes.md": "\n".join([*index, table(pages, "causes")])}
    made |= {f"causes/{page.code}.md": page_markdown(page) for page in pages}
    return {name: f"{text}\n" for name, text in made.items()}


if __name__ == "__main__":
    for name, text in documents().items():
        (DOCS / name).write_text(text, encoding="utf-8")
