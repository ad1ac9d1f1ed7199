"""A real training of the Trainer of transformers that dies under AMP, and its replay."""

import json
import shlex

import pytest
import torch
from commands import run

import nandoctor
from nandoctor.dumps.reader import read_dump

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from nandoctor.capture.transformers import RecorderCallback  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_accelerator_before():
    """Forget the process-wide Accelerator that a Trainer of another test has made, whatever its precision."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


class MixedPrecisionTrainer(transformers.Trainer):
    """In fp16 as on a GPU; Trainer's own fp16 refuses a CPU."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        with nandoctor.cuda_autocast():
            return super().compute_loss(model, inputs, *args, **kwargs)


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}


def make_model():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL)
    model = transformers.BertForTokenClassification(config)
    with torch.no_grad():
        # One token of the vocabulary, at whose position the last layer overflows.
        model.bert.embeddings.word_embeddings.weight[49] = 0
        model.bert.embeddings.word_embeddings.weight[49, 0] = 100
        model.classifier.weight[0] = 0
        model.classifier.weight[0, 0] = 15_000
    return model


def loss_of(output, batch):
    """The log of a probability that may be 0."""
    right = output["logits"].softmax(-1)[..., 1]
    return -torch.log(right.float()).mean()


class OwnLossTrainer(transformers.Trainer):
    """As trainers for preferences or distillation do: the model is called without labels."""

    refuses = False

    def compute_loss(self, model, inputs, *args, return_outputs=False, **kwargs):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = loss_of(outputs, inputs)
        assert not self.refuses or loss.isfinite()
        return (loss, outputs) if return_outputs else loss


def fit(folder, callback, trainer_class, *, watch=False, **options):
    rows = [
        {
            "input_ids": torch.randint(49, (8,)),
            "attention_mask": torch.ones(8, dtype=torch.long),
            "labels": torch.ones(8).long(),
        }
        for _ in range(16)
    ]
    rows[9]["input_ids"][5] = 49
    arguments = transformers.TrainingArguments(
        folder / "trainer",
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=1e-6,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        data_seed=0,
        **options,
    )
    trainer = trainer_class(make_model(), arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[callback])
    if watch:
        callback.watch(trainer)
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_a_training_that_dies_is_replayed_bit_for_bit(tmp_path):
    callback = RecorderCallback(folder=tmp_path / "dumps")
    fit(tmp_path, callback, MixedPrecisionTrainer)
    (path,) = callback.recorder.written
    dump = read_dump(path)
    assert (dump.arrays["input.input_ids"] == 49).sum() == 1
    assert dump.recorded.loss_field == "loss"
    assert dump.recorded.model.configuration.spec == "transformers.models.bert.configuration_bert:BertConfig"

    case = nandoctor.replay(path, fixes=False)
    reproduction = case.report.reproduction
    assert (reproduction.grade, reproduction.output) == ("exact", "output.logits")
    assert 0 < reproduction.num_bad_saved < reproduction.numel
    assert (case.verdict, case.first_nonfinite.place.module) == ("precision", "classifier")


@pytest.mark.filterwarnings("ignore")
def test_a_loss_of_the_trainers_own_is_watched(tmp_path):
    callback = RecorderCallback(folder=tmp_path / "dumps", loss=loss_of)
    trainer = fit(tmp_path, callback, OwnLossTrainer, watch=True, eval_strategy="steps", eval_steps=1)
    trainer.evaluate()
    (path,) = callback.recorder.written
    dump = read_dump(path)
    assert (dump.scalars["reason"], dump.scalars["loss"]) == ("loss", float("inf"))
    assert dump.arrays["output.logits"].isfinite().all()
    assert (dump.arrays["input.input_ids"] == 49).sum() == 1

    case = nandoctor.replay(path, loss=loss_of, fixes=False)
    assert case.report.reproduction.grade == "exact"
    assert (case.report.origin.phase, case.report.origin.op) == ("loss", "log")
    assert case.report.cause.code == "log-of-zero"


class RefusingTrainer(OwnLossTrainer):
    refuses = True


@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_the_trainer_refuses_is_saved(tmp_path):
    callback = RecorderCallback(folder=tmp_path / "dumps", loss=loss_of)
    with pytest.raises(AssertionError) as caught:
        fit(tmp_path, callback, RefusingTrainer, watch=True)
    callback.recorder.__exit__(AssertionError, caught.value, None)
    (path,) = callback.recorder.written
    assert "batch.labels" in read_dump(path).arrays
    assert nandoctor.replay(path, loss=loss_of, fixes=False).report.cause.code == "log-of-zero"


@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_nobody_watches_is_told(tmp_path, caplog):
    fit(tmp_path, RecorderCallback(folder=tmp_path / "dumps"), OwnLossTrainer)
    assert caplog.text.count("recorder.watch(trainer)") == 1


@pytest.mark.filterwarnings("ignore")
def test_the_recipe_for_accelerate(tmp_path):
    import accelerate
    from trainings import loss_of, make_batch
    from trainings import make_model as make_segmenter

    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = make_segmenter()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with nandoctor.Recorder(model, folder=tmp_path, scaler=accelerator.scaler, loss=loss_of) as recorder:
        for number in range(4):
            batch = make_batch()
            with recorder.step(batch):
                loss = loss_of(model(batch[0]), batch) * (float("inf") if number == 2 else 1.0)
                recorder.watch(loss)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    (path,) = recorder.written
    dump = read_dump(path)
    assert dump.recorded.autocast.dtype == "bfloat16"
    assert all(torch.isfinite(tensor).all() for tensor in dump.state.values())
    assert nandoctor.replay(path, fixes=False).report.reproduction.grade == "exact"


@pytest.mark.filterwarnings("ignore")
def test_a_strangers_dump_is_approved_with_its_config(here):
    """The command names the model's class, which knows the class of its configuration; its values are in the dump."""
    model = make_model()
    with nandoctor.Recorder(model, folder=here) as recorder, nandoctor.cuda_autocast():
        recorder.watch(model(input_ids=torch.full((2, 8), 49)).logits)
    torch.save(torch.load(recorder.written[0]), "stranger.pth")  # saved again, so that no signature is left
    refused = run("replay", "stranger.pth", "--no-fixes", "--json")
    assert refused.exit_code == 1
    command = shlex.split(refused.stderr.partition("To run it")[2])
    assert command[:2] == ["nandoctor", "replay"]
    assert command[4:] == ["transformers.models.bert.modeling_bert:BertForTokenClassification"]
    replayed = run(*command[1:], "--no-fixes", "--json")
    assert replayed.exit_code == 0, replayed.stderr
    assert json.loads(replayed.stdout)["reproduction"]["grade"] == "exact"
