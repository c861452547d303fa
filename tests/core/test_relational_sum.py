"""relational_sum against plain PyTorch: graphs, relations, widths, dtypes, gradients, determinism, bad input."""

import pytest
import torch
from attention_cases import GRAPHS, assert_close, error, graph_of
from test_typed_mm import device, leaf, on_cpu  # noqa: F401  device: where all tensors here are made

import edgeless
from edgeless import Graph, TypedGraph, functional
from edgeless.functional import relational
from edgeless.functional.relational import choose_order

SHAPES = [(5, 7), (64, 64), (33, 16), (16, 130), (1, 1)]


def typed(kind, num_types=5, dtype=torch.int32):
    with torch.device("cpu"):
        graph = graph_of(kind, dtype)
        types = torch.randint(max(num_types - 1, 1), (graph.num_edges,), generator=torch.Generator().manual_seed(3))
    where = torch.get_default_device()
    return TypedGraph(graph.to(where), types.to(where), num_types)


def both_ways(graph, x, weight, edge_weight=None, **options):
    results = []
    leaves = [t for t in (x, weight, edge_weight) if t is not None]
    for name in ("fused", "reference"):
        with edgeless.backend(name):
            out = functional.relational_sum(graph, x, weight, edge_weight, **options)
        grad = leaf(*out.shape, dtype=out.dtype, seed=9).detach()
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    return results


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_graph(kind, reduce, weighted):
    for dtype in (torch.int32, torch.int64):
        graph = typed(kind, dtype=dtype)
        edge_weight = leaf(graph.num_edges, seed=4) if weighted else None
        found, expected = both_ways(graph, leaf(graph.num_src, 20), leaf(5, 20, 12), edge_weight, reduce=reduce)
        assert_close(found, expected, 1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_every_width(shape, dtype, tolerance):
    graph = typed("hub")
    x, weight = leaf(graph.num_src, shape[0], dtype=dtype), leaf(5, *shape, dtype=dtype, seed=1)
    for edge_weight in (None, leaf(graph.num_edges, dtype=dtype, seed=2)):
        found, _ = both_ways(graph, x, weight, edge_weight)
        # plain float32 is off by more than the tolerance at the hub, whose edges it adds one by one
        wide = (t if t is None else t.detach().double().requires_grad_() for t in (x, weight, edge_weight))
        _, expected = both_ways(graph, *wide)
        assert_close(found, [t.to(dtype) for t in expected], tolerance)


@pytest.mark.parametrize("kind", GRAPHS)
def test_both_orders_are_the_same_sum(kind):
    graph = typed(kind)
    x, weight, edge_weight = leaf(graph.num_src, 20), leaf(5, 20, 12), leaf(graph.num_edges, seed=4)
    for reduce in ("sum", "mean"):
        for given in (None, edge_weight):
            found, expected = (
                both_ways(graph, x, weight, given, reduce=reduce, order=order)[0]
                for order in ("transform", "aggregate")
            )
            assert_close(found, expected, 1e-10)


@pytest.mark.parametrize("wanted", ["aggregate", "transform"])
def test_the_order_is_chosen_without_pairs_that_only_one_needs(wanted):
    """Edges of few pairs at their destinations are summed first, those of few pairs at their sources multiplied."""
    many, few = torch.arange(1000), torch.arange(1000) % 5
    edges = Graph.from_edge_index(torch.stack((many, few) if wanted == "aggregate" else (few, many)), 1000, 1000)
    graph = TypedGraph(edges, torch.zeros(1000, dtype=torch.int64), 1)
    x, w = leaf(1000, 128), leaf(1, 128, 8, seed=1)
    found = functional.relational_sum(graph, x, w)
    assert ("compact" in graph._formats) == (wanted == "transform")
    assert_close([found], [functional.spmm(edges, x @ w[0])], 1e-12)


@on_cpu
@pytest.mark.parametrize("sizes,order", [
    ((620_000, 462_000, 486_000, 64, 64), "aggregate"),
    ((620_000, 462_000, 486_000, 256, 16), "transform"),
    ((672_000, 223_000, 227_000, 256, 16), "transform"),
    ((672_000, 223_000, 227_000, 16, 256), "aggregate"),
    ((4_800_000, 4_000_000, 860_000, 64, 64), "transform"),  # few pairs of sources, many of destinations
    ((4_800_000, 860_000, 4_000_000, 64, 64), "aggregate"),
    ((0, 0, 0, 64, 64), "aggregate"),
])  # fmt: skip
def test_the_order_that_moves_less_is_chosen(sizes, order):
    assert choose_order(*sizes) == order


@on_cpu
def test_two_passes_multiply_first_unless_that_has_many_more_rows():
    assert choose_order(620_000, 462_000, 486_000, 64, 64, one_pass=False) == "transform"
    assert choose_order(620_000, 200_000, 600_000, 64, 64, one_pass=False) == "aggregate"


@on_cpu
def test_fused_sums_come_first_unless_rows_are_wide_and_pairs_few():
    fused = {"one_pass": False, "fused": True}
    assert choose_order(5_700_000, 3_460_000, 3_460_000, 64, 64, **fused) == "aggregate"
    assert choose_order(4_800_000, 860_000, 860_000, 128, 16, **fused) == "transform"
    assert choose_order(4_800_000, 860_000, 860_000, 16, 128, **fused) == "aggregate"


def test_hubs():
    """Segments of which a row has many, and far more edges than a segment."""
    gen = torch.Generator("cpu").manual_seed(0)
    ends = [torch.randint(n, (30_000,), generator=gen, device="cpu") for n in (300, 4)]
    edge_index = torch.stack(ends)
    edge_index[1, :20_000] = 2
    where = torch.get_default_device()
    for num_types in (1, 3):
        types = torch.randint(num_types, (30_000,), generator=gen, device="cpu").to(where)
        for ends in (edge_index, edge_index.flip(0)):
            graph = TypedGraph.from_edge_index(ends.to(where), types, num_types, 300, 300)
            x, weight = leaf(300, 16), leaf(num_types, 16, 24)
            assert_close(*both_ways(graph, x, weight, leaf(30_000, seed=2)), 1e-10)


@on_cpu
def test_the_order_follows_the_widths():
    graph = typed("hub")
    for shape, compact in (((64, 64), False), ((8, 64), False), ((128, 4), True)):
        functional.relational_sum(graph, leaf(graph.num_src, shape[0]), leaf(5, *shape))
        assert ("compact" in graph._formats) == compact


@pytest.mark.parametrize("blocks,k,m", [(1, 8, 8), (3, 4, 5), (8, 8, 16), (5, 1, 1)])
def test_block_diagonal_weights(blocks, k, m):
    graph = typed("hub")
    x, weight = leaf(graph.num_src, blocks * k), leaf(5, blocks, k, m)
    assert_close(*both_ways(graph, x, weight, leaf(graph.num_edges), reduce="mean"), 1e-10)


@pytest.mark.parametrize("num_types", [1, 2, 300])
def test_numbers_of_relations(num_types):
    graph = typed("square", num_types)
    assert_close(*both_ways(graph, leaf(graph.num_src, 20), leaf(num_types, 20, 12)), 1e-10)


@on_cpu
def test_hubs_are_cut_into_parts():
    gen = torch.Generator().manual_seed(0)
    edge_index = torch.stack((torch.randint(300, (30_000,), generator=gen), torch.randint(4, (30_000,), generator=gen)))
    edge_index[1, :20_000] = 2
    for num_types in (1, 3):
        types = torch.randint(num_types, (30_000,), generator=gen)
        graph = TypedGraph.from_edge_index(edge_index, types, num_types, 300, 5)
        assert bool(graph.by_dst[5][:, 1].any())  # or nothing here is tested
        x, weight = leaf(300, 16), leaf(num_types, 16, 24)
        assert_close(*both_ways(graph, x, weight, leaf(30_000, seed=2)), 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_torch(dtype):
    graph = typed("hub")
    x, weight = leaf(graph.num_src, 33, dtype=dtype), leaf(5, 33, 20, dtype=dtype, seed=1)
    src, dst = graph.graph.edge_index()

    def plain(x, weight):
        messages = torch.bmm(x[src].unsqueeze(1), weight[graph.edge_type]).squeeze(1)
        out = messages.new_zeros(graph.num_dst, 20).index_add(0, dst, messages)
        return [out, *torch.autograd.grad(out, [x, weight], torch.ones_like(out))]

    out = functional.relational_sum(graph, x, weight)
    assert out.dtype == dtype
    found = [out, *torch.autograd.grad(out, [x, weight], torch.ones_like(out))]
    exact = plain(*(t.detach().double().requires_grad_() for t in (x, weight)))
    for a, b, c in zip(found, plain(x, weight), exact, strict=True):
        assert error(a, c) <= 2 * error(b, c)
    assert functional.relational_sum(graph, x, weight, out_dtype=torch.float32).dtype == torch.float32
    assert functional.relational_sum(graph, x, weight, out_dtype=torch.float64).dtype == torch.float64


def test_gradcheck():
    graph = TypedGraph.from_edge_index(
        torch.tensor([[0, 1, 2, 2, 3, 3, 0], [0, 0, 1, 2, 2, 2, 0]]), torch.tensor([0, 1, 0, 2, 2, 0, 0]), 4, 5, 4
    )
    for reduce in ("sum", "mean"):

        def layer(x, weight, edge_weight, reduce=reduce):
            return functional.relational_sum(graph, x, weight, edge_weight, reduce=reduce)

        assert torch.autograd.gradcheck(layer, [leaf(5, 4), leaf(4, 4, 3), leaf(7)])
        assert torch.autograd.gradcheck(layer, [leaf(5, 4), leaf(4, 2, 2, 3), leaf(7)])


def test_nothing_of_the_size_of_the_edges_is_saved():
    graph = typed("square")
    x, weight = leaf(graph.num_src, 20), leaf(5, 20, 12)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.relational_sum(graph, x, weight)
    floating = [t for t in saved if t.is_floating_point()]
    assert {tuple(t.shape) for t in floating} == {tuple(x.shape), tuple(weight.shape)}


def test_batches_of_gradients():
    graph = typed("square")
    x, weight = leaf(graph.num_src, 8), leaf(5, 8, 6)
    out = functional.relational_sum(graph, x, weight)
    batch = torch.randn(3, *out.shape, dtype=torch.float64)
    found = torch.autograd.grad(out, [x, weight], batch, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(batch):
        one = torch.autograd.grad(out, [x, weight], grad, retain_graph=True)
        assert all(torch.equal(a[i], b) for a, b in zip(found, one, strict=True))


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
def test_opcheck():
    graph = typed("bipartite")
    ops = torch.ops.edgeless
    x, weight, edge_weight = leaf(graph.num_src, 8), leaf(5, 8, 6), leaf(graph.num_edges)
    both = (graph.by_dst, graph.by_src)
    torch.library.opcheck(ops.relational_sum, (x, weight, edge_weight, *both, graph.num_dst, None))
    torch.library.opcheck(ops.relational_sum, (x, leaf(5, 2, 4, 3), None, *both, graph.num_dst, None))
    halves = (x.detach().bfloat16(), weight.detach().bfloat16(), None)
    torch.library.opcheck(ops.relational_sum, (*halves, graph.by_dst, [], graph.num_dst, torch.float32))
    grad = leaf(graph.num_dst, 6).detach()
    given = [t.detach() for t in (grad, x, weight, edge_weight)]
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(ops.relational_sum_backward, (*given, *both, needs))


def test_compiles_whole():
    graph = typed("square")
    x, weight = leaf(graph.num_src, 12), leaf(5, 12, 8)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *a: functional.relational_sum(*a, reduce="mean"), fullgraph=True, backend="aot_eager"
    )
    out, expected = compiled(graph, x, weight), functional.relational_sum(graph, x, weight, reduce="mean")
    assert_close([out], [expected], 1e-12)
    assert_close(*[torch.autograd.grad(o.square().sum(), [x, weight]) for o in (out, expected)], 1e-12)


@on_cpu
@pytest.mark.parametrize("args,kwargs,kind,message", [
    ((torch.zeros(49, 3), torch.zeros(5, 3, 4)), {}, ValueError, r"x must have shape \[Ns, K\] = \[50, 3\], got \[49"),
    ((torch.zeros(50, 3), torch.zeros(4, 3, 4)), {}, ValueError, r"weight must have shape \[R, K, M\] or .* = \[5, "),
    ((torch.zeros(50, 4), torch.zeros(5, 2, 3, 2)), {}, ValueError, r"x must have shape \[Ns, K\] = \[50, 6\]"),
    ((torch.zeros(50, 3), torch.zeros(5, 3, 4), torch.zeros(9)), {}, ValueError, r"edge_weight must have shape \[E\]"),
    ((torch.zeros(50, 3), torch.zeros(5, 3, 4)), {"reduce": "max"}, ValueError, "reduce must be one of 'sum', 'mean'"),
    ((torch.zeros(50, 3), torch.zeros(5, 3, 4)), {"order": "first"}, ValueError, "order must be one of 'aggregate', "),
    ((torch.zeros(50, 3, device="meta"), torch.zeros(5, 3, 4)), {}, ValueError, "x must be on the graph's device cpu"),
    ((torch.zeros(50, 3), torch.zeros(5, 3, 4)), {"out_dtype": torch.int64}, ValueError, "out_dtype must be"),
])  # fmt: skip
def test_bad_input_is_named(args, kwargs, kind, message):
    with pytest.raises(kind, match=f"relational_sum: {message}"):
        functional.relational_sum(typed("bipartite"), *args, **kwargs)


@on_cpu
def test_an_untyped_graph_is_named():
    with pytest.raises(TypeError, match="relational_sum: graph must be an edgeless.TypedGraph, got Graph"):
        functional.relational_sum(graph_of("square"), torch.zeros(40, 3), torch.zeros(5, 3, 4))


def test_blocks_as_whole_matrices(monkeypatch):
    """Where kernels for whole matrices would take them and edges are many; gradients come back as blocks."""
    weight = leaf(3, 4, 5, 6, dtype=torch.float64, seed=1)
    graph = typed("square", num_types=3)
    monkeypatch.setattr(relational, "fuses_widths", lambda *_: True)
    assert relational.whole_matrices(graph, weight, torch.float64) is weight
    monkeypatch.setattr(relational, "_MANY_EDGES", graph.num_edges)
    whole = relational.whole_matrices(graph, weight, torch.float64)
    assert torch.equal(whole, torch.stack([torch.block_diag(*blocks) for blocks in weight]))
    (grad,) = torch.autograd.grad(whole, weight, whole.detach())
    assert torch.equal(grad, weight.detach())
    monkeypatch.setattr(relational, "fuses_widths", lambda *_: False)
    assert relational.whole_matrices(graph, weight, torch.float64) is weight


def test_blocks_of_graphs_whose_edges_are_pairs_stay_blocks(monkeypatch):
    """No sum is multiplied there, so whole matrices would only be more products."""
    pairs = typed("square", num_types=3).compact.pairs
    none = pairs.by_dst[2].new_empty(0)
    monkeypatch.setattr(TypedGraph, "by_dst", property(lambda _: [none] * 6))
    monkeypatch.setattr(relational, "fuses_widths", lambda *_: True)
    monkeypatch.setattr(relational, "_MANY_EDGES", 0)
    weight = leaf(3, 2, 2, 2, seed=1)
    assert relational.whole_matrices(pairs, weight, torch.float32) is weight
