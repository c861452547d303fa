"""edgeless.capture_step: a replay gives what the step gives, and whatever differs makes another recording.

On the CPU, with tapes in the place of CUDA graphs; test_capture_step_cuda.py has the same on a GPU, and
test_capture_step_refusals.py what is not captured.
"""

import copy
import gc
import time

import pytest
import torch
from step_cases import BATCHES, Net, Run, follow, plain_step, same, taped_step, two_runs
from tape import Tape
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import edgeless
from edgeless import _extension


def test_a_step_is_replayed_after_the_warm_up():
    eager, captured = two_runs(Net)
    for number, batch in enumerate(BATCHES):
        follow(eager, captured, [batch])
        assert captured.step.num_replays == max(0, number - 1) - (number > 1) * 0 if number < 3 else True
    assert captured.step.num_captured == 1 and captured.step.num_replays >= len(BATCHES) - 3
    assert repr(captured.step) == f"1 captured, {captured.step.num_replays} replayed"


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, amsgrad=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(optimizer):
    eager, captured = two_runs(Net, optimizer=optimizer)
    follow(eager, captured, BATCHES)
    assert captured.step.num_replays >= 8, captured.step.report()


@pytest.mark.parametrize("calls", [1, 3])
def test_code_that_is_loaded_while_a_step_is_watched_is_no_fault_of_the_step(calls, monkeypatch):
    monkeypatch.setattr(_extension, "provided", 0)

    def loading(model, optimizer):
        inner, count = plain_step(model, optimizer), iter(range(100))

        def step(x, y):
            loss = inner(x, y)
            if (call := next(count)) and call <= calls:  # from the watched call on
                _extension.provided += 1
                time.perf_counter()
            return loss

        return step

    eager, captured = two_runs(Net, loading)
    follow(eager, captured, BATCHES)
    assert captured.step.num_captured == 1, captured.step.report()
    assert captured.step.num_replays >= len(BATCHES) - calls - 3


def test_arguments_that_never_change_are_read_in_place():
    eager, captured = two_runs(Net)
    follow(eager, captured, [BATCHES[0]] * 5)
    (recording,) = captured.step._kept[next(iter(captured.step._kept))]
    assert recording._inputs == [] and captured.step.num_replays >= 2
    with torch.no_grad():
        BATCHES[0][0].add_(1)
    follow(eager, captured, [BATCHES[0]] * 2)
    with torch.no_grad():
        BATCHES[0][0].sub_(1)
    follow(eager, captured, BATCHES[1:])  # now they differ, which is another recording
    assert captured.step.num_captured == 2 and captured.step.num_replays >= 10


def test_shapes_have_recordings_of_their_own():
    eager, captured = two_runs(Net)
    batches = [(x[:rows], y[:rows]) for x, y in BATCHES for rows in (3, 6, 5)]
    follow(eager, captured, batches)
    assert captured.step.num_captured == 3 and captured.step.num_replays >= 24, captured.step.report()


def test_the_most_that_are_kept():
    eager = Run(Net)
    captured = Run(Net, wrap=lambda *given: taped_step(*given, most=2))
    batches = [(x[:rows], y[:rows]) for x, y in BATCHES for rows in (3, 6, 5)]
    follow(eager, captured, batches)
    assert captured.step.num_captured == 2
    assert "there are 2 captures, the most that are kept" in captured.step.report()


def accumulated(model, optimizer):
    def step(x, y, last=True):
        loss = (model(x) - y).square().mean()
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def test_gradients_that_several_calls_accumulate():
    eager, captured = two_runs(Net, accumulated)
    batches = [(*BATCHES[number % 12], number % 3 == 2) for number in range(30)]
    follow(eager, captured, batches)
    assert captured.step.num_replays >= 12, captured.step.report()
    assert captured.step.num_captured <= 6


def never_zeroed(model, optimizer):
    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_gradients_that_are_zeroed_outside():
    def between(run, number):
        run.optimizer.zero_grad(set_to_none=number % 2 == 0)

    eager, captured = two_runs(Net, never_zeroed)
    follow(eager, captured, BATCHES + BATCHES, between)
    assert captured.step.num_replays >= 6, captured.step.report()


def test_gradients_that_are_set_to_zero_within():
    def step(model, optimizer):
        rest = never_zeroed(model, optimizer)

        def inner(x, y):
            optimizer.zero_grad(set_to_none=False)
            return rest(x, y)

        return inner

    eager, captured = two_runs(Net, step)
    follow(eager, captured, BATCHES)
    assert captured.step.num_replays >= 8, captured.step.report()


