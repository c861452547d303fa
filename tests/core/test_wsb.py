"""Weighted sparse blocks: what is in them, on the CPU; sums over them against float64 and our own kernels, on CUDA."""

import gc
import importlib

import pytest
import torch
from attention_cases import error
from devices import EVERY_DEVICE, on_a_late_stream

import edgeless
from edgeless import Graph, functional
from edgeless.graph.wsb import COLUMNS, LEAST_EDGES, WsbFormat, blocks_of, edges_a_row
from edgeless.plan.recording import record


def ends_of(kind, seed=0):
    """(edge_index, number of sources, number of destinations)."""
    draw = torch.Generator().manual_seed(seed)
    if kind == "no edges":
        return torch.zeros(2, 0, dtype=torch.long), 7, 70
    if kind == "no nodes":
        return torch.zeros(2, 0, dtype=torch.long), 0, 0
    if kind == "one edge":
        return torch.tensor([[6], [69]]), 7, 70
    if kind == "star":
        return torch.stack([torch.arange(3000), torch.full((3000,), 40)]), 3000, 41
    num_src, num_dst, count = {"random": (150, 130, 2500), "sparse": (400, 500, 300), "large": (900, 1000, 60_000)}[
        kind
    ]
    ends = torch.stack([torch.randint(n - 5, (count,), generator=draw) for n in (num_src, num_dst)])
    ends[1, ::5] = 7
    return ends, num_src, num_dst


KINDS = ["random", "sparse", "large", "star", "one edge", "no edges", "no nodes"]


def graph_of(kind, device="cpu", wide=False, **options):
    ends, num_src, num_dst = ends_of(kind, **options)
    graph = Graph.from_edge_index(ends, num_src, num_dst)
    if wide:
        csr, csc = (type(s)(*[None if t is None else t.long() for t in s]) for s in (graph.csr, graph.csc))
        graph = Graph(csr, csc, num_src, num_dst)
    return graph.to(device)


