"""Scripts as a stranger would send them (`inputs/`), each with its right answer: one file, no flag but its own code."""

from pathlib import Path

import pytest

import nandoctor
from strangers.rows import expect, faults

INPUTS = Path(__file__).parent / "inputs"


def graded(report):
    return report.reproduction.grade == "exact"


ANSWERS = {
    "vae_kl": expect("numerics <loss> exp exp-overflow", line="divergence = 0.5 *"),
    "log_of_wrong_sign": expect("numerics . log invalid-domain", samples=(0, 1, 2, 3), says=("-4.41",)),
    "ratio_at_zero": expect("numerics <loss> div division-by-zero", samples=(2,)),
    "huge_after_eps": expect("numerics . reciprocal division-by-zero", samples=(2,)),
    "inf_set_to_zero": expect("numerics . pow where-gradient-trap", phase="backward", samples=(2,)),
    "softmax_dim_1": expect("numerics . softmax fully-masked-softmax", samples=(1,)),
    "half_model": expect("silent . sum", samples=(0, 2), line="(hidden * hidden).sum("),
    "adam_in_half": expect("precision table addcdiv optimizer-eps-underflow", phase="optimizer"),
    "output_called_depth": expect(
        "numerics <loss> sqrt gradient-singularity", samples=(1,), never=("fp16",), holds=graded
    ),
    "output_called_depth_healthy": expect("healthy", never=("fp16",), holds=graded),
    "fp16_passes_earlier": expect("numerics .", line="share * torch.log(share)", samples=(0, 1, 2, 3)),
    "force_of_energy": expect("numerics . sqrt gradient-singularity", line="distance = offset.square()", samples=(1,)),
    "absorbed_infinity": expect("numerics . div division-by-zero", samples=(2,)),
    "where_selects_it": expect("numerics . sqrt gradient-singularity", phase="backward", says=("exactly 1",)),
    "normed_step": expect("numerics 0 * nonfinite-update", line="weight.grad.norm()", says=("0.weight",)),
    "weight_of_zeros": expect(
        "numerics skip.parametrizations.weight.0 div division-by-zero", line="/ sigma", says=("sigma",)
    ),
    "sample_behind_attention": expect("numerics . div division-by-zero", samples=(4,)),
    "weight_gradient_rows": expect("precision head linear gradient-overflow", samples=(2,)),
    "compared_in_an_assert": expect("healthy"),
    "running_center": expect("precision . mul elementwise-overflow", line="energy = hidden * hidden"),
    "scale_of_twelve": expect("precision . matmul", says=("log_scale", "162,755")),
    "plural_names": expect("numerics . log log-of-zero"),
}
"""What is right, from the mechanism and not from what is printed."""

OFFERED = {
    "half_model": ("Compute line 14 of half_model.py in fp32, and cast the result back", True),
    "scale_of_twelve": ("Bound log_scale to at most 4.60517 before exp in line 15 of scale_of_twelve.py", False),
    "ratio_at_zero": (
        "Give div the value 1 and no gradient where its divisor is 0 in line 23 of ratio_at_zero.py",
        True,
    ),
    "inf_set_to_zero": (
        "Give pow the value 0 and no gradient where its argument is not above 0 in line 14 of inf_set_to_zero.py",
        True,
    ),
    "running_center": ("Compute mul in line 16 of running_center.py in fp32", True),
    "softmax_dim_1": ("Unmask the fully masked rows, and set their result to 0", True),
    "vae_kl": ("Clamp the argument of exp to at most 20 in line 24 of vae_kl.py", False),
}
"""Changes that are offered for some of them, verified or as a workaround."""


def examine(name, tmp_path, ready_python, **options):
    """Run a script in a folder of its own, and return the report of the file that it leaves."""
    script = INPUTS / f"{name.removesuffix('_healthy')}.py"
    ready_python.run(script, cwd=tmp_path)
    (dump,) = (path for path in tmp_path.rglob("*.pth") if script.stem != "output_called_depth" or path.stem == name)
    loss = f"{script}:loss" if "def loss(" in script.read_text(encoding="utf-8") else None
    return nandoctor.replay(dump, model=f"{script}:build", loss=loss, **options).report


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ANSWERS))
def test_a_strangers_script_gets_its_answer(name, tmp_path, ready_python):
    assert faults(ANSWERS[name], examine(name, tmp_path, ready_python, fixes=False)) == []
    assert {path.stem for path in INPUTS.glob("*.py")} == {name.removesuffix("_healthy") for name in ANSWERS}


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFERED)
def test_a_change_keeps_the_meaning_or_is_a_workaround(name, tmp_path, ready_python):
    title, is_verified = OFFERED[name]
    (fix,) = (fix for fix in examine(name, tmp_path, ready_python).fixes if fix.title == title)
    assert (fix.verified, fix.workaround is None) == (is_verified, is_verified)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log_of_wrong_sign", "where_selects_it"])
def test_no_fix_is_an_answer(name, tmp_path, ready_python):
    assert not any(fix.verified for fix in examine(name, tmp_path, ready_python).fixes)
