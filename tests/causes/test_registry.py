"""Every cause is wired in, keeps its published code, and has its page: a title and the fixed sections."""

import pkgutil
import re
from types import SimpleNamespace
from typing import get_args

import pytest
from one_test import for_each

import nandoctor.causes
from nandoctor.causes import where_gradient_trap
from nandoctor.causes.base import CausePhase
from nandoctor.causes.registry import CAUSES, SECTIONS, code_of, find_page, list_pages
from nandoctor.errors import NanDoctorError

PUBLISHED = {
    "matmul-overflow", "elementwise-overflow", "reduction-overflow", "exp-overflow", "input-cast-overflow",
    "mask-constant-overflow", "eps-underflow", "log-of-zero", "fully-masked-softmax", "division-by-zero",
    "empty-reduction", "invalid-domain", "indeterminate-form", "silent-overflow", "gradient-singularity",
    "where-gradient-trap", "gradient-overflow", "loss-scale-overflow", "poisoned-weights", "poisoned-buffers",
    "poisoned-input", "poisoned-target", "optimizer-eps-underflow", "nonfinite-update",
}  # fmt: skip
MACHINERY = {"base", "candidates", "registry", "sentences"}

every_cause, every_page = for_each(CAUSES), for_each(list_pages())


def test_published_codes_are_kept():
    codes = [code_of(cause) for cause in CAUSES]
    assert len(codes) == len(set(codes))
    assert set(codes) >= PUBLISHED


def test_every_module_is_wired_in():
    files = {module.name for module in pkgutil.iter_modules(nandoctor.causes.__path__)} - MACHINERY
    assert {cause.__name__.rpartition(".")[2] for cause in CAUSES} == files


@every_cause
def test_a_cause_has_a_page_a_title_and_phases(cause):
    assert cause.__doc__.startswith(f"{code_of(cause)}: ")
    assert cause.TITLE[0].isupper()
    assert not cause.TITLE.endswith(".")
    assert len(cause.TITLE) <= 70
    assert cause.PHASES
    assert set(cause.PHASES) <= set(get_args(CausePhase))


@every_page
def test_page_has_the_fixed_sections(page):
    assert tuple(heading for heading, _ in page.sections) == SECTIONS
    assert all(paragraph.endswith(".") and paragraph != "None." for _, paragraph in page.sections)
    assert page.summary.endswith(".")


@every_page
def test_code_in_a_fix_is_whole(page):
    paragraphs = " ".join(paragraph for _, paragraph in page.sections)
    assert paragraphs.count("`") % 2 == 0
    snippets = re.findall(r"`([^`]*)`", paragraphs)
    assert all(snippet.count("(") == snippet.count(")") for snippet in snippets)


@pytest.mark.parametrize(
    ("code", "near"),
    [
        ("eps-overflow", "eps-underflow"),
        ("masked-softmax", "fully-masked-softmax"),
        ("eps_underflow", "eps-underflow"),
        ("mask", "mask-constant-overflow or fully-masked-softmax"),
        ("xyzzy", "`nandoctor explain` lists all of them."),
        ("", "`nandoctor explain` lists all of them."),
    ],
)
def test_wrong_code_is_answered_with_near_ones(code, near):
    with pytest.raises(NanDoctorError) as caught:
        find_page(code)
    assert code in caught.value.message
    assert near in caught.value.remedy


def test_a_code_is_found_in_any_case():
    assert find_page("EPS-Underflow").code == "eps-underflow"


def test_only_a_nan_is_a_trap_of_where():
    """Of zeros a derivative makes NaN, but for some ops nobody can tell where the zeros were."""
    finding = SimpleNamespace(forward="a log", discarded_by="a where", analysis=SimpleNamespace(kinds=("inf",)))
    assert where_gradient_trap.diagnose(finding) is None
