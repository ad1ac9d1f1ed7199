"""A real training of Lightning that dies under AMP, and the replay of its training_step."""

import pytest
import torch
from trainings import LOUD, Segmenter, loss_of, make_batch

import nandoctor
from nandoctor.dumps.reader import read_dump

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from nandoctor.capture.lightning import RecorderCallback  # noqa: E402

pytestmark = pytest.mark.slow


class Lit(lightning.LightningModule):
    def __init__(self, width: int = 4, dropout: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Segmenter(width, dropout)

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.net(batch[0]), batch)
        self.log("loss", loss)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TwoNets(lightning.LightningModule):
    """Optimizes manually: first a critic, and then the net that it looks at; `failing` tells whose loss is 0/0."""

    def __init__(self, failing: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.net, self.critic = torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(4, 1)

    def loss(self, hidden, name):
        return self.critic(hidden / hidden.norm(dim=1, keepdim=True) if name == self.hparams.failing else hidden).mean()

    def training_step(self, batch, batch_idx):
        critic_optimizer, optimizer = self.optimizers()
        hidden = self.net(batch[0].mean((1, 2)).clamp(-1, 1))
        with critic_optimizer.toggle_model():
            critic_optimizer.zero_grad()
            self.manual_backward(self.loss(hidden.detach(), "critic"))
            critic_optimizer.step()
        optimizer.zero_grad()
        self.manual_backward(self.loss(hidden, "net"))
        optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (self.critic, self.net)], []


def fit(callback, model, batches, **options):
    trainer = lightning.Trainer(
        max_epochs=1,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))
    return model


def fit_in_half(callback, **options):
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    torch.manual_seed(0)
    model, batches = Lit(width=6), [make_batch(number == 3) for number in range(6)]
    return fit(callback, model, batches, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)], **options)


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_dies_is_replayed_bit_for_bit(tmp_path):
    callback = RecorderCallback(folder=tmp_path)
    model = fit_in_half(callback)
    (path,) = callback.recorder.written
    dump = read_dump(path)
    assert (path.name, dump.scalars["scaler.scale"], dump.scalars["epoch"]) == ("nan-step000003.pth", 256.0, 0)
    assert all(torch.isfinite(tensor).all() for tensor in dump.state.values())
    assert dump.state["net.norm.num_batches_tracked"] == 3
    assert not any(hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks))

    case = nandoctor.replay(path, fixes=False)
    reproduction = case.report.reproduction
    assert (reproduction.grade, reproduction.output, reproduction.numel) == ("exact", "output.net.logit", 256)
    assert 0 < reproduction.num_bad_saved < 256
    assert (case.first_nonfinite.place.module, case.first_nonfinite.elements.samples) == ("net.middle", (2,))
    assert case.report.bad_gradients
    assert case.report.notes[0].startswith("Replayed as model.training_step(batch, batch_idx) in train mode")


class Annealed(Lit):
    def training_step(self, batch, batch_idx):
        left = 3 - self.global_step + self.trainer.current_epoch
        self.logger or self.log("left", left)
        return super().training_step(batch, batch_idx) / left


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_asks_for_its_number(tmp_path):
    callback = RecorderCallback(folder=tmp_path)
    fit(callback, Annealed(), [make_batch() for _ in range(4)])
    (path,) = callback.recorder.written
    report = nandoctor.replay(path, fixes=False).report
    assert (path.name, report.reproduction.grade) == ("nan-step000003.pth", "exact")
    assert report.reproduction.num_bad_saved == 1


@pytest.mark.filterwarnings("ignore")
def test_micro_batches_are_steps_of_their_own(tmp_path):
    callback = RecorderCallback(folder=tmp_path)
    fit_in_half(callback, accumulate_grad_batches=2)
    (path,) = callback.recorder.written
    dump = read_dump(path)
    assert dump.arrays["input.batch.0"].max() == LOUD
    assert (dump.scalars["step"], dump.scalars["micro_batch"]) == (1, 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("failing", ["critic", "net"])
def test_manual_optimization_is_replayed(tmp_path, failing):
    callback = RecorderCallback(folder=tmp_path)
    batches = [(torch.full((3, 2, 2, 8), float(number != 1)),) for number in range(3)]
    fit(callback, TwoNets(failing), batches)
    path = callback.recorder.written[0]
    if failing == "critic":
        report = nandoctor.replay(path, fixes=False).report
        assert (report.reproduction.grade, report.cause.code) == ("exact", "division-by-zero")
