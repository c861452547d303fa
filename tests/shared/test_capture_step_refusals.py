"""edgeless.capture_step: steps, calls and places that are not captured run as they are, and the report says why."""

import copy
import io
import random
import time

import pytest
import torch
from step_cases import BATCHES, Net, follow, plain_step, same, taped_step, two_runs
from torch import nn

import edgeless
from edgeless.capture.batches import leaves_of, step_key, with_leaves
from edgeless.capture.keys import Unfit
from edgeless.capture.step_recording import _heard
from edgeless.graph.deferred_checks import DeferredChecks, deferring


def with_effect(effect):
    """A step that also calls ``effect(model, optimizer, y, loss)``, before its backward."""

    def step(model, optimizer):
        def inner(x, y):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            effect(model, optimizer, y, loss)
            loss.backward()
            optimizer.step()
            return loss

        return inner

    return step


LOSSES, COUNTS, OWN = [], {"steps": 0}, torch.zeros(3, dtype=torch.int64)


class Log:
    total = 0

    def add(self, value):
        self.total = self.total + value


LOG = Log()


def count_steps(model, optimizer, y, loss):
    COUNTS["steps"] = COUNTS["steps"] + 1


def count_in_the_model(model, optimizer, y, loss):
    model.calls = getattr(model, "calls", 0) + 1


WAYWARD = {
    "prints": (lambda *given: print("a step"), "the step prints or writes to a file"),
    "reads a number": (lambda model, optimizer, y, loss: loss.item(), "the step reads a number from the GPU"),
    "branches": (lambda model, optimizer, y, loss: loss > 0 and None, "the step reads a number from the GPU"),
    "reads the clock": (lambda *given: time.perf_counter(), "the step reads the clock"),
    "draws on the host": (lambda *given: random.random(), "the step draws random numbers on the CPU"),
    "appends": (lambda model, optimizer, y, loss: LOSSES.append(1), "LOSSES changes"),
    "counts": (count_steps, "COUNTS.steps changes"),
    "counts in the model": (count_in_the_model, "Net.calls changes"),
    "writes to its arguments": (lambda model, optimizer, y, loss: y.mul_(1), "the step writes to its arguments"),
    "writes to integers": (lambda *given: OWN.add_(1), "the step writes to a tensor of integers"),
    "sets an attribute": (
        lambda model, optimizer, y, loss: setattr(model, "last", loss.detach()),
        "the step changes Net.last",
    ),
    "logs": (lambda model, optimizer, y, loss: LOG.add(1), "LOG.total changes"),
}


@pytest.mark.parametrize("effect,why", WAYWARD.values(), ids=WAYWARD)
def test_steps_that_do_more_than_compute(effect, why, capsys):
    LOSSES.clear(), COUNTS.update(steps=0), OWN.zero_()
    eager, captured = two_runs(Net, with_effect(effect))
    batches = [(x, y.clone()) for x, y in BATCHES]
    losses = []
    for run in (eager, captured):
        random.seed(0)
        losses.append([run.step(*batch).detach() for batch in batches])
    assert same(*losses) and same(eager.everything(), captured.everything())
    assert why in captured.step.report() and captured.step.num_replays == 0
    assert len(LOSSES) in (0, 24) and COUNTS["steps"] in (0, 24) and OWN[0] in (0, 24)


def test_step_counters_on_the_cpu_are_not_captured():
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    eager, captured = two_runs(Net, optimizer=adam)
    follow(eager, captured, BATCHES)
    assert captured.step.num_replays == 0 and "the step reads a number" in captured.step.report()


HOOKS = {
    "of a module": lambda run: run.model.first.register_forward_hook(lambda *given: None),
    "of the model": lambda run: run.model.register_forward_pre_hook(lambda *given: None),
    "of a parameter": lambda run: run.model.first.weight.register_hook(lambda grad: grad * 2),
    "after accumulation": lambda run: run.model.first.weight.register_post_accumulate_grad_hook(lambda p: None),
    "of the optimizer": lambda run: run.optimizer.register_step_pre_hook(lambda *given: None),
}


