"""Dot product attention over weighted sparse blocks against float64 and our own kernels; all of it on CUDA."""

import pytest
import torch
from attention_cases import error
from devices import on_a_late_stream
from test_wsb import graph_of, near_and_far, refusals, rows

import edgeless
from edgeless import Graph, functional
from edgeless.plan.recording import record

pytestmark = pytest.mark.cuda

HALVES = [torch.bfloat16, torch.float16]


def inputs(graph, heads, dim, dtype=torch.bfloat16, device="cuda"):
    sizes = graph.num_dst, graph.num_src, graph.num_src
    return [rows(n, heads, dim, dtype=dtype, seed=i).to(device) for i, n in enumerate(sizes)]


def grads_of(graph, call, leaves, dtype):
    out = call(graph, *leaves)
    grad = rows(*out.shape, dtype=dtype, seed=9).detach().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def run(engine, graph, leaves, **options):
    with edgeless.engine(engine):
        return grads_of(graph, lambda g, *qkv: functional.dot_attention(g, *qkv, **options), leaves, leaves[0].dtype)


def exact(graph, leaves, **options):
    options.pop("out_dtype", None)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    with edgeless.backend("reference"):
        return grads_of(graph, lambda g, *qkv: functional.dot_attention(g, *qkv, **options), exact, leaves[0].dtype)


def check(graph, leaves, **options):
    assert refusals(lambda: functional.dot_attention(graph, *leaves, **options), leaves) == {""}
    found, ours = (run(engine, graph, leaves, **options) for engine in ("wsb", "rowsplit"))
    for i, (theirs, mine, right) in enumerate(zip(found, ours, exact(graph, leaves, **options), strict=True)):
        assert theirs.dtype == mine.dtype and theirs.shape == mine.shape
        limit = max(torch.finfo(leaves[0].dtype).eps, 2 * error(mine, right))
        assert error(theirs, right) <= limit, (i, error(theirs, right), error(mine, right))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("kind", ["random", "sparse", "large", "star", "one edge"])
def test_attention_and_gradients(kind, dim, dtype, wide):
    graph = graph_of(kind, "cuda", wide)
    check(graph, inputs(graph, 2, dim, dtype))


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"out_dtype": torch.float32}])
def test_options(options, heads):
    graph = graph_of("random", "cuda")
    check(graph, inputs(graph, heads, 64), **options)


def test_layouts():
    graph = graph_of("random", "cuda")
    q, k, v = (t.detach() for t in inputs(graph, 2, 64))
    joined = torch.cat([k.flatten(1), v.flatten(1)], 1)
    beside = [joined[:, :128].view(-1, 2, 64), joined[:, 128:].view(-1, 2, 64)]
    odd = torch.cat([q.flatten(1), q.flatten(1)[:, :3]], 1)[:, 1:129].unflatten(1, (2, 64))
    for views in ((q, *beside), (odd, k, v), (q[:1].expand(130, 2, 64), k, v), (q, k, k)):
        check(graph, [t.requires_grad_() for t in views])
    leaves = inputs(graph, 2, 64)
    with edgeless.engine("wsb"):  # the gradient of the output is expanded
        found = torch.autograd.grad(functional.dot_attention(graph, *leaves).sum(), leaves[2])
    (expected,) = torch.autograd.grad(functional.dot_attention(graph, *leaves).sum(), leaves[2])
    assert error(found[0], expected.double()) <= 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("which", range(3))
def test_one_gradient_alone(which):
    graph = graph_of("large", "cuda")
    leaves = [t if i == which else t.detach() for i, t in enumerate(inputs(graph, 2, 128))]
    grad = rows(graph.num_dst, 2, 128, seed=9).detach()
    with edgeless.engine("wsb"):
        (found,) = torch.autograd.grad(functional.dot_attention(graph, *leaves), leaves[which], grad)
    expected = exact(graph, leaves if which else leaves)[1 + which]
    assert error(found, expected) <= 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("kind", ["no edges", "no nodes"])
def test_graphs_without_edges(kind):
    graph = graph_of(kind, "cuda")
    for engine in ("wsb", "rowsplit"):
        assert not any(t.any() for t in run(engine, graph, inputs(graph, 2, 32)))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_not_finite_reaches_its_neighbours_alone(place, value):
    graph = graph_of("random", "cuda")
    leaves = inputs(graph, 2, 64)
    with torch.no_grad():
        leaves[place][3, 1, 5] = leaves[place][100, 0, 40] = value
    found, ours = run("wsb", graph, leaves), run("rowsplit", graph, leaves)
    for theirs, mine in zip(found, ours, strict=True):
        assert mine.isfinite().any() and torch.equal(theirs.isfinite(), mine.isfinite())
        both = mine.isfinite()
        assert error(theirs[both], mine[both].double()) <= 4 * torch.finfo(torch.bfloat16).eps
    assert not all(t.isfinite().all() for t in ours)


def test_logits_of_any_size():
    graph = graph_of("random", "cuda")
    for scale in (0.0, 1e-3, 30.0, 1000.0):
        leaves = inputs(graph, 2, 64)
        found, expected = run("wsb", graph, leaves, scale=scale), run("rowsplit", graph, leaves, scale=scale)
        for theirs, mine in zip(found, expected, strict=True):
            assert theirs.isfinite().all()
            assert error(theirs, mine.double()) <= 8 * torch.finfo(torch.bfloat16).eps


