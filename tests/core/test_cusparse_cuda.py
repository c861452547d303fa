"""cuSPARSE as an engine: against float64 and against our own kernels, what it keeps with a graph, streams, captures."""

import gc
import importlib

import pytest
import torch
from attention_cases import error
from devices import on_a_late_stream

import edgeless
from edgeless import Graph, functional
from edgeless.choices import engines
from edgeless.plan.recording import record

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def random_graph(num_src=60, num_dst=50, edges=400, wide=False, seed=0):
    """Bipartite, with multi-edges, isolated nodes on both sides and one hub."""
    draw = torch.Generator().manual_seed(seed)
    src = torch.randint(num_src - 5, (edges,), generator=draw)
    dst = torch.randint(num_dst - 5, (edges,), generator=draw)
    dst[::3] = 7
    if not wide:
        return Graph.from_edge_index(torch.stack([src, dst]).to(DEVICE), num_src, num_dst)
    graph = Graph.from_edge_index(torch.stack([src, dst]), num_src, num_dst)
    csr, csc = (
        type(side)(*[None if t is None else t.long().to(DEVICE) for t in side]) for side in (graph.csr, graph.csc)
    )
    return Graph(csr, csc, num_src, num_dst)


def rows(*shape, dtype=torch.float32, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=draw).to(DEVICE, dtype).requires_grad_()


def run(engine, graph, x, weight=None, **options):
    """Output and gradients, on an engine that must not refuse."""
    leaves = [t for t in (x, weight) if t is not None]
    with edgeless.engine(engine):
        out = functional.spmm(graph, x, weight, **options)
        grad = rows(*out.shape, dtype=out.dtype, seed=9).detach()
        found = [out, *torch.autograd.grad(out, leaves, grad)]
    return [t.detach() for t in found]


def exact(graph, x, weight=None, **options):
    leaves = [t.detach().double().requires_grad_() for t in (x, weight) if t is not None]
    with edgeless.backend("reference"):
        out = functional.spmm(graph, *leaves, **options)
        kind = torch.promote_types(x.dtype, x.dtype if weight is None else weight.dtype)
        grad = rows(*out.shape, dtype=options.get("out_dtype") or kind, seed=9).detach().double()
        return [out, *torch.autograd.grad(out, leaves, grad)]


def refusals(engine, call, inputs=()):
    with edgeless.engine(engine):
        return [step.refused for step in record(call, inputs)]


def check(engine, graph, x, weight=None, **options):
    expected = exact(graph, x, weight, **{k: v for k, v in options.items() if k != "out_dtype"})
    ours, found = run("rowsplit", graph, x, weight, **options), run(engine, graph, x, weight, **options)
    limit = TOLERANCE[x.dtype]
    for theirs, mine, right in zip(found, ours, expected, strict=True):
        assert theirs.dtype == mine.dtype and theirs.shape == mine.shape
        assert error(theirs, right) <= max(limit, 2 * error(mine, right))