@pytest.mark.parametrize("number", [0, 6])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooks_are_called(hook, number):
    def between(run, now):
        if now == number:
            run.hook = hook(run)
        elif now == number + 6:
            run.hook.remove()

    eager, captured = two_runs(Net)
    follow(eager, captured, BATCHES[: number + 6], between)
    assert captured.step.num_replays == max(0, number - 2 - (number > 2) * 1) or number
    assert "has hooks, which a replay would not call" in captured.step.report()
    follow(eager, captured, BATCHES, lambda run, now: between(run, now + number + 6))
    assert captured.step.num_replays >= 8, captured.step.report()


def test_a_result_that_is_no_tensor_of_its_own():
    for effect, why in (
        (lambda model, loss: object(), "a result is a object"),
        (lambda model, loss: model.first.bias.detach(), "a result is an argument or a parameter itself"),
    ):

        def step(model, optimizer, effect=effect):
            inner = plain_step(model, optimizer)
            return lambda x, y: effect(model, inner(x, y))

        captured = two_runs(Net, step)[1]
        for batch in BATCHES:
            captured.step(*batch)
        assert why in captured.step.report() and captured.step.num_replays == 0


def test_errors_of_the_step_come_as_they_are():
    def step(model, optimizer):
        inner = plain_step(model, optimizer)

        def outer(x, y):
            if len(x) == 5:
                raise KeyError("five")
            return inner(x, y)

        return outer

    eager, captured = two_runs(Net, step)
    for _ in range(4):
        with pytest.raises(KeyError, match="five"):
            captured.step(torch.ones(5, 4), torch.ones(5, 2))
    follow(eager, captured, BATCHES)
    assert captured.step.num_replays >= 8


def test_places_where_steps_run_as_they_are():
    eager, captured = two_runs(Net)
    follow(eager, captured, BATCHES[:6])
    replays = captured.step.num_replays
    with torch.autograd.graph.save_on_cpu():
        follow(eager, captured, BATCHES[:2])
    captured.step._graphs.capturing = True
    follow(eager, captured, BATCHES[:1])
    captured.step._graphs.capturing = False
    report = captured.step.report()
    assert captured.step.num_replays == replays
    assert "hooks of saved tensors are active" in report and "another capture is going on" in report
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        follow(eager, captured, BATCHES[:1])
    assert captured.step.num_replays >= replays


def test_arguments_that_no_step_can_be_captured_with():
    for value, why in (
        (BATCHES[0][0].to_sparse(), "sparse"),
        (torch.ones(2, requires_grad=True), "requires a gradient"),
        (object(), "an argument is a object"),
        (nn.Linear(1, 1), "an argument is a Linear"),
    ):
        with pytest.raises(Unfit, match=why):
            step_key(value, "cpu", -1)
    with pytest.raises(Unfit, match="not on the current GPU"):
        step_key(torch.ones(2), "cuda", 0)


def test_arguments_are_taken_apart_and_put_together():
    given = ((torch.ones(2), None), {"a": [1, torch.ones(3)], "b": ("c", 2.5)})
    leaves = []
    tree = leaves_of(given, leaves)
    assert hash(tree) is not None and len(leaves) == 6
    other = with_leaves(given, iter([*range(6)]))
    assert other == ((0, 1), {"a": [2, 3], "b": (4, 5)})
    assert leaves_of({"a": 1}, []) != leaves_of({"b": 1}, []) != leaves_of([1], [])


def test_a_cache_that_trusts_no_version_is_not_bypassed(monkeypatch):
    monkeypatch.setenv("EDGELESS_CACHE", "verify")
    eager, captured = two_runs(Net)
    follow(eager, captured, BATCHES)
    assert captured.step.num_captured == 0 and "EDGELESS_CACHE asks for more" in captured.step.report()


# Graphs --------------------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    def __init__(self, self_loops=False):
        super().__init__()
        self.linear, self.self_loops = nn.Linear(4, 2), self_loops

    def forward(self, x, ends):
        graph = edgeless.cache.graph_from_edge_index(ends, len(x), len(x), self_loops=self.self_loops)
        return edgeless.functional.spmm(graph, self.linear(x))


