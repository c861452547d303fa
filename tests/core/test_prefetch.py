"""The next batch on a stream of its own: in order, complete, and without a wait for the current one."""

import itertools

import pytest
import torch
from devices import EVERY_DEVICE, without_waiting

import edgeless
from edgeless import Graph, functional
from edgeless.prefetch import record_stream

NODES, EDGES, BATCHES = 3000, 40_000, 12
LONG = 300_000_000  # cycles, a sixth of a second


def batches():
    """Edges and features of graphs of several sizes."""
    draw = torch.Generator().manual_seed(1)
    for number in range(BATCHES):
        nodes = NODES + 100 * number
        yield torch.randint(nodes, (2, EDGES + number), generator=draw), torch.randn(nodes, 16, generator=draw)


def preparing(device, loops=True):
    def prepare(batch):
        edge_index, x = (t.to(device) for t in batch)
        graph = Graph.from_edge_index(edge_index, len(x), len(x))
        if loops:
            graph.with_self_loops()
        return {"x": x, "graphs": [graph]}

    return prepare


def trained(prepared):
    """The weight after a step with every batch."""
    weight = None
    for batch in prepared:
        x, (graph,) = batch["x"], batch["graphs"]
        if weight is None:
            weight = torch.full((x.size(1), 8), 0.1, device=x.device, requires_grad=True)
        out = functional.spmm(graph.with_self_loops(), (x @ weight).relu(), reduce="mean")
        (grad,) = torch.autograd.grad(out.square().mean(), weight)
        with torch.no_grad():
            weight -= grad
    return weight.detach()


@EVERY_DEVICE
def test_batches_are_those_of_a_map(device):
    prepare = preparing(device)
    assert torch.equal(trained(edgeless.prefetch(batches(), prepare, device)), trained(map(prepare, batches())))
    assert list(edgeless.prefetch([], prepare, device)) == []
    assert list(edgeless.prefetch(range(1), str, device)) == ["0"]


@EVERY_DEVICE
def test_an_error_is_that_of_the_batch(device):
    def prepare(number):
        return torch.ones(1, device=device) / (3 - number) if number < 3 else [].pop()

    with pytest.raises(IndexError, match="pop from empty list"):
        list(edgeless.prefetch(range(9), prepare, device))


def test_arguments_are_checked_at_the_call():
    with pytest.raises(TypeError, match="prefetch: prepare must be a function, got int"):
        edgeless.prefetch([], 3, "cpu")
    with pytest.raises(ValueError, match="prefetch: device must be one that torch knows, got 'gpu'"):
        edgeless.prefetch([], str, "gpu")


def test_streams_are_recorded_wherever_a_batch_has_memory():
    class Batch:
        def record_stream(self, stream):
            seen.append((self, stream))

    seen, parts = [], [Batch() for _ in range(4)]
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 2, 2)  # on the CPU there is nothing to record
    record_stream((parts[0], [parts[1], 5, None], {"a": parts[2], "b": (parts[3], graph, torch.ones(2))}), "stream")
    assert seen == [(part, "stream") for part in parts]


@pytest.mark.cuda
def test_the_host_does_not_wait_for_the_batch_before():
    current = torch.cuda.current_stream()
    prepared = edgeless.prefetch(batches(), preparing("cuda"), "cuda")
    trained(itertools.islice(prepared, 2))
    torch.cuda._sleep(LONG)
    batch = next(prepared)
    assert not current.query()  # a read-back on this stream would have waited for the sleep
    x, (graph,) = batch["x"], batch["graphs"]
    out = without_waiting(lambda: functional.spmm(graph.with_self_loops(), x))
    assert not current.query()
    expected = functional.spmm(graph.to("cpu").with_self_loops(), x.cpu())
    torch.testing.assert_close(out.cpu(), expected)


@pytest.mark.cuda
def test_memory_is_not_used_again_before_the_batch_was():
    numbers, sums = range(8), []
    for x in edgeless.prefetch(numbers, lambda i: torch.full((1 << 20,), float(i), device="cuda"), "cuda"):
        torch.cuda._sleep(LONG // 10)
        sums.append(x.sum())
        del x
    assert [t.item() for t in sums] == [float(i << 20) for i in numbers]
    outs = []
    for batch in edgeless.prefetch(batches(), preparing("cuda", loops=False), "cuda"):
        torch.cuda._sleep(LONG // 10)
        outs.append(functional.spmm(batch["graphs"][0], batch["x"]))
        del batch
    for out, (edge_index, x) in zip(outs, batches(), strict=True):
        expected = functional.spmm(Graph.from_edge_index(edge_index, len(x), len(x)), x)
        torch.testing.assert_close(out.cpu(), expected)


@pytest.mark.cuda
def test_what_was_there_before_the_loop_is_waited_for():
    table = torch.full((NODES, 4), float("nan"), device="cuda")
    torch.cuda._sleep(LONG // 10)
    table.fill_(1.0)
    rows = [torch.arange(n) for n in (5, 9)]
    found = list(edgeless.prefetch(rows, lambda ids: table[ids.to("cuda")], "cuda"))
    assert all(bool((t == 1).all()) for t in found)