@pytest.mark.parametrize("engine", ["cusparse", "cusparse-alg2"])
@pytest.mark.parametrize("norm", ["none", "left", "right", "both"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wide", [False, True])
def test_sums_and_gradients(engine, norm, dtype, wide):
    graph = random_graph(wide=wide)
    assert graph.index_dtype == (torch.int64 if wide else torch.int32)
    x, weight = rows(60, 24, dtype=dtype), rows(400, dtype=dtype, seed=2)
    check(engine, graph, x, norm=norm)
    check(engine, graph, x, weight, norm=norm)
    assert engines.cusparse_info(graph)["plans"] >= 2
    assert not any(refusals(engine, lambda: functional.spmm(graph, x, norm=norm), [x]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 16, 31, 64, 100, 129, 256, 512])
def test_widths(width, dtype):
    check("cusparse", random_graph(), rows(60, width, dtype=dtype), norm="both", reduce="mean")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bit_rows_in_float32(dtype):
    check("cusparse", random_graph(), rows(60, 24, dtype=dtype), norm="right", out_dtype=torch.float32)


def test_layouts():
    graph = random_graph()
    base = rows(60, 80).detach()
    for x in (base[:, ::2], base[:, 1:33], base.t().contiguous().t(), base[:, :1].expand(60, 16), base[:, 5:6]):
        check("cusparse", graph, x.requires_grad_())
    heads = rows(60, 4, 10)
    check("cusparse", graph, heads)
    check("cusparse", graph, heads, rows(400, seed=3))
    check("cusparse", graph, rows(60, 10, 4).detach().transpose(1, 2).requires_grad_())
    x = rows(60, 8)
    with edgeless.engine("cusparse"):
        (grad,) = torch.autograd.grad(functional.spmm(graph, x).sum(), x)  # its gradient is expanded
    assert torch.equal(grad, graph.out_degrees().unsqueeze(1).expand(60, 8).float())


def test_a_hub_and_no_edges():
    hub = Graph.from_edge_index(torch.stack([torch.arange(20_000), torch.zeros(20_000, dtype=torch.long)]).to(DEVICE))
    check("cusparse", hub, rows(20_000, 32), norm="both")
    graph = Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.long, device=DEVICE), 5, 6)
    check("cusparse", graph, rows(5, 8))
    assert refusals("cusparse", lambda: functional.spmm(graph, rows(5, 8))) == [""]
    empty = Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.long, device=DEVICE), 5, 6)
    assert refusals("cusparse", lambda: functional.spmm(empty, rows(5, 8)))[0] == "cusparse: there are no edges"
    assert not any(t.any() for t in run("cusparse", empty, rows(5, 8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampled_products(dtype):
    graph = random_graph()
    dst, src = rows(50, 24, dtype=dtype), rows(60, 24, dtype=dtype, seed=2)
    results = []
    for engine in ("rowsplit", "cusparse"):
        with edgeless.engine(engine):
            out = functional.sddmm_dot(graph, dst, src)
            results.append([out, *torch.autograd.grad(out.square().sum(), [dst, src])])
    for ours, theirs in zip(*results, strict=True):
        assert error(theirs, ours.double()) < TOLERANCE[dtype]
    assert refusals("cusparse", lambda: functional.sddmm_dot(graph, dst, src))[0] == ""


@pytest.mark.parametrize(
    "words,call",
    [
        ("edge weights differ from head to head", lambda g: functional.spmm(g, rows(60, 2, 8), rows(400, 2))),
        ("sampled products of several heads", lambda g: functional.sddmm_dot(g, rows(50, 2, 8), rows(60, 2, 8))),
        (
            "sampled products of rows that are not float32 or float64",
            lambda g: functional.sddmm_dot(g, rows(50, 8).bfloat16(), rows(60, 8).bfloat16()),
        ),
        ("sums and sampled products only", lambda g: functional.neighbor_reduce(g, rows(60, 8), "max")),
        (
            "sums and sampled products only",
            lambda g: functional.dot_attention(g, rows(50, 2, 8), *[rows(60, 2, 8)] * 2),
        ),
    ],
)
def test_what_it_does_not_compute_runs_on_rowsplit(words, call):
    graph = random_graph()
    assert any(words in refused for refused in refusals("cusparse", lambda: call(graph)))
    with edgeless.engine("cusparse"):
        found = call(graph)
    with edgeless.engine("rowsplit"):
        assert torch.equal(found, call(graph))


def test_arrays_of_no_graph_run_on_rowsplit():
    graph, x = random_graph(), rows(60, 8).detach()
    arrays = [t.clone() for t in graph.csr_arrays(False)]
    found = []
    for engine in ("rowsplit", "cusparse"):
        with edgeless.engine(engine):
            found.append(torch.ops.edgeless.spmm(x, None, None, None, arrays, [], None))
    assert torch.equal(*found)


def test_arrays_with_room_for_more_edges_are_refused():
    graph = random_graph()
    indices = torch.cat([graph.csr.indices, graph.csr.indices.new_zeros(10)])
    roomy = Graph(type(graph.csr)(graph.csr.indptr, indices, None), None, 60, 50)
    x = rows(60, 8).detach()
    assert refusals("cusparse", lambda: functional.spmm(roomy, x)) == [
        "cusparse: the graph's arrays have room for more edges than it has"
    ]


def test_the_same_bits_in_every_run():
    draw = torch.Generator().manual_seed(0)
    ends = torch.randint(3000, (2, 200_000), generator=draw)
    ends[1, ::4] = 5
    x, weight = rows(3000, 96), rows(200_000, seed=3)
    found = []
    for _ in range(2):
        graph = Graph.from_edge_index(ends.to(DEVICE), 3000, 3000)
        found += [run("cusparse", graph, x, weight, norm="both") for _ in range(2)]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# What is kept --------------------------------------------------------------------------------------------------------


def test_a_second_call_finds_its_plan():
    graph, x = random_graph(), rows(60, 16)
    run("cusparse", graph, x, norm="both")
    before = engines.cusparse_info(graph)
    run("cusparse", graph, x, norm="both")
    after = engines.cusparse_info(graph)
    assert after["misses"] == before["misses"] and after["hits"] == before["hits"] + 2
    assert (after["plans"], after["values"]) == (2, 2)


def test_plans_are_capped_and_weighed():
    graph = random_graph()
    for width in range(1, 60):
        run("cusparse", graph, rows(60, width), norm=("none", "left", "right", "both")[width % 4])
    info = engines.cusparse_info(graph)
    assert info["plans"] == 16 and info["values"] == 8
    kept = graph._formats["cusparse"].kept_tensors()
    assert graph.memory_bytes() >= sum(t.nbytes for t in kept) > 0
    check("cusparse", graph, rows(60, 3), norm="both")


def test_memory_goes_with_the_graph():
    torch.cuda.synchronize()
    x = rows(60, 16)
    run("cusparse", random_graph(), x, norm="both")  # the library's own
    gc.collect()
    before = torch.cuda.memory_allocated()
    graph = random_graph()
    run("cusparse", graph, x, norm="both")
    assert torch.cuda.memory_allocated() > before
    del graph
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_clearing_the_cache_clears_plans():
    pytest.importorskip("torch_geometric", reason="needs PyG")
    nn = importlib.import_module("edgeless.pyg.nn")
    edgeless.clear_cache()
    edge_index = torch.randint(50, (2, 300), device=DEVICE)
    layer, x = nn.GraphConv(8, 4).to(DEVICE), rows(50, 8)
    layer(x, edge_index)
    plain = edgeless.cache_info().bytes
    for _ in range(2):
        with edgeless.engine("cusparse"):
            layer(x, edge_index).sum().backward()
    assert edgeless.cache_info().bytes > plain
    edgeless.clear_cache()
    assert edgeless.cache_info().bytes == 0


def test_edited_weights_and_scales_are_read_anew():
    graph, x = random_graph(), rows(60, 16)
    weight, scale = rows(400, seed=2), rows(60, seed=4).detach()
    for edit in (lambda t: t, lambda t: t.mul_(2), lambda t: t.data.add_(1), lambda t: t.zero_()):
        with torch.no_grad():
            edit(weight), edit(scale)
        found = run("cusparse", graph, x, weight, src_scale=scale)[0]
        assert error(found, exact(graph, x, weight, src_scale=scale)[0]) < 1e-5 or not weight.any() and not found.any()


# Streams, captures, compiled programs --------------------------------------------------------------------------------


def test_runs_on_the_current_stream():
    graph, x = random_graph(), rows(60, 40)
    expected = run("cusparse", graph, x, norm="both")
    torch.cuda.synchronize()
    found = on_a_late_stream(lambda late: run("cusparse", graph, late, norm="both"), x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert engines.cusparse_info(graph)["plans"] == 4  # two for each stream


def test_no_host_sync_but_in_the_first_call():
    graph, x = random_graph(), rows(60, 40)
    run("cusparse", graph, x, norm="both")
    grad = rows(50, 40, seed=9).detach()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with edgeless.engine("cusparse"):
            torch.autograd.grad(functional.spmm(graph, x, norm="both"), x, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Sums of float32 are captured on rowsplit: cuSPARSE waits for the GPU in them, where rows are many.
@pytest.mark.parametrize("num_rows", [50, 50_000])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "captured_on"), [(torch.float32, "rowsplit"), (torch.bfloat16, "cusparse")])
def test_captured_in_a_cuda_graph(dtype, captured_on, weighted, num_rows):
    graph, x = random_graph(num_rows + 10, num_rows, 8 * num_rows), rows(num_rows + 10, 40, dtype=dtype)
    weight = rows(8 * num_rows, dtype=dtype, seed=2) if weighted else None
    grad = rows(num_rows, 40, dtype=dtype, seed=9).detach()
    leaves = [x] if weight is None else [x, weight]

    def step(engine="cusparse"):
        with edgeless.engine(engine):
            out = functional.spmm(graph, x, weight, norm="both")
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [*step(captured_on)[:2], *step()[2:]]  # products of rows by edge can be captured
    torch.cuda.current_stream().wait_stream(side)
    before = engines.cusparse_info(graph)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step()
    assert engines.cusparse_info(graph) == before  # nothing that a replay needs can be dropped
    del graph._formats["cusparse"]
    graph._graphs.clear()
    gc.collect()
    for t in found:
        t.fill_(float("nan"))
    captured.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_first_used_in_a_capture_it_runs_on_rowsplit():
    graph, x = random_graph(), rows(60, 8).detach()
    expected = functional.spmm(graph, x)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured), edgeless.engine("cusparse"):
        found = functional.spmm(graph, x)
    captured.replay()
    assert torch.equal(found, expected) and engines.cusparse_info(graph) is None


def test_below_every_layer_and_compiled():
    pytest.importorskip("torch_geometric", reason="needs PyG")
    nn = importlib.import_module("edgeless.pyg.nn")
    edge_index = torch.randint(50, (2, 300), device=DEVICE)
    for layer in (nn.GCNConv(8, 4), nn.SAGEConv(8, 4), nn.GraphConv(8, 4), nn.GINConv(torch.nn.Linear(8, 4))):
        layer, x = layer.to(DEVICE), rows(50, 8)
        results = []
        for engine in ("rowsplit", "cusparse"):
            with edgeless.engine(engine):
                out = layer(x, edge_index)
                results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
                steps = edgeless.explain(layer, x, edge_index, plan=True).plan
            assert {step.engine for step in steps if step.op == "spmm"} == {engine}
        for ours, theirs in zip(*results, strict=True):
            assert error(theirs, ours.double()) < 1e-5
    graph, x = random_graph(), rows(60, 8)
    expected = run("cusparse", graph, x)
    torch._dynamo.reset()
    compiled = torch.compile(functional.spmm, fullgraph=True, backend="aot_eager")
    with edgeless.engine("cusparse"):
        assert error(compiled(graph, x), expected[0].double()) < 1e-6