def test_what_is_refused():
    graph = graph_of("random", "cuda")
    q, k, v = inputs(graph, 2, 64)
    by_edge = torch.rand(graph.num_edges, device="cuda")
    dot = functional.dot_attention
    for words, call in (
        ("its blocks multiply bfloat16 and float16", lambda: dot(graph, q.float(), k.float(), v.float())),
        ("its blocks hold bits", lambda: dot(graph, q, k, v, edge_scale=by_edge)),
        ("its blocks hold bits", lambda: dot(graph, q, k, v, dropout=0.5, seed=3)),
        ("it has kernels for heads of 32, 64 and 128", lambda: dot(graph, q[..., :48], k[..., :48], v)),
        ("it has kernels for heads of 32, 64 and 128", lambda: dot(graph, q, k, v[..., :32])),
        (
            "of attention it computes that of the dot product",
            lambda: functional.gatv2_attention(graph, k, q, torch.ones(2, 64, device="cuda").bfloat16()),
        ),
    ):
        assert any(words in refused for refused in refusals(call)), words
        with edgeless.engine("wsb"):
            found = call()
        assert torch.equal(found, call())
    refused = refusals(lambda: dot(graph, q, k, v, return_weights="softmax")[1], [q])
    assert "wsb: it has no gradient of returned weights" in refused


@pytest.mark.parametrize("engine", ["wsb", "rowsplit"])
def test_auto_takes_blocks_where_they_pay(engine):
    graph = near_and_far("cuda")[engine == "rowsplit"]
    leaves = inputs(graph, 1, 32)
    found = run("auto", graph, leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, run(engine, graph, leaves), strict=True))
    steps = record(lambda: functional.dot_attention(graph, *leaves), leaves)
    assert {(step.engine, step.refused) for step in steps} == {(engine, "")} and len(steps) == 3
    if engine == "wsb":
        assert {step.kernel for step in steps} == {"mma m16n8k16"}
        with edgeless.engine("rowsplit"):
            edges = record(lambda: functional.dot_attention(graph, *leaves), leaves)
        assert all(mine.bytes < theirs.bytes for mine, theirs in zip(steps, edges, strict=True))


def test_a_layer_of_one_op():
    from edgeless.functional.layer import attention_layer

    graph = near_and_far("cuda")[0]
    torch.manual_seed(0)
    maps = [torch.nn.Linear(32, 64).cuda() for _ in range(3)]
    x = torch.randn(graph.num_src, 32, device="cuda", requires_grad=True)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            out = attention_layer(graph, "dot", x, maps, heads=2, coefficient=0.2)
        leaves = [x, *(m.weight for m in maps), maps[0].bias, maps[2].bias]  # the keys' bias changes no weight
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    steps = record(step, [])
    assert {s.engine for s in steps if s.op.startswith("attention")} == {"wsb"}
    with edgeless.engine("rowsplit"):
        expected = step()
    for theirs, mine in zip(step(), expected, strict=True):
        assert error(theirs, mine.double()) <= 4 * torch.finfo(torch.bfloat16).eps


def test_gradients_in_the_place_of_rows_that_are_not_finite():
    """A layer's backward writes over its own rows; what is made anew by edges must have read them before."""
    from edgeless.functional.layer import attention_layer

    graph = near_and_far("cuda")[0]
    torch.manual_seed(0)
    maps = [torch.nn.Linear(32, 64).cuda() for _ in range(3)]
    x = torch.randn(graph.num_src, 32, device="cuda")
    x[4000] = 3e38
    x.requires_grad_()
    grads = []
    for engine in ("wsb", "rowsplit"):
        with edgeless.engine(engine):
            with torch.autocast("cuda", torch.bfloat16):
                out = attention_layer(graph, "dot", x, maps, heads=2, coefficient=0.2)
            grads.append(torch.autograd.grad(out.sum(), x)[0])
    found, expected = grads
    right = expected.isfinite()
    assert torch.equal(found.isfinite(), right) and right.any() and not right.all()
    assert error(found[right], expected[right].double()) <= 4 * torch.finfo(torch.bfloat16).eps


def test_the_same_bits_in_every_run_and_on_another_stream():
    graph = graph_of("large", "cuda")
    leaves = inputs(graph, 4, 64)
    expected = run("wsb", graph, leaves)
    torch.cuda.synchronize()
    found = on_a_late_stream(lambda late: run("wsb", graph, [leaves[0], late, leaves[2]]), leaves[1])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_captured_in_a_cuda_graph():
    graph = graph_of("large", "cuda")
    leaves, grad = inputs(graph, 2, 128), rows(graph.num_dst, 2, 128, seed=9).detach()

    def step():
        with edgeless.engine("wsb"):
            out = functional.dot_attention(graph, *leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step()
    for _ in range(2):
        captured.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_hub_among_many_windows():
    draw = torch.Generator().manual_seed(0)
    ends = torch.randint(40_000, (2, 400_000), generator=draw)
    ends[1, :3000] = 70
    ends[0, 5000:8000] = 90
    graph = Graph.from_edge_index(ends.cuda(), 40_000, 40_010)
    leaves = inputs(graph, 2, 32)
    for theirs, mine in zip(run("wsb", graph, leaves), run("rowsplit", graph, leaves), strict=True):
        assert error(theirs, mine.double()) <= 2 * torch.finfo(torch.bfloat16).eps
