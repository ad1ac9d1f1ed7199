"""What `nandoctor explain` prints."""

from importlib import import_module

from one_test import for_each
from surfaces import terminal

from nandoctor.causes.registry import list_pages


@for_each(list_pages())
def test_everything_that_a_page_has_to_say_is_printed(page):
    shown = " ".join(terminal(page).split())
    assert shown.startswith(f"{page.code}: {page.title} ")
    for heading, paragraph in page.sections:
        assert heading in shown
        assert paragraph in shown
    assert page.title == import_module(shown.rpartition("The rule itself is the module ")[2]).TITLE
