"""Places and samples, as a trace knows them."""

import pytest

from nandoctor.evidence.trace import LOSS, Place


@pytest.mark.parametrize(
    ("module", "call", "label", "in_words", "with_type"),
    [
        ("norm", 0, "norm", "norm", "norm (Norm)"),
        ("norm", 1, "norm (2nd call)", "norm (2nd call)", "norm (Norm, 2nd call)"),
        ("", 0, "(Norm)", "the model (Norm)", "the model (Norm)"),
        ("", 2, "(Norm) (3rd call)", "the model (Norm, 3rd call)", "the model (Norm, 3rd call)"),
    ],
)
def test_calls_are_counted_from_one(module, call, label, in_words, with_type):
    place = Place(module=module, type="Norm", call=call)
    assert (place.label, place.in_words, place.with_type) == (label, in_words, with_type)


def test_the_loss_and_an_unknown_class_have_no_type():
    assert Place(module=LOSS, type="", call=0).in_words == "the loss"
    assert Place(module="", type="", call=0).with_type == "the model"
