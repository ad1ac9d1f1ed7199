"""Every rule has its page: the fixed sections, a code of the published list, a title."""

from __future__ import annotations

import pkgutil
import re

import pytest

import nandoctor.causes
from nandoctor.causes.registry import RULES, SECTIONS, find_page, list_pages
from nandoctor.errors import NanDoctorError

PUBLISHED = {
    "matmul-overflow", "elementwise-overflow", "reduction-overflow", "exp-overflow", "input-cast-overflow",
    "mask-constant-overflow", "eps-underflow", "log-of-zero", "fully-masked-softmax", "division-by-zero",
    "empty-reduction", "invalid-domain", "indeterminate-form", "silent-overflow", "gradient-singularity",
    "where-gradient-trap", "gradient-overflow", "loss-scale-overflow", "poisoned-weights", "poisoned-buffers",
    "poisoned-input", "poisoned-target", "optimizer-eps-underflow",
}  # fmt: skip
MACHINERY = {"base", "registry"}

every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.CODE)
every_page = pytest.mark.parametrize("page", list_pages(), ids=lambda page: page.code)


def test_the_catalogue_has_every_published_code_once():
    codes = [rule.CODE for rule in RULES]
    assert len(codes) == len(set(codes))
    assert set(codes) == PUBLISHED


def test_the_catalogue_has_every_rule_file():
    files = {module.name for module in pkgutil.iter_modules(nandoctor.causes.__path__)} - MACHINERY
    assert {rule.__name__.rpartition(".")[2] for rule in RULES} == files


@every_rule
def test_a_rule_file_is_called_as_its_code(rule):
    assert rule.__name__.rpartition(".")[2] == rule.CODE.replace("-", "_")
    assert rule.__doc__.startswith(f"{rule.CODE}: ")


@every_rule
def test_a_title_is_one_short_phrase(rule):
    assert rule.TITLE[0].isupper()
    assert not rule.TITLE.endswith(".")
    assert len(rule.TITLE) <= 70


@every_page
def test_a_page_has_the_fixed_sections_in_order(page):
    assert tuple(heading for heading, _ in page.sections) == SECTIONS
    assert all(paragraph.endswith(".") for _, paragraph in page.sections)
    assert page.summary.endswith(".")


@every_page
def test_the_code_in_a_fix_is_whole(page):
    paragraphs = " ".join(paragraph for _, paragraph in page.sections)
    assert paragraphs.count("`") % 2 == 0
    snippets = re.findall(r"`([^`]*)`", paragraphs)
    assert all(snippet.count("(") == snippet.count(")") for snippet in snippets)


def test_a_page_is_found_by_its_code():
    page = find_page("eps-underflow")
    assert page.code == "eps-underflow"
    assert page.summary == "the small constant that was to prevent a division by zero is lost."
    assert dict(page.sections)["Fix"].startswith("An eps that fp16 holds")


@pytest.mark.parametrize(
    ("code", "near"),
    [
        ("eps-overflow", "eps-underflow"),
        ("masked-softmax", "fully-masked-softmax"),
        ("eps_underflow", "eps-underflow"),
        ("mask", "mask-constant-overflow or fully-masked-softmax"),
    ],
)
def test_a_wrong_code_is_answered_with_those_near_to_it(code, near):
    with pytest.raises(NanDoctorError) as caught:
        find_page(code)
    assert code in caught.value.message
    assert near in caught.value.remedy


@pytest.mark.parametrize("code", ["", "xyzzy"])
def test_a_code_that_is_near_to_none_is_answered_with_the_list(code):
    with pytest.raises(NanDoctorError) as caught:
        find_page(code)
    assert caught.value.remedy == "`nandoctor explain` lists all of them."
