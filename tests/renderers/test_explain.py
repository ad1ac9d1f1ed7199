"""What `nandoctor explain` prints."""

from __future__ import annotations

import io

from click.testing import CliRunner
from one_test import for_each
from rich.console import Console

from nandoctor.causes.registry import find_page, list_pages
from nandoctor.cli import main
from nandoctor.renderers.explain import print_catalogue, print_page


def printed(page, **options):
    console = Console(file=io.StringIO(), **{"width": 100, **options})
    print_page(page, console)
    return console.file.getvalue()


def lines_of(text):
    return [line.rstrip() for line in text.splitlines()]


def test_a_page_begins_with_its_code_title_and_summary():
    assert lines_of(printed(find_page("eps-underflow")))[:4] == [
        "eps-underflow: A small constant is lost in the lower precision",
        "The small constant that should keep a value off zero is rounded away.",
        "",
        "What it is",
    ]


@for_each(list_pages())
def test_everything_that_a_page_has_to_say_is_printed(page):
    shown = " ".join(printed(page).split())
    for heading, paragraph in page.sections:
        assert heading in shown
        assert paragraph in shown
    assert f"docs/causes/{page.code}.md" in shown


def test_lines_are_short_on_a_wide_terminal_and_fit_a_narrow_one():
    page = find_page("poisoned-buffers")
    assert max(map(len, lines_of(printed(page, width=200)))) <= 88
    assert max(map(len, lines_of(printed(page, width=40)))) <= 40


def test_code_is_coloured_where_there_is_colour():
    page = find_page("log-of-zero")
    assert "\x1b" not in printed(page)
    assert "\x1b[36m" in printed(find_page("eps-underflow"), force_terminal=True)


def test_the_catalogue_lists_every_code_with_its_title():
    console = Console(file=io.StringIO(), width=120)
    print_catalogue(list_pages(), console)
    rows = [line.split(maxsplit=1) for line in lines_of(console.file.getvalue())]
    assert rows == [[page.code, page.title] for page in list_pages()]


def test_the_verb_prints_one_page_or_the_list():
    one, every = CliRunner().invoke(main, ["explain", "exp-overflow"]), CliRunner().invoke(main, ["explain"])
    assert (one.exit_code, every.exit_code) == (0, 0)
    assert one.stdout.startswith("exp-overflow: ")
    assert all(page.code in every.stdout for page in list_pages())


def test_a_wrong_code_is_one_error_with_its_remedy():
    result = CliRunner().invoke(main, ["explain", "exp-underflow"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[0] == "nandoctor: There is no cause 'exp-underflow'."
    assert "exp-overflow" in result.stderr