def test_clipped_gradients_and_several_losses():
    def step(model, optimizer):
        def inner(x, y):
            optimizer.zero_grad()
            out = model(x)
            losses = (out - y).square().mean(), out.abs().mean()
            (losses[0] + 0.1 * losses[1]).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return {"losses": list(losses), "norm": norm, "name": "a"}

        return inner

    def flat(step):
        def inner(*batch):
            found = step(*batch)
            assert found["name"] == "a"
            return [*found["losses"], found["norm"]]

        return inner

    eager, captured = two_runs(Net, step)
    handle = captured.step
    eager.step, captured.step = flat(eager.step), flat(captured.step)
    follow(eager, captured, BATCHES)
    assert handle.num_replays >= 8, handle.report()


def test_dropout_draws_as_it_does_without():
    eager, captured = two_runs(lambda: Net(dropout=0.5))
    follow(eager, captured, BATCHES)
    assert captured.step.num_replays >= 8, captured.step.report()


def test_a_scheduler_with_rates_in_tensors():
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=torch.tensor(0.1), fused=True)

    def between(run, number):
        if not hasattr(run, "scheduler"):
            run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
        elif number:
            run.scheduler.step()

    eager, captured = two_runs(Net, optimizer=adam)
    follow(eager, captured, BATCHES, between)
    assert captured.step.num_captured == 1 and captured.step.num_replays >= 8, captured.step.report()


def test_rates_that_are_numbers_are_never_stale():
    def between(run, number):
        run.optimizer.param_groups[0]["lr"] = 0.1 if number < 5 else 0.05

    eager, captured = two_runs(Net)
    follow(eager, captured, BATCHES, between)
    assert captured.step.num_captured == 2 and "SGD.lr changes" in captured.step.report()


def test_moving_averages_of_parameters():
    def step(model, optimizer):
        average = copy.deepcopy(model).requires_grad_(False)
        model.averages = [average]  # not a module within

        def inner(x, y):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mine, now in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(now, 0.1)
            return loss

        return inner

    eager, captured = two_runs(Net, step)
    follow(eager, captured, BATCHES)
    assert captured.step.num_replays >= 8, captured.step.report()
    assert same(*[list(run.model.averages[0].parameters()) for run in (eager, captured)])


def test_modes_that_the_step_sets():
    def step(model, optimizer):
        inner = plain_step(model, optimizer)

        def outer(x, y):
            model.train()
            return inner(x, y)

        return outer

    def between(run, number):
        if number % 3 == 0:
            run.model.eval()

    eager, captured = two_runs(lambda: Net(dropout=0.3), step)
    follow(eager, captured, BATCHES + BATCHES, between)
    assert captured.model.training and captured.step.num_replays >= 12, captured.step.report()


def set_data(tensor, data):
    tensor.data = data


def load_optimizer(run):
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


CHANGES = {
    "a mode": lambda run: run.model.eval(),
    "an attribute": lambda run: setattr(run.model, "scale", 3.0),
    "a module": lambda run: setattr(run.model, "norm", nn.Identity()),
    "a buffer": lambda run: setattr(run.model.norm, "running_mean", torch.ones(8)),
    "a parameter's data": lambda run: set_data(run.model.first.bias, torch.ones(8)),
    "a frozen parameter": lambda run: run.model.first.bias.requires_grad_(False),
    "a loaded model": lambda run: run.model.load_state_dict(copy.deepcopy(run.model.state_dict())),
    "a loaded optimizer": load_optimizer,
    "a hyperparameter": lambda run: run.optimizer.param_groups[0].update(weight_decay=0.1),
    "a gradient": lambda run: setattr(run.model.first.bias, "grad", torch.ones(8)),
    "a value in place": lambda run: run.model.first.bias.data.fill_(2.0),
}


@pytest.mark.parametrize("step", [plain_step, accumulated])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_is_noticed(change, step):
    def between(run, number):
        if number == 6:
            change(run)

    eager, captured = two_runs(Net, step)
    follow(eager, captured, BATCHES, between)
    assert captured.step.num_replays >= 4, captured.step.report()


FACTOR = [1.0]
NUMBER = 1.0


def test_closures_globals_and_objects_that_change(monkeypatch):
    class Options:
        weight = 1.0

        def __init__(self):
            self.shift = 0.5

    def step(model, optimizer):
        options, words, table = Options(), ["a"], {"factor": 0.5}
        model.given = [options, words, table]

        def inner(x, y):
            optimizer.zero_grad()
            loss = (model(x) * FACTOR[0] * NUMBER - y + options.shift).square().mean() * len(words) * table["factor"]
            loss.backward()
            optimizer.step()
            return loss

        return inner

    def between(run, number):
        options, words, table = run.model.given
        if number == 5:
            options.shift = 0.25
        elif number == 10:
            words.append("b")
        elif number == 15:
            table["factor"] = 0.25
        elif number == 20:
            FACTOR[0] = 0.5
        elif number == 25:
            monkeypatch.setitem(globals(), "NUMBER", 0.5)

    eager, captured = two_runs(Net, step)
    follow(eager, captured, [*BATCHES, *BATCHES, *BATCHES[:7]], between)
    FACTOR[0] = 1.0
    assert captured.step.num_captured >= 5 and captured.step.num_replays >= 10, captured.step.report()


