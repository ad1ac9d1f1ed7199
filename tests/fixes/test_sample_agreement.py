"""How far two runs are from each other."""

import pytest
import torch

from nandoctor.fixes.agreement import Result, compare_runs, gradient_error, gradient_norm


def test_gradients_of_complex_weights_are_compared():
    made, reference = (
        Result(values={}, gradients={"filter": torch.tensor([3 + imaginary * 1j, 0])}, ran=True) for imaginary in (5, 4)
    )
    assert gradient_norm(reference) == 5
    assert gradient_error(made, reference) == 0.2
    assert gradient_error(reference, reference) == 0


def test_an_accepted_error_of_a_small_sample():
    made, reference = (
        Result(values={"output": torch.tensor(values)}, gradients={}, ran=True)
        for values in ([[1.0], [0.006]], [[1.0], [0.004]])
    )
    found = compare_runs(made, reference)
    assert found.max_rel_err == pytest.approx(0.5)
    assert found.accepted_rel_err(0.01) == pytest.approx(0.002)
    assert found.accepted_rel_err(0.6) == pytest.approx(0.5)
