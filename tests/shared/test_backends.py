"""Choosing a backend, explaining the choice and the mixin that makes it, without any framework."""

import asyncio
import concurrent.futures
import os
import threading

import pytest
import torch
from forks import run_in_fork
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import edgeless
from edgeless.choices import backends


class Stock(torch.nn.Module):
    """A stock layer of no framework."""

    def __init__(self, width=2):
        super().__init__()
        self.lin = torch.nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        return scale * self.lin(x)


class Fused(edgeless.FusedLayer, Stock):
    def forward(self, x, scale=1.0):
        return self._choose(x, scale)

    def _fusion_refusals(self, x, scale=1.0):
        reasons = []
        if x.dim() != 2:
            reasons.append(f"x has {x.dim()} dimensions")
        if scale == 0:
            reasons.append("scale is 0")
        return reasons

    def _fused_forward(self, x, scale):
        return scale * self.lin(x) + 1000


X = torch.ones(3, 2)


def test_auto_runs_fused_where_it_can():
    layer = Fused()
    torch.testing.assert_close(layer(X), layer.lin(X) + 1000)
    torch.testing.assert_close(layer(X, scale=0), 0 * layer.lin(X))
    torch.testing.assert_close(layer(X[0]), layer.lin(X[0]))


def test_reference_runs_the_stock_forward():
    layer = Fused()
    with edgeless.backend("reference"):
        torch.testing.assert_close(layer(X), layer.lin(X))
    torch.testing.assert_close(layer(X), layer.lin(X) + 1000)


def test_fused_raises_in_the_words_of_explain():
    layer = Fused()
    with edgeless.backend("fused"):
        torch.testing.assert_close(layer(X), layer.lin(X) + 1000)
        with pytest.raises(edgeless.NotFusedError) as error:
            layer(X[0], scale=0)
    words = "Fused does not run fused, because x has 1 dimensions; because scale is 0."
    assert str(error.value) == words == str(edgeless.explain(layer, X[0], scale=0))
    assert isinstance(error.value, RuntimeError)


def test_explain_computes_nothing_and_holds_facts():
    layer = Fused()
    layer.lin.register_forward_hook(lambda *args: pytest.fail("explain ran the layer"))
    explanation = edgeless.explain(layer, X)
    assert explanation and explanation.fused and explanation.reasons == () and str(explanation) == "Fused runs fused."
    explanation = edgeless.explain(layer, X, 0)
    assert not explanation and explanation.reasons == ("scale is 0",)
    with edgeless.backend("reference"):
        explanation = edgeless.explain(layer, X)
    assert explanation.reasons == ('edgeless.backend("reference") is in force',)


def test_explain_other_modules():
    assert edgeless.explain(torch.nn.Linear(2, 2), X).reasons == ("Linear is not a layer of edgeless",)


def test_nesting_and_errors_restore_the_backend():
    assert backends.current_backend() == "auto"
    with edgeless.backend("fused"):
        with edgeless.backend("reference"):
            assert backends.current_backend() == "reference"
        assert backends.current_backend() == "fused"
    with pytest.raises(KeyError), edgeless.backend("reference"):
        raise KeyError
    assert backends.current_backend() == "auto"


def test_unknown_backend():
    with (
        pytest.raises(ValueError, match="name must be one of 'auto', 'fused', 'reference', got 'cuda'"),
        edgeless.backend("cuda"),
    ):
        pass
    assert backends.current_backend() == "auto"


# Threads -------------------------------------------------------------------------------------------------------------


