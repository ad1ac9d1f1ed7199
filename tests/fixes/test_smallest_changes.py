"""Of the changes that hold, the one that asks for least: no part that is not needed."""

import pytest
import torch

from nandoctor.fixes.budget import BudgetSpent

MEL = {
    "layers": 'self.register_buffer("bank", torch.ones(3, 5))\nself.head = nn.Linear(3, 2)',
    "inputs": "power",
    "forward": "mel = torch.matmul(power, self.bank.T)\nreturn self.head(torch.log10(mel.clamp(min=1e-10)))",
}


@pytest.fixture
def mel(project):
    """A step with two ways to fail: an eps that fp16 rounds to 0, and a product past its range."""
    project.write(**MEL)
    project.save(power=torch.rand(4, 5) * torch.tensor([[1.0], [1e5], [0.0], [1.0]]))
    return project


def test_what_another_part_mends_is_left_out(mel):
    """The eps is none where the product before it is in fp32."""
    verified = [fix for fix in mel.replay().fixes if fix.verified]
    assert "torch.matmul(power.float(), self.bank.T.float())" in verified[0].patch
    assert not any("clamp(min=1e-10).clamp" in fix.patch for fix in verified)


def test_a_fix_is_kept_if_the_budget_ends_on_a_smaller_one(mel, monkeypatch):
    def end_budget(*_):
        raise BudgetSpent

    monkeypatch.setattr("nandoctor.fixes.search._Search._without_idle_parts", end_budget)
    assert [fix.verified for fix in mel.replay().fixes] == [True]
