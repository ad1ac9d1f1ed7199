"""The page in Chromium: it opens from disk without a complaint, its table can be sorted and searched."""

import html
import json
import re
import shutil
import subprocess

import factory
import pytest

from nandoctor.views.save import save

pytestmark = pytest.mark.slow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LISTENS = '<script>complaints = []; addEventListener("error", event => complaints.push(event.message), true);</script>'
TELLS = """<script>
const rows = () => [...document.querySelectorAll("#layers tbody tr:not([hidden])")];
const names = () => rows().map(row => row.cells[0].title);
const cells = column => rows().map(row => row.cells[column].textContent);
const click = place => document.querySelectorAll("#layers thead button")[place].click();
const told = (() => {{ {actions} }})();
const width = document.documentElement.scrollWidth;
const text = document.createElement("output");
text.textContent = JSON.stringify({{ complaints, width, told: told ?? null }});
document.body.append(text);
</script></body>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    large = factory.precision(400, nonfinite_from=250)
    reports = {
        "fixable": factory.fixable(),
        "large": large,
        "weights": factory.weights_only(),
        "huge": factory.precision(4_000, nonfinite_from=2_000),
    }
    for name, report in reports.items():
        save(report, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in reports}


def opened(page, actions="", width=1200):
    """What a page says of itself once it is loaded and has run these actions."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{LISTENS}", 1)
    changed = page.with_name(f"opened-{page.name}")
    changed.write_text(text.replace("</body>", TELLS.format(actions=actions)), encoding="utf-8")
    # As root in a container the sandbox cannot start; a window of Chromium is never narrower than 500 pixels.
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom")
    done = subprocess.run([CHROMIUM, *flags, changed.as_uri()], capture_output=True, text=True, timeout=300, check=True)
    return json.loads(html.unescape(re.search(r"<output>(.*?)</output>", done.stdout, re.DOTALL)[1]))


@pytest.mark.parametrize("name", ["fixable", "large", "weights", "huge"])
def test_it_opens_from_disk_without_complaints(name, pages):
    told = opened(pages[name], width=500)
    assert told["complaints"] == []
    assert told["width"] <= 500  # a phone need not scroll sideways


def test_sorting_goes_down_up_and_back(pages):
    actions = "const seen = [names()]; for (let i = 0; i < 3; i++) { click(3); seen.push(cells(3)); }"
    before, down, up, _, after = opened(pages["fixable"], f"{actions} seen.push(names()); return seen;")["told"]
    numbers = [float(text) for text in down]
    assert numbers == sorted(numbers, reverse=True)
    assert up == down[::-1]
    assert before == after


def test_searching_filters_by_name_and_type(pages):
    actions = """
        const search = document.getElementById("search");
        const find = text => { search.value = text; search.dispatchEvent(new Event("input")); return names(); };
        const found = find("ATTENTION"), said = document.getElementById("said").textContent;
        find(""); document.getElementById("only-nonfinite").click();
        return [found, said, cells(2)];
    """
    found, said, marked = opened(pages["fixable"], actions)["told"]
    assert len(found) == 5
    assert all("attention" in name for name in found)
    assert said == "5 of 26 calls shown"
    assert set(marked) == {"NaN"}
