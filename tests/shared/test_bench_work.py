"""What the bench times: a peer's forward, its gradients, and replays of both."""

from types import SimpleNamespace

import pytest
import torch

import edgeless
from edgeless.tools.bench import work as bench
from edgeless.tools.bench.work import CapturedWork, Case, EngineWork, GraphedWork, Work, op_case
from edgeless.tools.cli.devices import UsageError


def test_a_case_has_the_sizes_of_its_name():
    case = op_case("gatv2_H8_D128", "bf16", 0.25)
    assert case == Case("op", "gatv2_H8_D128", "bf16", features=128, heads=8, channels=128, dropout=0.25)
    assert (case.op, case.label) == ("gatv2", "gatv2_H8_D128 bf16 dropout 0.25")
    assert op_case("spmm_both_F512", "fp32").label == "spmm_both_F512 fp32"
    assert op_case("spmm_both_F512", "fp32") == Case("op", "spmm_both_F512", "fp32", heads=1, channels=512)
    numbers = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    assert numbers == bench.DTYPES and bench.MODES == ("forward", "forward_backward")


def seen(x, w, also=None):
    """A work that notes how it is computed, and what its inputs' gradients are."""
    notes, grads = [], {}
    for name, t in (("x", x), ("w", w)):
        t.register_hook(lambda grad, name=name: grads.__setitem__(name, grad))

    def compute():
        out = x @ w
        notes.append((torch.is_grad_enabled(), out.dtype))
        return out if also is None else [out, also(x)]

    return compute, notes, grads


def test_a_forward_keeps_nothing_and_a_backward_gives_all_gradients():
    x, w, unused = (torch.randn(*shape).requires_grad_() for shape in ((4, 3), (3, 2), (5,)))
    compute, notes, grads = seen(x, w)
    work = Work(compute, [x, w, unused])
    work.mode("forward")()
    assert notes == [(False, torch.float32)] and not grads
    work.mode("forward_backward")()
    assert notes[1:] == [(True, torch.float32)]
    (given,) = work.grad_out
    assert given.shape == (4, 2) and given.std() > 0
    torch.testing.assert_close(grads["x"], given @ w.detach().t())
    torch.testing.assert_close(grads["w"], x.detach().t() @ given)
    work.forward_backward()
    assert work.grad_out[0] is given  # drawn once
    assert x.grad is w.grad is None and not work.is_replayed("forward")


def test_every_output_has_a_gradient():
    x, w = torch.randn(4, 3).requires_grad_(), torch.randn(3, 2).requires_grad_()
    compute, _, grads = seen(x, w, also=lambda x: 2 * x)
    given = [torch.randn(4, 2), torch.randn(4, 3)]
    work = Work(compute, [x, w], grad_out=given)
    work.forward_backward()
    torch.testing.assert_close(grads["x"], given[0] @ w.detach().t() + 2 * given[1])
    assert len(work.outputs()) == 2 and isinstance(Work(lambda: x, [x]).outputs(), list)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_both_modes_run_under_the_autocast_that_was_asked_for(autocast):
    x, w = torch.randn(4, 3).requires_grad_(), torch.randn(3, 2).requires_grad_()
    compute, notes, _ = seen(x, w)
    work = Work(compute, [x, w], autocast=autocast)
    work.forward(), work.forward_backward()
    dtype = autocast or torch.float32
    assert notes == [(False, dtype), (True, dtype)]
    assert not torch.is_autocast_enabled("cpu")


class Recorded:
    """In the place of a CUDA graph: counts its replays."""

    def __init__(self, run):
        run()
        self.replays = 0

    def replay(self):
        self.replays += 1


def test_each_mode_is_captured_once_and_then_replayed(monkeypatch):
    monkeypatch.setattr(bench, "_capture", Recorded)
    x = torch.randn(3).requires_grad_()
    runs = []
    work = GraphedWork(lambda: runs.append(torch.is_grad_enabled()) or 2 * x, [x])
    for _ in range(3):
        work.forward()
    assert (runs, work.is_replayed("forward"), work.is_replayed("forward_backward")) == ([False], True, False)
    work.forward_backward(), work.forward_backward()
    assert runs == [False, True] and work.is_replayed("forward_backward")
    assert [graph.replays for graph in work._captured.values()] == [3, 2]


@pytest.mark.parametrize("ms,cuda,waits,replays", [
    (1.99, True, False, True), (2.0, True, False, False), (1.99, False, False, False), (1.99, True, True, False),
])  # fmt: skip
def test_short_runs_of_an_engine_are_replayed(ms, cuda, waits, replays, monkeypatch):
    """Below two milliseconds the host would be timed."""
    monkeypatch.setattr(bench, "_capture", Recorded)
    monkeypatch.setattr(bench, "_milliseconds", lambda run: run() or ms)
    engines = []
    x = SimpleNamespace(is_cuda=cuda)
    monkeypatch.setattr(Work, "_precision", lambda self: torch.enable_grad())
    work = EngineWork(
        lambda: engines.append(edgeless.choices.engines.current_engine()), [x], engine="rowsplit", waits=waits
    )
    work.forward(), work.forward()
    assert work.is_replayed("forward") is replays and not work.is_replayed("forward_backward")
    assert set(engines) == {"rowsplit"} and edgeless.choices.engines.current_engine() == "auto"
    before = len(engines)
    work.forward()
    assert len(engines) == before + (not replays)


def test_milliseconds_are_the_least_behind_two_runs(monkeypatch):
    times = iter([0.1, 0.2, 5.0, 3.0, 4.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        synchronize = record

        def elapsed_time(self, end):
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    runs = []
    assert bench._milliseconds(lambda: runs.append(1)) == 3.0 and len(runs) == 5


@pytest.mark.parametrize("captures", [True, False])
def test_a_layer_that_is_captured_is_timed_replayed_or_not_at_all(captures):
    handle = SimpleNamespace(num_replays=0, report=lambda: "it is refused")
    x = torch.randn(3).requires_grad_()
    runs = []

    def compute():
        runs.append(torch.is_grad_enabled())
        handle.num_replays += captures and len(runs) > 3
        return 2 * x

    work = CapturedWork(compute, [x], handle=handle)
    if not captures:
        with pytest.raises(UsageError, match="--peers edgeless-pyg-captured: it is refused"):
            work.forward()
        assert not work.is_replayed("forward")
        return
    work.forward()
    assert len(runs) == 6 and work.is_replayed("forward") and not work.is_replayed("forward_backward")
    work.forward()
    assert len(runs) == 7
    work.forward_backward()
    assert runs[7:] == [True] * 6 and work.is_replayed("forward_backward")
