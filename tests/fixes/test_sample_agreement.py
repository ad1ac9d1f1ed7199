"""How far two runs are from each other, where one of the numbers in them stands for an infinity."""

import pytest
import torch

from nandoctor.fixes.agreement import Result, compare_runs, gradient_error, gradient_norm

LIMIT = torch.finfo(torch.float32).min


def result(*values, dtype=torch.float32):
    return Result(values={"output": torch.tensor([values], dtype=dtype)}, gradients={}, ran=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_error_beside_a_mask_is_an_error(dtype):
    made = compare_runs(result(2.0, torch.finfo(dtype).min, dtype=dtype), result(1.0, LIMIT))
    assert not made.agrees()
    assert made.max_rel_err == pytest.approx(1.0)


@pytest.mark.parametrize("lost", [1.0, 65504.0, -1e4])
def test_a_mask_that_is_lost_is_an_error(lost):
    assert not compare_runs(result(1.0, lost, dtype=torch.float16), result(1.0, LIMIT)).agrees()


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