def in_thread(work):
    """What ``work()`` returns in a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_overlapping_blocks_of_two_threads():
    seen, entered, left = [], threading.Event(), threading.Event()

    def other():
        with edgeless.backend("fused"):
            seen.append(backends.current_backend())
            entered.set()
            left.wait(30)
            seen.append(backends.current_backend())
        seen.append(backends.current_backend())

    thread = threading.Thread(target=other)
    with edgeless.backend("reference"):
        thread.start()
        entered.wait(30)
        assert backends.current_backend() == "reference"
    assert backends.current_backend() == "auto"  # for the other thread's block is none of its own
    left.set()
    thread.join()
    assert seen == ["fused", "fused", "auto"]
    assert backends.current_backend() == "auto"


def test_many_threads_leave_nothing_behind():
    wrong = []

    def work(seed):
        for step in range(300):
            name = backends.BACKENDS[(seed + step) % 3]
            with edgeless.backend(name), edgeless.backend("reference"):
                pass
            with edgeless.backend(name):
                if backends.current_backend() != name:
                    wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert backends.current_backend() == in_thread(backends.current_backend) == "auto"


def test_a_block_that_ends_in_another_thread():
    def steps():
        with edgeless.backend("reference"):
            yield

    open_block = steps()
    next(open_block)
    assert backends.current_backend() == "reference"
    in_thread(open_block.close)
    assert backends.current_backend() == "auto"


def test_tasks_of_one_thread_leave_nothing_behind():
    async def task(name, begin, end):
        await asyncio.sleep(begin)
        with edgeless.backend(name):
            await asyncio.sleep(end)

    async def both():
        await asyncio.gather(task("reference", 0, 0.02), task("fused", 0.01, 0.03))

    asyncio.run(both())
    assert backends.current_backend() == "auto"


def test_layers_in_worker_threads_choose_for_themselves():
    """As replicas of nn.DataParallel do, in whose threads the forward of a module may open a block."""
    layer = Fused()

    def apply(name):
        with edgeless.backend(name):
            return layer(X)

    with edgeless.backend("reference"), concurrent.futures.ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(apply, ("auto", "reference")))
        outs.append(pool.submit(layer, X).result())
    for out, more in zip(outs, (1000, 0, 1000), strict=True):
        torch.testing.assert_close(out, layer.lin(X) + more)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_keeps_the_choice_of_the_thread_that_forked():
    entered, left = threading.Event(), threading.Event()

    def other():
        with edgeless.backend("fused"):
            entered.set()
            left.wait(30)

    thread = threading.Thread(target=other)
    with edgeless.backend("reference"):
        thread.start()
        entered.wait(30)
        assert run_in_fork(lambda: backends.current_backend() == "reference")
        assert run_in_fork(lambda: in_thread(backends.current_backend) == "auto")
    assert run_in_fork(lambda: backends.current_backend() == "auto")  # the other thread is not in the child
    assert run_in_fork(lambda: in_thread(takes_a_block))
    left.set()
    thread.join()


def takes_a_block():
    with edgeless.backend("reference"):
        return backends.current_backend() == "reference"


# torch.compile -------------------------------------------------------------------------------------------------------


def choice_as_a_number(x):
    return x + backends.BACKENDS.index(backends.current_backend())


def test_compiled_programs_follow_the_choice():
    counter = CompileCounter()
    compiled = torch.compile(choice_as_a_number, backend=counter, fullgraph=True)

    def run():
        return int(compiled(torch.zeros(())))

    for _ in range(10):
        assert run() == 0
        with edgeless.backend("reference"):
            assert run() == 2 and in_thread(run) == 0
            with edgeless.backend("fused"):
                assert run() == 1
    assert counter.frame_count == 3  # one for each choice


def test_a_block_inside_a_compiled_program():
    @torch.compile(backend="eager", fullgraph=True)
    def program(x):
        with edgeless.backend("reference"):
            y = choice_as_a_number(x)
        return torch.stack((y, choice_as_a_number(x)))

    assert program(torch.zeros(())).tolist() == [2, 0]
    assert backends.current_backend() == "auto"
    with edgeless.backend("fused"):
        assert program(torch.zeros(())).tolist() == [2, 1]
        assert backends.current_backend() == "fused"


def test_a_program_that_breaks_in_a_block_shows_it_to_no_other_thread():
    seen = []

    @torch._dynamo.disable
    def look():
        seen.extend((backends.current_backend(), in_thread(backends.current_backend)))
        with edgeless.backend("fused"):
            seen.append(backends.current_backend())

    @torch.compile(backend="eager")
    def program(x):
        with edgeless.backend("reference"):
            y = choice_as_a_number(x)
            look()
            return y + choice_as_a_number(x)

    assert int(program(torch.zeros(()))) == 4 and seen == ["reference", "auto", "fused"]
    assert backends.current_backend() == "auto"


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_takes_the_choice_along():
    """A checkpoint runs again in the backward, when the block may be over: its contexts say what holds there."""
    seen = []

    def body(x):
        seen.append(backends.current_backend())
        return (x * x).sin()

    x = torch.ones(3, requires_grad=True)
    chosen = [edgeless.backend("reference") for _ in range(2)]
    checkpoint(body, x, use_reentrant=False, context_fn=lambda: chosen).sum().backward()
    assert seen == ["reference", "reference"]


def test_kernels_of_this_build():
    assert backends.kernel_refusal(torch.device("cpu")) is None
    assert backends.kernel_refusal(torch.device("meta")) == "edgeless has no kernels for 'meta' devices"
    if torch.version.hip is None:
        assert backends.kernel_refusal(torch.device("cuda")) is None  # on a machine without a GPU too, for tracing


def test_gpus_that_are_not_nvidias(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert backends._look_for_kernels("cuda", "spmm") == "edgeless has no kernels for AMD GPUs"
    assert backends._look_for_kernels("cpu", "spmm") is None


def test_functional_follows_the_backend(monkeypatch):
    graph = edgeless.Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), 2, 2)
    x, a = torch.randn(2, 1, 3), torch.randn(2, 1)
    calls = []
    monkeypatch.setattr(edgeless.reference, "attend_gat", lambda *args, **kwargs: calls.append(1))
    with edgeless.backend("fused"):
        edgeless.functional.gat_attention(graph, x, a, a)
    assert not calls
    with edgeless.backend("reference"):
        edgeless.functional.gat_attention(graph, x, a, a)
    assert calls