def test_tensors_in_closures():
    weight, ends = torch.ones(2), torch.tensor([0, 1])

    def step(model, optimizer):
        def inner(x, y):
            optimizer.zero_grad()
            loss = ((model(x) - y) * weight[ends]).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return inner

    def between(run, number):
        if number == 5:
            weight.fill_(2.0)
        if number == 8:
            ends.copy_(torch.tensor([1, 1]))

    eager, captured = two_runs(Net, step)
    follow(eager, captured, BATCHES, between)
    assert captured.step.num_replays >= 5, captured.step.report()


def test_containers_and_keywords():
    def step(model, optimizer):
        inner = plain_step(model, optimizer)

        def outer(batch, *, halves):
            return inner(batch["x"][0], batch["y"]) * (0.5 if halves else 1.0)

        return outer

    eager, captured = two_runs(Net, step)
    for run in (eager, captured):
        keyed = run.step
        run.step = lambda x, y, keyed=keyed: keyed({"x": [x], "y": y}, halves=True)
        run.handle = keyed
    follow(eager, captured, BATCHES)
    assert captured.handle.num_replays >= 8
    assert not captured.handle({"x": [BATCHES[0][0]], "y": BATCHES[0][1]}, halves=False).requires_grad
    assert captured.handle.num_captured == 1


def test_what_a_user_holds_does_not_change():
    eager, captured = two_runs(Net)
    losses = [[run.step(*batch) for batch in BATCHES] for run in (eager, captured)]
    assert same(*[[t.detach() for t in found] for found in losses])
    assert not any(loss.requires_grad for loss in losses[1])


def test_results_of_replays_are_seen_as_writes():
    eager, captured = two_runs(Net)
    follow(eager, captured, BATCHES[:6])
    out = captured.model(BATCHES[0][0]).sum()
    replays = captured.step.num_replays
    captured.step(*BATCHES[0])
    assert captured.step.num_replays == replays + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_a_recording_that_fails_leaves_everything_as_it_was():
    def step(model, optimizer):
        inner = plain_step(model, optimizer)

        def outer(x, y):
            loss = inner(x, y)
            if any(isinstance(mode, Tape) for mode in _get_current_dispatch_mode_stack()):
                raise RuntimeError("out of luck")
            return loss

        return outer

    eager, captured = two_runs(Net, step)
    follow(eager, captured, BATCHES)
    assert captured.step.num_captured == captured.step.num_replays == 0
    assert "1 not captured: it failed: RuntimeError: out of luck" in captured.step.report()


def test_gives_up_where_nothing_repeats():
    eager, captured = two_runs(Net)
    captured.step._most = 2
    batches = [(torch.ones(rows, 4), torch.ones(rows, 2)) for rows in range(2, 22)]
    follow(eager, captured, batches)
    assert captured.step.report() == "gave up after 16 calls in a row without a replay, 0 replayed"
    captured.step.release()
    follow(eager, captured, BATCHES)
    assert captured.step.num_replays >= 8


def test_callbacks_of_the_garbage_collector_are_not_the_step_s():
    """Some programs time the collector, which may run at any moment."""
    threshold = gc.get_threshold()
    timed = lambda phase, info: time.perf_counter()  # noqa: E731
    gc.callbacks.append(timed)
    gc.set_threshold(20, 2, 2)
    try:
        eager, captured = two_runs(Net)
        follow(eager, captured, BATCHES)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(timed)
    assert captured.step.num_captured == 1 and gc.isenabled(), captured.step.report()


def test_the_decorator_and_the_function():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @edgeless.capture_step(model=model, optimizer=[optimizer])
    def step(x, y):
        """Trains."""
        return (model(x) - y).square().mean()

    assert isinstance(step, edgeless.CapturedStep) and step.__name__ == "step" and step.__doc__ == "Trains."
    twin = edgeless.capture_step(step.__wrapped__, model=[model])
    assert torch.equal(step(*BATCHES[0]), twin(*BATCHES[0]))
    assert "1 not captured: an argument is a tensor that is not on the current GPU" in step.report()


def test_bad_arguments():
    with pytest.raises(TypeError, match="capture_step: function must be callable, got int"):
        edgeless.capture_step(3)
    with pytest.raises(TypeError, match="capture_step: model must be a Module or several, got int"):
        edgeless.capture_step(print, model=3)
    with pytest.raises(TypeError, match="capture_step: optimizer must be a Optimizer or several, got list"):
        edgeless.capture_step(print, optimizer=[3])
    for options, words in (({"warmup": 1}, "warmup must be an int of at least 2"), ({"most": 0}, "most must be")):
        with pytest.raises(ValueError, match=words):
            edgeless.capture_step(print, **options)