def dense(blocks, num_rows, num_columns):
    """How many edges there are from every column to every row, read out of the blocks."""
    first, order, columns, bits = (t.cpu().long() for t in blocks)
    found = torch.zeros(num_rows, num_columns, dtype=torch.long)
    for window in range(order.numel()):
        for block in range(first[window], first[window + 1]):
            for place in range(COLUMNS):
                words = bits[block, place // 4, :, place // 2 % 2] >> place % 2 * 16
                for row in range(32):
                    if words[row // 16] >> row % 16 & 1:
                        found[window * 32 + row, columns[block, place]] += 1
    return found


@EVERY_DEVICE
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "large"])
def test_blocks_hold_every_edge(kind, wide, device):
    ends, num_src, num_dst = ends_of(kind)
    indptr, indices = graph_of(kind, device, wide).csr_arrays(False)
    blocks = blocks_of(indptr, indices, num_src)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in blocks)
    first, order = blocks.first.long(), blocks.order.long()
    windows, counts = -(-num_dst // 32), first.diff()
    assert order.sort().values.tolist() == list(range(windows)) and first[0] == 0
    large = counts > 4 * counts.float().mean()
    assert counts[order][: large.sum()].tolist() == sorted(counts[large].tolist(), reverse=True)
    assert order[large.sum() :].tolist() == (~large).nonzero().squeeze(1).tolist()
    assert first[-1] == len(blocks.columns) == len(blocks.bits)
    expected = torch.zeros(num_dst, num_src, dtype=torch.long)
    expected.index_put_((ends[1], ends[0]), torch.ones_like(ends[0]), accumulate=True)
    assert torch.equal(dense(blocks, num_dst, num_src), expected)
    if num_src and len(blocks.columns):
        assert blocks.columns.min() >= 0 and blocks.columns.max() < num_src


def test_a_column_is_listed_once_in_a_window():
    ends, num_src, _ = ends_of("large")
    ends = torch.unique(ends, dim=1)
    indptr, indices = Graph.from_edge_index(ends, num_src, 1000).csr_arrays(False)
    blocks = blocks_of(indptr, indices, num_src)
    pairs = torch.unique(torch.stack([ends[1] // 32, ends[0]]), dim=1).size(1)
    halves = torch.stack([blocks.bits & 0xFFFF, blocks.bits >> 16 & 0xFFFF], -1)
    listed = int((halves != 0).any(2).sum())
    assert listed == pairs < ends.size(1) / 2
    least = (torch.bincount(torch.unique(torch.stack([ends[1] // 32, ends[0]]), dim=1)[0]) + 15) // 16
    assert len(blocks.columns) == int(least.sum())


def test_columns_of_one_half_stand_in_blocks_of_their_own():
    """Of a window's columns, 40 belong to its upper half alone, 75 to the lower one, and 8 to both."""
    upper, lower, both = torch.arange(0, 40), torch.arange(40, 115), torch.arange(115, 123)
    src = torch.cat([upper, lower, both, both])
    dst = torch.cat([upper % 16, 16 + lower % 16, both % 16, 16 + both % 16]) + 32  # in the second of three windows
    indptr, indices = Graph.from_edge_index(torch.stack([src, dst]), 200, 90).csr_arrays(False)
    blocks = blocks_of(indptr, indices, 200)
    assert blocks.first.tolist() == [0, 0, 8, 8]
    halves = [tuple((bits != 0).any(0).any(1).tolist()) for bits in blocks.bits]
    assert halves == [(True, False), (False, True)] * 2 + [(False, True)] * 2 + [(True, True)] * 2
    assert sorted(blocks.columns.flatten().unique().tolist()) == list(range(123))


def near_and_far(device="cpu", num_nodes=12000, degree=160):
    """A graph whose near nodes share neighbours, and the same one shuffled."""
    draw = torch.Generator().manual_seed(0)
    dst = torch.arange(num_nodes).repeat_interleave(degree)
    src = (dst // 100 * 100 + torch.randint(300, dst.shape, generator=draw)) % num_nodes
    near = torch.unique(torch.stack([src, dst]), dim=1)
    far = torch.randperm(num_nodes, generator=draw)[near]
    return [Graph.from_edge_index(ends.to(device), num_nodes, num_nodes) for ends in (near, far)]


def test_edges_a_row_are_those_of_the_blocks():
    for graph, least, most in zip(near_and_far(), (5, 1), (30, 1.3), strict=True):
        indptr, indices = graph.csr_arrays(False)
        ratio, blocks = edges_a_row(indptr, indices, 12000), blocks_of(indptr, indices, 12000)
        assert least < ratio < most
        assert ratio == pytest.approx(graph.num_edges / blocks.columns.numel(), rel=0.1)  # but gaps
    for kind in ("no edges", "no nodes", "one edge", "sparse"):
        indptr, indices = graph_of(kind).csr_arrays(False)
        assert 0 <= edges_a_row(indptr, indices, max(ends_of(kind)[1], 1)) <= 1.1


def test_only_blocks_that_pay_are_made_unasked():
    near, far = near_and_far()
    for graph, least, made in ((near, 1.5, 1), (far, 1.5, 0), (far, 0.0, 1)):
        kept = WsbFormat()
        graph.csr_arrays(False)
        assert not kept.knows(graph, least)
        kept.learn(graph, least)
        assert kept.knows(graph, least) and kept.num_formats() == made
        kept.learn(graph, least)
        assert kept.num_formats() == made
    kept.learn(far, 1.5)
    assert kept.num_formats() == 1


def test_without_memory_for_blocks_nobody_asked_for_rowsplit_runs(monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr("edgeless.graph.wsb.blocks_of", fails)
    near, kept = near_and_far()[0], WsbFormat()
    near.csr_arrays(False)
    kept.learn(near, 1.5)
    assert kept.num_formats() == 0 and kept.knows(near, 1.5)
    with pytest.raises(torch.OutOfMemoryError):
        kept.learn(near, 0.0)


def refusals(call, inputs=()):
    with edgeless.engine("wsb"):
        return {step.refused for step in record(call, inputs)}


def test_what_is_refused_on_the_cpu():
    graph, x = graph_of("random"), torch.randn(150, 8).bfloat16()
    assert refusals(lambda: functional.spmm(graph, x)) == {"wsb: the tensors are not on a GPU"}
    assert refusals(lambda: functional.sddmm_dot(graph, x[:130], x)) == {"wsb: it computes sums and attention only"}
    assert "wsb" not in graph._formats


# On CUDA -------------------------------------------------------------------------------------------------------------


def rows(*shape, dtype=torch.bfloat16, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to("cuda", dtype).requires_grad_()


def run(engine, graph, x, **options):
    with edgeless.engine(engine):
        out = functional.spmm(graph, x, **options)
        grad = rows(*out.shape, dtype=out.dtype, seed=9).detach()
        return [out.detach(), *torch.autograd.grad(out, x, grad)]


def exact(graph, x, **options):
    leaf = x.detach().double().requires_grad_()
    options.pop("out_dtype", None)
    with edgeless.backend("reference"):
        out = functional.spmm(graph, leaf, **options)
        grad = rows(*out.shape, dtype=x.dtype, seed=9).detach().double()
        return [out, *torch.autograd.grad(out, leaf, grad)]


def check(graph, x, **options):
    assert refusals(lambda: functional.spmm(graph, x, **options), [x]) == {""}
    found, ours, expected = (
        run("wsb", graph, x, **options),
        run("rowsplit", graph, x, **options),
        exact(graph, x, **options),
    )
    for theirs, mine, right in zip(found, ours, expected, strict=True):
        assert theirs.dtype == mine.dtype and theirs.shape == mine.shape
        assert error(theirs, right) <= max(torch.finfo(x.dtype).eps, 2 * error(mine, right))


@pytest.mark.cuda
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["none", "left", "right", "both"])
@pytest.mark.parametrize("kind", ["random", "sparse", "large", "star", "one edge"])
def test_sums_and_gradients(kind, norm, dtype, wide):
    graph = graph_of(kind, "cuda", wide)
    check(graph, rows(graph.num_src, 24, dtype=dtype), norm=norm)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [8, 16, 56, 64, 72, 128, 200, 512])
def test_widths(width):
    graph = graph_of("random", "cuda")
    check(graph, rows(150, width), reduce="mean")
    x = rows(150, width)
    found, ours = (run(engine, graph, x, out_dtype=torch.float32)[0] for engine in ("wsb", "rowsplit"))
    assert found.dtype == ours.dtype == torch.float32 and error(found, exact(graph, x)[0]) <= 1e-5
    refused = refusals(lambda: functional.spmm(graph, x, out_dtype=torch.float32), [x])
    assert refused == {"", "wsb: its blocks multiply bfloat16 and float16, nothing wider"}  # the gradient is float32


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 136, 512])
def test_warps_with_windows_of_their_own(width):
    """Graphs of many windows; one of the rows is a hub, whose window is the largest by far."""
    draw = torch.Generator().manual_seed(0)
    num_nodes = 16 * 16 * 160 * 32 * 64 // width  # of more windows than a GPU of 160 multiprocessors shares
    ends = torch.randint(num_nodes - 3, (2, 200_000), generator=draw)
    ends[1, :2000] = 70
    graph = Graph.from_edge_index(ends.cuda(), num_nodes, num_nodes)
    x = rows(num_nodes, width)
    found, ours = run("wsb", graph, x, norm="left"), run("rowsplit", graph, x, norm="left")
    for theirs, mine in zip(found, ours, strict=True):
        assert error(theirs, mine.double()) <= torch.finfo(x.dtype).eps
    assert all(torch.equal(a, b) for a, b in zip(found, run("wsb", graph, x, norm="left"), strict=True))


@pytest.mark.cuda
def test_layouts():
    graph, base = graph_of("random", "cuda"), rows(150, 160).detach()
    views = [base[:, ::2], base[:, 8:72], base[:, 1:65], base.t().contiguous().t(), base[:, :1].expand(150, 16)]
    for x in views:
        check(graph, x.requires_grad_())
    check(graph, rows(150, 4, 10))
    check(graph, rows(150, 10, 4).detach().transpose(1, 2).requires_grad_())
    x = rows(150, 8)
    with edgeless.engine("wsb"):
        (grad,) = torch.autograd.grad(functional.spmm(graph, x).sum(), x)  # its gradient is expanded
    assert torch.equal(grad, graph.out_degrees().unsqueeze(1).expand(150, 8).bfloat16())


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["no edges", "no nodes"])
def test_graphs_without_edges(kind):
    graph = graph_of(kind, "cuda")
    out, grad = run("wsb", graph, rows(graph.num_src, 16))
    assert out.shape == (graph.num_dst, 16) and not out.any() and not grad.any()


@pytest.mark.cuda
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_reaches_its_neighbours_alone(value):
    graph = graph_of("random", "cuda")
    x = rows(150, 64).detach()
    x[3, 5] = x[100, 40] = value
    found, ours = (run(engine, graph, x.clone().requires_grad_())[0] for engine in ("wsb", "rowsplit"))
    assert ours.isfinite().any() and not ours.isfinite().all()
    assert torch.equal(found.isnan(), ours.isnan()) and torch.equal(found.isinf(), ours.isinf())


@pytest.mark.cuda
def test_what_is_refused():
    graph, weight = graph_of("random", "cuda"), torch.ones(2500, device="cuda").bfloat16()
    for words, call in (
        ("its blocks multiply bfloat16 and float16", lambda: functional.spmm(graph, rows(150, 8, dtype=torch.float32))),
        ("its blocks hold bits", lambda: functional.spmm(graph, rows(150, 8), weight)),
        ("rows of x are no multiple of 16 bytes", lambda: functional.spmm(graph, rows(150, 12))),
        ("it computes sums and attention only", lambda: functional.neighbor_reduce(graph, rows(150, 8), "max")),
    ):
        assert any(words in refused for refused in refusals(call)), words
        with edgeless.engine("wsb"):
            found = call()
        assert torch.equal(found, call())


@pytest.mark.cuda
@pytest.mark.parametrize("engine", ["wsb", "rowsplit"])
def test_auto_takes_blocks_where_they_pay(engine):
    graph = near_and_far("cuda")[engine == "rowsplit"]
    assert graph.num_edges >= LEAST_EDGES
    x = rows(12000, 64)
    out = functional.spmm(graph, x)
    found = [out, *torch.autograd.grad(out, x, rows(*out.shape, seed=9).detach())]
    assert all(torch.equal(a, b) for a, b in zip(found, run(engine, graph, x), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, run("auto", graph, x), strict=True))
    steps = record(lambda: functional.spmm(graph, x), [x])  # after blocks were asked for, which is no reason
    assert {(step.engine, step.refused) for step in steps} == {(engine, "")} and len(steps) == 2
    wide = rows(12000, 64, dtype=torch.float32)
    assert {step.engine for step in record(lambda: functional.spmm(graph, wide), [wide])} == {"rowsplit"}


@pytest.mark.cuda
def test_the_plan_counts_rows_that_are_read():
    graph, x = graph_of("large", "cuda"), rows(900, 64)
    with edgeless.engine("wsb"):
        (step,) = record(lambda: functional.spmm(graph, x), [])
    (ours,) = record(lambda: functional.spmm(graph, x), [])
    assert (step.engine, step.kernel, step.refused) == ("wsb", "mma m16n8k16", "")
    assert step.bytes < ours.bytes


@pytest.mark.cuda
def test_arrays_that_were_written_to_are_refused():
    graph, x = graph_of("random", "cuda"), rows(150, 8).detach()
    assert refusals(lambda: functional.spmm(graph, x)) == {""}
    graph.csr.indices.copy_(graph.csr.indices.flip(0))
    assert refusals(lambda: functional.spmm(graph, x)) == {"wsb: the graph's arrays were written to"}


@pytest.mark.cuda
def test_the_same_bits_in_every_run_and_on_another_stream():
    graph, x = graph_of("large", "cuda"), rows(900, 96)
    expected = run("wsb", graph, x, norm="both")
    torch.cuda.synchronize()
    found = on_a_late_stream(lambda late: run("wsb", graph, late, norm="both"), x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.cuda
def test_captured_in_a_cuda_graph():
    graph, x = graph_of("large", "cuda"), rows(900, 64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = run("wsb", graph, x, norm="both")
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured), edgeless.engine("wsb"):
        out = functional.spmm(graph, x, norm="both")
    captured.replay()
    assert torch.equal(out, expected[0])
    fresh = graph_of("large", "cuda")
    functional.spmm(fresh, x.detach())
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured), edgeless.engine("wsb"):
        functional.spmm(fresh, x.detach())
    assert "wsb" not in fresh._formats


@pytest.mark.cuda
def test_memory_is_counted_and_goes_with_the_graph():
    x = rows(900, 64)
    run("wsb", graph_of("large", "cuda"), x)
    gc.collect()
    before = torch.cuda.memory_allocated()
    graph = graph_of("large", "cuda")
    plain = graph.memory_bytes()
    run("wsb", graph, x)
    assert graph.memory_bytes() >= plain + sum(t.nbytes for t in graph._formats["wsb"].kept_tensors()) > plain
    del graph
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.cuda
def test_below_layers():
    pytest.importorskip("torch_geometric", reason="needs PyG")
    nn = importlib.import_module("edgeless.pyg.nn")
    torch.manual_seed(0)
    ends = ends_of("random")[0].clamp(max=129).cuda()
    for layer in (nn.GCNConv(64, 32, cached=True), nn.SAGEConv(64, 32), nn.GINConv(torch.nn.Linear(64, 32))):
        layer, x, results = layer.cuda().bfloat16(), rows(130, 64), []
        for engine in ("rowsplit", "wsb"):
            with edgeless.engine(engine):
                out = layer(x, ends)
                results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])])
                steps = edgeless.explain(layer, x, ends, plan=True).plan
            assert {step.engine for step in steps if step.op == "spmm"} == {engine}
        for ours, theirs in zip(*results, strict=True):
            assert error(theirs, ours.double()) <= 2 * torch.finfo(torch.bfloat16).eps
