"""What `nandoctor explain` prints."""

from __future__ import annotations

from importlib import import_module

from click.testing import CliRunner
from one_test import for_each
from surfaces import terminal

from nandoctor.causes.registry import list_pages
from nandoctor.cli import main


@for_each(list_pages())
def test_everything_that_a_page_has_to_say_is_printed(page):
    shown = " ".join(terminal(page).split())
    assert shown.startswith(f"{page.code}: {page.title} ")
    for heading, paragraph in page.sections:
        assert heading in shown
        assert paragraph in shown
    assert page.title == import_module(shown.rpartition("The rule itself is the module ")[2]).TITLE


def test_the_verb_prints_one_page_or_the_list():
    one, every = CliRunner().invoke(main, ["explain", "exp-overflow"]), CliRunner().invoke(main, ["explain"])
    assert (one.exit_code, every.exit_code) == (0, 0)
    assert one.stdout.startswith("exp-overflow: ")
    assert all(page.code in every.stdout for page in list_pages())
