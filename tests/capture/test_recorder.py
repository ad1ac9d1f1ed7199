"""The recorder in a plain loop: what it saves is the failing step, and its replay is that step bit for bit."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from trainings import loss_of, make_batch, make_model, train

import nandoctor
from nandoctor import NanDoctorError, NonFiniteTrainingError, Recorder
from nandoctor.dumps.reader import read_dump
from nandoctor.process_wide import switched


def make_scaler(scale=1024.0):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def record(tmp_path, model, **options):
    return Recorder(model, folder=tmp_path, loss=loss_of, **options)


def watch_dropout(model):
    given = []
    model.dropout.register_forward_hook(lambda _, __, output: given.append(output.detach().clone()))
    return given


def test_the_replay_is_bit_for_bit_that_step(tmp_path):
    model, scaler = make_model(), make_scaler()
    given = watch_dropout(model)
    recorder = record(tmp_path, model, scaler=scaler, arguments={"width": 4})
    train(model, recorder, loud={3}, scaler=scaler)
    replayed = make_model()
    again = watch_dropout(replayed)

    case = nandoctor.replay(recorder.written[0], fixes=False)
    nandoctor.replay(recorder.written[0], model=lambda: replayed, fixes=False)

    reproduction = case.report.reproduction
    assert (reproduction.grade, reproduction.numel) == ("exact", 256)
    assert 0 < reproduction.num_bad_saved < 256
    assert reproduction.max_rel_err == 0.0
    assert torch.equal(again[0], given[3])
    assert (case.verdict, case.first_nonfinite.place.module, case.first_nonfinite.elements.samples) == (
        "precision",
        "middle",
        (2,),
    )
    assert case.report.bad_gradients  # the loss function came with the file


class Rated(nn.Linear):
    """Returns a rate, which is NaN for a count of 0, beside its scores."""

    def forward(self, x, count):
        scores = super().forward(x)
        return {"rate": (scores.sum() * 0) / count, "scores": scores}


def test_a_nan_that_agrees_does_not_hide_other_outputs(tmp_path):
    model = Rated(3, 2)
    model.register_forward_hook(lambda _, __, output: {**output, "scores": output["scores"] + 9})
    with Recorder(model, folder=tmp_path, arguments={"in_features": 3, "out_features": 2}) as recorder:
        recorder.watch(model(torch.ones(4, 3), torch.zeros(()))["rate"])
    as_recorded = nandoctor.replay(recorder.written[0], model=lambda: model, fixes=False).report.reproduction
    without_hook = nandoctor.replay(recorder.written[0], fixes=False).report.reproduction
    assert (as_recorded.grade, without_hook.grade) == ("exact", "same-mask")
    assert (without_hook.output, without_hook.num_bad_saved) == ("output.rate", 1)
    assert without_hook.max_rel_err > 0.5


@pytest.mark.parametrize("num_calls", [1, 2])
def test_an_output_that_the_loop_wrote_to_is_not_compared(tmp_path, num_calls):
    model = Rated(3, 2)
    recorder = Recorder(model, folder=tmp_path, arguments={"in_features": 3, "out_features": 2})
    with recorder, recorder.step():
        made = [model(torch.ones(4, 3), torch.zeros(())) for _ in range(num_calls)]
        made[-1]["scores"].detach().add_(1)
        recorder.watch(made[-1]["rate"])
    name = "output.scores" if num_calls == 1 else "output.1.scores"
    assert any(note.startswith(f"{name}: overwritten") for note in read_dump(recorder.written[0]).missing)
    assert nandoctor.replay(recorder.written[0], fixes=False).report.reproduction.grade == "exact"


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.rand(4, 3)) / torch.linspace(0, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_that_of_the_forward(tmp_path, dtype):
    model = Noisy(3, 2).to(dtype)
    with Recorder(model, folder=tmp_path, arguments={"in_features": 3, "out_features": 2}) as recorder:
        with switched({"default_dtype": dtype}):  # as Lightning's "bf16-true" does
            output = model(torch.ones(4, 3))
        recorder.watch(output.sum())
    recorded = read_dump(recorder.written[0]).recorded
    assert (recorded.built_dtype, recorded.default_dtype) == ("float32", str(dtype).removeprefix("torch."))
    reproduction = nandoctor.replay(recorder.written[0], fixes=False).report.reproduction
    assert (reproduction.grade, reproduction.num_bad_saved) == ("exact", 4)
    assert torch.get_default_dtype() is torch.float32


def test_train_flags_and_arguments_are_those_of_the_call(tmp_path):
    model = make_model()
    model.norm.eval()
    recorder = Recorder(model, folder=tmp_path)
    batch = make_batch(loud=True)
    with nandoctor.cuda_autocast():
        output = model(batch[0], gain=2.0)
    recorder.watch(loss_of(output, batch), {"mask": batch[1], "names": ["a", "b"]})
    recorder.close()
    recorded = read_dump(recorder.written[0]).recorded
    assert {name for name, flag in recorded.training.items() if not flag} == {"norm"}
    assert (recorded.calls[0].args[0].name, recorded.calls[0].kwargs) == ("input.image", {"gain": 2.0})
    assert recorded.batch["names"] == ["a", "b"]
    assert nandoctor.replay(recorder.written[0], fixes=False).report.reproduction.grade == "exact"


@pytest.mark.slow
def test_a_model_that_is_compiled_in_place_is_recorded(tmp_path):
    model = make_model()
    model.compile(backend="aot_eager")
    graph = model._compiled_call_impl
    with Recorder(model, folder=tmp_path) as recorder:
        for number in range(3):
            batch = make_batch(number == 2)
            loss = loss_of(model(batch[0]), batch) * (float("nan") if number == 2 else 1)
            recorder.watch(loss, batch)
    dump = read_dump(recorder.written[0])
    assert dump.state["norm.num_batches_tracked"] == 2
    assert "norm.running_mean" in dump.state
    assert torch.equal(dump.arrays["input.image"], batch[0])
    assert model._compiled_call_impl is graph


def test_two_calls_of_one_step_are_replayed_in_their_order(tmp_path):
    model = make_model()
    recorder = Recorder(model, folder=tmp_path)
    with recorder.step(), nandoctor.cuda_autocast():  # the loop draws the second image after the first call
        first, second = (model(make_batch(loud)[0]) for loud in (False, True))
        recorder.watch(first["logit"].sum() + second["logit"].sum())
    recorder.close()
    report = nandoctor.replay(recorder.written[0], fixes=False).report
    assert (report.first_nonfinite.place.module, report.first_nonfinite.place.call) == ("middle", 1)
    assert report.reproduction.grade == "exact"


def test_validation_is_no_step(tmp_path, caplog):
    model = make_model()
    with Recorder(model, folder=tmp_path) as recorder:
        with torch.no_grad():
            model(make_batch(True)[0])
        model.eval()(make_batch(True)[0])
        recorder.watch(torch.tensor(torch.nan))
    assert recorder.written == ()
    assert "recorder.step" in caplog.text


def test_it_stops_and_says_where_the_file_is_and_what_to_type(tmp_path, caplog):
    model, scaler = make_model(), make_scaler(2.0**20)
    recorder = record(tmp_path, model, scaler=scaler, threshold=0.02)
    with caplog.at_level(logging.WARNING), pytest.raises(NonFiniteTrainingError) as caught:
        train(model, recorder, loud={2, 3, 4, 5}, scaler=scaler)
    first, last = recorder.written
    assert [path.name for path in recorder.written] == ["nan-step000002.pth", "nan-step000004.pth"]
    why = "the loss is non-finite; 3 of the last 5 steps failed"
    assert caught.value.message == f"The recorder stopped the training at step 4: {why}."
    assert caught.value.remedy == f"Saved to {last}; next: nandoctor replay {last}"
    assert caplog.messages == [f"Step 2: the loss is non-finite. Saved to {first}; next: nandoctor replay {first}"]


def test_settings_that_mean_nothing_are_refused(tmp_path):
    for wrong in ({"threshold": 1.5}, {"window": 0}, {"keep": 0}, {"arguments": [3]}):
        with pytest.raises(NanDoctorError, match=r"does not accept|arguments by name"):
            Recorder(nn.Linear(2, 2), folder=tmp_path, **wrong)


def test_an_overwritten_input_is_not_recorded_as_the_models(tmp_path):
    model = make_model()
    with Recorder(model, folder=tmp_path) as recorder:
        image, mask = make_batch(loud=True)
        with nandoctor.cuda_autocast():
            loss = loss_of(model(image), (image, mask))
        image.zero_()
        recorder.watch(loss)
    assert any("input: overwritten" in note for note in read_dump(recorder.written[0]).missing)


def test_old_files_of_the_run_make_way_and_others_stay(tmp_path):
    (tmp_path / "nan-step000001.pth").write_bytes(b"another run's")
    model, scaler = make_model(), make_scaler(2.0**40)
    recorder = record(tmp_path, model, scaler=scaler, keep=2, window=1, threshold=1.0)
    train(model, recorder, loud={1, 3, 5}, scaler=scaler)
    assert [path.name for path in recorder.written] == ["nan-step000003.pth", "nan-step000005.pth"]
    assert (tmp_path / "nan-step000001.pth").read_bytes() == b"another run's"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler meets functions of torch that it cannot trace
def test_of_a_compiled_update_no_more_is_compiled(tmp_path):
    def count_graphs(*, recorded):
        torch.compiler.reset()
        model, graphs = nn.Linear(2, 1), []
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
        update = torch.compile(optimizer.step, backend=lambda graph, _: graphs.append(graph) or graph.forward)
        recorder = Recorder(model, folder=tmp_path) if recorded else None
        for value in (1.0, 2.0, torch.nan):
            loss = model(torch.full((3, 2), value)).square().mean()
            if recorder is not None:
                recorder.watch(loss)
            loss.backward()
            update()
        if recorder is not None:
            recorder.close()
        return len(graphs)

    assert count_graphs(recorded=True) == count_graphs(recorded=False)
    assert [path.name for path in tmp_path.iterdir()] == ["nan-step000002.pth"]


def test_nothing_to_save_outside_of_a_step(tmp_path, caplog):
    with Recorder(nn.Linear(2, 2), folder=tmp_path) as recorder:
        assert recorder.save() is None
    assert "no step to save" in caplog.text


def test_the_loops_own_rule_for_spikes(tmp_path):
    model, told = nn.Linear(1, 1), []
    with Recorder(model, folder=tmp_path, on_save=lambda path, event: told.append((path, event))) as recorder:
        for step in range(60):
            loss = model(torch.ones(1, 1)).sum() * 0 + (50.0 if step == 40 else 1.0 + step % 3)
            recorder.watch(loss)
            if loss > 10:
                recorder.save("spike")
    [(path, event)] = told
    assert path.name == "step-step000040.pth"
    assert (event["reason"], event["step"], event["loss"]) == ("spike", 40, 50.0)


def test_a_failing_on_save_does_not_end_the_training(tmp_path, caplog):
    def upload(path, event):
        raise ConnectionError("no route")

    model = nn.Linear(1, 1)
    with Recorder(model, folder=tmp_path, on_save=upload) as recorder:
        recorder.watch(model(torch.full((1, 1), float("nan"))).sum())
    assert len(recorder.written) == 1
    assert "on_save failed" in caplog.text


def test_watch_in_an_evaluation_blames_no_step(tmp_path, caplog):
    model = make_model()
    with Recorder(model, folder=tmp_path) as recorder:
        batch = make_batch()
        recorder.watch(loss_of(model(batch[0]), batch), batch)
        model.eval()
        with torch.no_grad(), caplog.at_level(logging.WARNING):
            for _ in range(2):
                recorder.watch(loss_of(model(batch[0] * float("nan")), batch))
    assert recorder.written == ()
    assert [message for message in caplog.messages if "eval mode" in message] == [
        "nandoctor.Recorder: watch was called after a forward in eval mode, which is not a training step, so "
        "nothing was checked. To record an evaluation, put each of its steps into `with recorder.step(batch):`."
    ]


def test_an_explicit_evaluation_is_recorded_and_replayed(tmp_path):
    model = make_model().eval()
    with Recorder(model, folder=tmp_path) as recorder, torch.no_grad():
        for loud in (False, True):
            batch = make_batch(loud)
            with recorder.step(batch), nandoctor.cuda_autocast():
                recorder.watch(loss_of(model(batch[0]), batch))
    (path,) = recorder.written
    report = nandoctor.replay(path, fixes=False).report
    assert (path.name, report.reproduction.grade) == ("nan-step000001.pth", "exact")
    assert report.first_nonfinite.place.module == "middle"


def test_an_evaluation_within_a_step_is_no_call_of_it(tmp_path):
    model = make_model()
    with Recorder(model, folder=tmp_path) as recorder:
        batch = make_batch(loud=True)
        with recorder.step(batch):
            with nandoctor.cuda_autocast():
                loss = loss_of(model(batch[0]), batch)
            with torch.no_grad():
                model(batch[0])
            recorder.watch(loss)
    assert len(read_dump(recorder.written[0]).recorded.calls) == 1


@pytest.mark.parametrize(("is_marked", "kept"), [(True, 25), (False, 9)])
def test_a_step_of_many_calls(tmp_path, is_marked, kept):
    """A text that is read letter by letter, an episode of a policy: the state of the first call is NaN in all later."""
    model = nn.RNNCell(3, 2)
    with Recorder(model, folder=tmp_path) as recorder, recorder.step() if is_marked else nullcontext():
        state = torch.full((1, 2), float("nan"))
        for _ in range(25):
            state = model(torch.ones(1, 3), state)
        recorder.watch(state.sum())
    dump = read_dump(recorder.written[0])
    assert len(dump.recorded.calls) == kept
