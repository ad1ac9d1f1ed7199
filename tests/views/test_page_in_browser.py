"""The page in Chromium: it opens from disk, asks nobody for anything, and what can be clicked works."""

from __future__ import annotations

from dataclasses import replace

import factory
import pytest
from browser import CHROMIUM, Browser
from test_page import hostile

from nandoctor.views.save import save

pytestmark = pytest.mark.slow

LIMIT = 2_000_000  # bytes
NAMES = "[...document.querySelectorAll('#layers tbody tr:not([hidden])')].map(row => row.cells[0].title)"
CELLS = "[...document.querySelectorAll('#layers tbody tr:not([hidden])')].map(row => row.cells[{}].textContent)"
CLICK = "document.querySelector({!r}).click()"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    large = factory.precision(400, nonfinite_from=250)
    reports = {
        "fixable": factory.fixable(),
        "large": replace(large, runs=factory.surveyed(large.runs)),
        "hostile": hostile(),
        "weights": factory.weights_only(),
        "huge": factory.precision(4_000, nonfinite_from=2_000),
    }
    for name, report in reports.items():
        save(report, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in reports}


@pytest.fixture
def opened(browser, pages):
    browser.look()
    browser.open(pages["fixable"])
    return browser


def sort_by(browser, column):
    browser.run(f"document.querySelectorAll('#layers thead button')[{column}].click()")
    return browser.run(f"document.querySelectorAll('#layers thead th')[{column}].getAttribute('aria-sort')")


@pytest.mark.parametrize("name", ["fixable", "large", "hostile", "weights", "huge"])
def test_it_opens_from_disk_without_requests_or_complaints(name, browser, pages):
    browser.look()
    browser.open(pages[name])
    browser.run("new Promise(done => setTimeout(done, 200))")
    assert [url for url in browser.requests if not url.startswith(("data:", pages[name].as_uri()))] == []
    assert browser.complaints == []
    assert browser.run("document.title").endswith("nandoctor")


def test_a_page_of_many_layers_is_small(pages):
    assert pages["large"].stat().st_size < LIMIT
    assert pages["huge"].stat().st_size < 4 * LIMIT


def test_sorting_goes_down_up_and_back(opened):
    tree = opened.run(NAMES)
    assert sort_by(opened, 3) == "descending"
    down = [float(text) for text in opened.run(CELLS.format(3))]
    assert down == sorted(down, reverse=True)
    assert sort_by(opened, 3) == "ascending"
    assert [float(text) for text in opened.run(CELLS.format(3))] == down[::-1]
    assert sort_by(opened, 3) == "none"
    assert opened.run(NAMES) == tree


def test_nonfinite_sorts_above_numbers_and_missing_below(opened):
    sort_by(opened, 2)
    cells = opened.run(CELLS.format(2))
    assert cells[: cells.count("NaN")] == ["NaN"] * cells.count("NaN")
    sort_by(opened, 4)
    errors = opened.run(CELLS.format(4))
    assert errors[-errors.count("-") :] == ["-"] * errors.count("-")


def test_searching_filters_by_name_and_type(opened):
    opened.run("search.value = 'ATTENTION'; search.dispatchEvent(new Event('input'))")
    names = opened.run(NAMES)
    assert len(names) == 5
    assert all("attention" in name for name in names)
    assert opened.run("said.textContent") == "5 of 26 calls shown"
    opened.run("search.value = ''; search.dispatchEvent(new Event('input'))")
    opened.run(CLICK.format("#only-nonfinite"))
    assert all(cell == "NaN" for cell in opened.run(CELLS.format(2)))


def test_the_slash_key_leads_to_the_search_and_escape_clears_it(opened):
    opened.press("/")
    assert opened.run("document.activeElement.id") == "search"
    opened.press("m")
    opened.press("l")
    opened.press("p")
    assert len(opened.run(NAMES)) == 5
    opened.press("Escape")
    assert len(opened.run(NAMES)) == 26


def test_a_large_model_opens_on_its_first_nonfinite_layer(browser, pages):
    browser.look()
    browser.open(pages["large"])
    inside = """(() => {
        const row = document.querySelector("tr.row-first").getBoundingClientRect();
        const frame = document.querySelector("#layers").parentElement.getBoundingClientRect();
        return frame.top <= row.top && row.bottom <= frame.bottom;
    })()"""
    assert browser.run(inside)


def test_a_patch_is_copied(opened):
    opened.allow("clipboardReadWrite", "clipboardSanitizedWrite")
    opened.send("Page.bringToFront")
    button = "document.querySelector('[data-copy=patch-1]')"
    told = f"ask = () => {button}.textContent === 'Copied' ? done({button}.textContent) : setTimeout(ask, 20)"
    assert opened.run(f"{button}.click(), new Promise(done => {{ const {told}; ask() }})") == "Copied"
    assert opened.run("navigator.clipboard.readText()") == (
        "- return x / torch.sqrt(variance + 1e-8)\n+ return x / torch.sqrt(variance + 1e-5)\n"
    )


@pytest.mark.parametrize("name", ["fixable", "large", "hostile", "weights"])
def test_a_phone_need_not_scroll_sideways(name, browser, pages):
    browser.look(width=390)
    browser.open(pages[name])
    assert browser.run("document.documentElement.scrollWidth") <= 390


def test_whatever_can_be_worked_has_a_name(opened):
    tree = opened.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "searchbox", "checkbox", "image", "region", "link"}
    found = [node for node in tree if not node["ignored"] and node.get("role", {}).get("value") in roles]
    assert len(found) > 20
    assert [node["role"]["value"] for node in found if not node.get("name", {}).get("value")] == []