def step_on_graphs(model, optimizer):
    def step(x, ends, y):
        optimizer.zero_grad()
        loss = (model(x, ends) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def graphs_of(count, seed=0):
    made = torch.Generator().manual_seed(seed)
    found = []
    for x, y in BATCHES[:count]:
        src = torch.randint(6, (14,), generator=made)
        dst = (src + torch.randint(1, 6, (14,), generator=made)) % 6
        found.append((x, torch.stack((src, dst)), y))
    return found


@pytest.mark.parametrize("self_loops", [False, True])
def test_a_graph_that_differs_between_calls_is_sorted_in_every_replay(self_loops):
    eager, captured = two_runs(lambda: Sums(self_loops), step_on_graphs)
    follow(eager, captured, graphs_of(12))
    assert captured.step.num_captured == 1 and captured.step.num_replays >= 8, captured.step.report()


def test_a_graph_that_stays_is_sorted_once():
    eager, captured = two_runs(Sums, step_on_graphs)
    ends = graphs_of(1)[0][1]
    batches = [(x, ends, y) for x, y in BATCHES]
    follow(eager, captured, batches)
    (recording,) = captured.step._kept[next(iter(captured.step._kept))]
    assert len(recording._inputs) == 2 and not recording.checks.any and captured.step.num_replays >= 8
    ends[0, 0] = 5
    ends[1, 0] = 1
    follow(eager, captured, batches)
    assert captured.step.num_captured == 1 and captured.step.num_replays >= 16  # the stale one is gone


def test_wrong_ids_are_reported_at_the_next_call():
    captured = two_runs(Sums, step_on_graphs)[1]
    batches = graphs_of(8)
    for batch in batches:
        captured.step(*batch)
    x, ends, y = batches[0]
    wrong = ends.clone()
    wrong[1, 3] = 6
    replays = captured.step.num_replays
    captured.step(x, wrong, y)
    assert captured.step.num_replays == replays + 1
    with pytest.raises(IndexError, match=r"edge_index\[1\] had an id out of range, expected 0 <= id < num_dst = 6"):
        captured.step(*batches[1])
    captured.step(*batches[1])
    assert captured.step.num_replays == replays + 2


def test_self_loops_that_would_have_to_be_counted_are_reported():
    captured = two_runs(lambda: Sums(True), step_on_graphs)[1]
    batches = graphs_of(6)
    for batch in batches:
        captured.step(*batch)
    x, ends, y = batches[0]
    looped = ends.clone()
    looped[1, 3] = looped[0, 3]
    captured.step(x, looped, y)
    with pytest.raises(IndexError, match="a layer that replaces self loops got a graph with some"):
        captured.step(*batches[1])


def test_deferred_checks_keep_kernels_within_their_arrays():
    checks = DeferredChecks(torch.device("cpu"))
    ids = torch.tensor([0, -1, 3, 2])
    assert checks.ids("a", ids, "n", 3).tolist() == [0, 0, 0, 2] and checks.any
    checks.send()
    assert checks.wrong() == "a had an id out of range, expected 0 <= id < n = 3"
    checks.send()
    assert checks.wrong() is None
    with pytest.raises(IndexError, match="n = 0"):
        checks.ids("a", ids, "n", 0)
    src, dst = torch.tensor([[0, 1, 7], [1, 2, 0]])
    with deferring(checks):
        graph = edgeless.Graph.from_edge_index(torch.stack((src, dst)), 3, 3)
    assert graph.csr.indices.max() < 3
    with pytest.raises(IndexError):
        edgeless.Graph.from_edge_index(torch.stack((src, dst)), 3, 3)


def test_steps_of_two_models_share_nothing():
    runs = [two_runs(Net) for _ in range(2)]
    for batch in BATCHES:
        for eager, captured in runs:
            follow(eager, captured, [batch])
    assert all(captured.step.num_replays >= 8 for _, captured in runs)
    assert copy.copy(runs[0][1].step).num_captured == 1


def test_on_the_cpu_steps_run_as_they_are():
    eager, captured = two_runs(Net)
    captured.step = edgeless.capture_step(captured.plain, model=captured.model, optimizer=captured.optimizer)
    follow(eager, captured, BATCHES)
    assert captured.step.report() == (
        "0 captured, 0 replayed\n  12 not captured: an argument is a tensor that is not on the current GPU: "
        "move the batch before the step"
    )
    taped_step(captured.plain)


@pytest.mark.parametrize("module, faults", [("warnings", []), ("a module", ["the step prints or writes to a file"])])
def test_a_warning_that_is_printed_is_no_effect(module, faults):
    names, found = {"__name__": module}, []
    exec("def write(file): return [file.write(line) for line in ('once',)]", names)
    with _heard(found):
        names["write"](io.StringIO())
    assert found == faults
