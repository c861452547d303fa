"""Sums over relations on CUDA whose products are made while the sums are kept: widths, hubs, empty relations and
rows, infinities, and what falls back to kernels of one thing each.
"""

import pytest
import torch
from attention_cases import assert_close, error
from devices import EVERY_WAY, assert_same_bits, poison
from test_relational_layer import parts

import edgeless
from edgeless import TypedGraph, functional
from edgeless.choices.backends import kernel_refusal
from edgeless.functional import relational
from edgeless.functional.relational_layer import relational_layer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        kernel_refusal(torch.device("cuda"), "relational_sum") is not None, reason="has no kernels of its own"
    ),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def graph_of(num_src=90, num_dst=130, num_edges=1500, num_types=5, hub=0, dtype=torch.int32):
    """Relation ``num_types - 1`` and the last three destinations have no edges; ``hub`` edges have one destination and
    one type, and as many one source.
    """
    gen = torch.Generator().manual_seed(0)
    draw = (torch.randint(n, (num_edges,), generator=gen) for n in (num_src, num_dst - 3, max(num_types - 1, 1)))
    src, dst, types = draw
    dst[:hub], types[:hub] = 1, 0
    src[hub : 2 * hub] = 2
    src[-40:], dst[-40:], types[-40:] = 5, 6, 0  # one edge many times
    edges = torch.stack([src, dst]).to("cuda", dtype)
    return TypedGraph.from_edge_index(edges, types.to("cuda", dtype), num_types, num_src, num_dst)


def leaf(*shape, dtype, seed, scale=1.0):
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=gen, dtype=torch.float64) * scale).to("cuda", dtype).requires_grad_()


def inputs(graph, dtype, k, m, own_width=None):
    own = {} if own_width is None else {"own": leaf(graph.num_dst, own_width, dtype=dtype, seed=2)}
    return {
        "x": leaf(graph.num_src, k, dtype=dtype, seed=0),
        "weight": leaf(graph.num_types, k, m, dtype=dtype, seed=1, scale=k**-0.5),
        **own,
        "root": leaf(own_width or k, m, dtype=dtype, seed=3, scale=k**-0.5),
        "bias": leaf(m, dtype=dtype, seed=4),
    }


def step(graph, given, grad, **options):
    out = relational_layer(graph, **given, **options)
    return [out.detach(), *torch.autograd.grad(out, list(given.values()), grad.to(out.dtype))]


def truth(graph, given, grad, reduce="sum", edge_weight=None):
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    out = parts(graph, **wide, reduce=reduce, edge_weight=edge_weight)
    return [out.detach(), *torch.autograd.grad(out, list(wide.values()), grad.double())]


def check(graph, dtype, k, m, own_width=None, reduce="sum", weights=None, out_dtype=None):
    given = inputs(graph, dtype, k, m, own_width)
    grad = leaf(graph.num_dst, m, dtype=torch.float32, seed=9).detach()
    poison("cuda")
    found = step(graph, given, grad, reduce=reduce, edge_weight=weights, out_dtype=out_dtype or dtype)
    expected = truth(graph, given, grad, reduce, None if weights is None else weights.double())
    assert all(t.isfinite().all() for t in found)
    assert_close([t.double() for t in found], expected, TOLERANCE[dtype])


@pytest.fixture(autouse=True)
def sums_first(monkeypatch):
    """Sums first, whatever the order that would be chosen."""
    monkeypatch.setattr(edgeless.functional.relational_layer, "transforms", lambda *_: False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k,m", [(8, 8), (16, 64), (64, 64), (24, 40), (64, 128), (128, 64), (128, 128), (56, 8)])
def test_every_width(dtype, k, m):
    graph = graph_of(num_src=130)
    assert relational.fuses(graph, torch.empty(5, k, m), dtype)
    check(graph, dtype, k, m)
    check(graph, dtype, k, m, own_width=32, reduce="mean", out_dtype=torch.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k,m", [(4, 4), (12, 20), (28, 4), (32, 32), (32, 36), (60, 12), (100, 4), (4, 128)])
def test_every_width_of_floats(k, m, weighted):
    graph = graph_of(700, 650, 9000, 3, hub=1500)
    assert relational.fuses(graph, torch.empty(3, k, m), torch.float32)
    weights = leaf(9000, dtype=torch.float32, seed=5).detach() if weighted else None
    check(graph, torch.float32, k, m, own_width=k, weights=weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k,m", [(64, 132), (64, 136), (136, 64), (130, 3)])
def test_wide_rows_fall_back(dtype, k, m):
    graph = graph_of(num_src=130)
    assert not relational.fuses(graph, torch.empty(5, k, m), torch.bfloat16)
    check(graph, dtype, k, m)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k,m", [(7, 5), (20, 64), (20, 11), (16, 2), (50, 64), (64, 1), (125, 127)])
def test_rows_of_no_whole_vectors_are_fused_as_longer_ones(dtype, k, m):
    graph = graph_of(num_src=130)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        check(graph, dtype, k, m)
        torch.cuda.synchronize()
    assert any("segment_products" in event.name for event in profile.events())
    check(graph, dtype, k, m, own_width=3, reduce="mean", out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_hubs(dtype, reduce, weighted):
    graph = graph_of(4000, 4100, 40_000, 4, hub=9000)
    weights = leaf(40_000, dtype=torch.float32, seed=5).detach().abs() if weighted else None
    check(graph, dtype, 64, 64, own_width=64, reduce=reduce, weights=weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k,m", [(64, 64), (64, 40), (40, 56), (32, 32), (128, 64)])
def test_more_tiles_than_there_are_blocks_at_once(dtype, k, m):
    graph = graph_of(21_000, 20_000, 200_000, 5, hub=9000)
    assert graph.tiled(True)[7].numel() > 1000  # on an H100 few are up to 264
    check(graph, dtype, k, m, reduce="mean", out_dtype=torch.float32)


def short_edges():
    """Sources, destinations and types of so many segments of few edges that warps sum them by themselves. A thousand
    segments have 20 edges, and one has 9,000.
    """
    gen = torch.Generator().manual_seed(0)
    src, dst, types = (torch.randint(n, (520_000,), generator=gen) for n in (50_000, 60_000, 39))
    dst[:20_000], types[:20_000] = torch.arange(1000).repeat(20), torch.arange(1000).repeat(20) % 7
    dst[-9000:], types[-9000:] = 4, 0
    return src.cuda().int(), dst.cuda().int(), types.cuda().int()


def short_segments():
    src, dst, types = short_edges()
    return TypedGraph.from_edge_index(torch.stack([src, dst]), types, 40, 50_000, 60_000)


def summed_by_warps(graph, x, weight, edge_weight=None, reduce="sum"):
    """The sum over relations, for which the warps' kernel must have run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        options = {"edge_weight": edge_weight, "reduce": reduce, "out_dtype": torch.float32}
        found = relational_layer(graph, x.detach(), weight.detach(), **options)
        torch.cuda.synchronize()
    assert any("short_products" in event.name for event in profile.events())
    return found


@pytest.mark.parametrize("weights", ["none", "mean", "by id"])
@pytest.mark.parametrize("k,m", [(64, 64), (32, 32), (64, 16), (16, 64), (8, 32), (20, 24), (40, 56), (4, 4), (64, 4)])
def test_short_segments_of_every_width(k, m, weights):
    graph = short_segments()
    x, weight = leaf(50_000, k, dtype=torch.float32, seed=0), leaf(40, k, m, dtype=torch.float32, seed=1)
    edge_weight = leaf(graph.num_edges, dtype=torch.float32, seed=5).detach() if weights == "by id" else None
    reduce = "mean" if weights == "mean" else "sum"
    found = summed_by_warps(graph, x, weight, edge_weight, reduce)
    wide = None if edge_weight is None else edge_weight.double()
    assert error(found, parts(graph, x.detach().double(), weight.detach().double(), wide, reduce=reduce)) < 1e-6


def test_short_segments_of_every_magnitude():
    """A row is exact against its own numbers, and a column against its own, however much larger others are."""
    src, dst, types = (ids.long() for ids in short_edges())
    rows = torch.exp2(torch.arange(50_000, device="cuda") % 150 - 110)[:, None]
    columns = torch.exp2(torch.arange(64, device="cuda") % 60 - 30)
    x = leaf(50_000, 64, dtype=torch.float32, seed=0).detach() * rows
    weight = leaf(40, 64, 64, dtype=torch.float32, seed=1).detach() * columns
    found = summed_by_warps(short_segments(), x, weight)
    alone = torch.bincount(dst)[dst] == 1
    factors = x[src[alone]].double(), weight[types[alone]].double()
    expected, size = (torch.einsum("ek,ekm->em", *of) for of in (factors, [f.abs() for f in factors]))
    assert alone.sum() > 20
    assert ((found[dst[alone]] - expected).abs() <= 1e-6 * size + 1e-38).all()


def test_short_segments_behind_chunks_without_segments():
    """The first block's chunks are the 64 segments of type 0, one of a type without edges, and the 64 that begin
    the last type: what was asked for ahead of the second is not taken for the third.
    """
    blocks = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    dst = torch.cat([torch.arange(64), torch.arange(520_000)])
    types = (torch.arange(520_064) >= 64).long() * 2 * blocks
    src = torch.arange(520_064) % 50_000
    edges = torch.stack([src, dst]).cuda().int()
    graph = TypedGraph.from_edge_index(edges, types.cuda().int(), 2 * blocks + 1, 50_000, 520_000)
    x = leaf(50_000, 64, dtype=torch.float32, seed=0).detach()
    weight = leaf(2 * blocks + 1, 64, 64, dtype=torch.float32, seed=1).detach()
    found = summed_by_warps(graph, x, weight)
    products = x[src[64:].cuda()].double() @ weight[-1].double()
    products[:64] += x[:64].double() @ weight[0].double()
    assert error(found, products) < 1e-6


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_short_segments_keep_infinities_of_rows_where_they_are(value, reduce):
    graph = short_segments()
    x, weight = leaf(50_000, 64, dtype=torch.float32, seed=0), leaf(40, 64, 64, dtype=torch.float32, seed=1)
    with torch.no_grad():
        x[2, 3] = value
    found = summed_by_warps(graph, x, weight, reduce=reduce)
    expected = parts(graph, x.detach().double(), weight.detach().double(), reduce=reduce)
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite) and torch.equal(found.isnan(), expected.isnan())
    assert not finite.all() and error(found[finite], expected[finite]) < 1e-6


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_short_segments_keep_infinities_of_weights_where_they_are(value):
    """In a column of the rows that have an edge of that type. (The reference multiplies every row by every type.)"""
    _, dst, types = short_edges()
    x, weight = leaf(50_000, 64, dtype=torch.float32, seed=0), leaf(40, 64, 64, dtype=torch.float32, seed=1)
    expected = parts(short_segments(), x.detach().double(), weight.detach().double())
    with torch.no_grad():
        weight[5, 7, 3] = value
    found = summed_by_warps(short_segments(), x, weight)
    finite = torch.ones_like(found, dtype=torch.bool)
    finite[dst[types == 5].long(), 3] = False
    assert torch.equal(found.isfinite(), finite) and error(found[finite], expected[finite]) < 1e-6


@EVERY_WAY
def test_short_segments_give_the_same_bits_every_time(way):
    graph = short_segments()
    x, weight = leaf(50_000, 64, dtype=torch.float32, seed=0), leaf(40, 64, 64, dtype=torch.float32, seed=1)

    def run(x, weight):
        return [relational_layer(graph, x, weight, out_dtype=torch.float32)]

    run(x.detach(), weight.detach())
    assert_same_bits(way, run, [x.detach(), weight.detach()])


def gradients_by_warps(graph, x, weight, grad, edge_weight=None, reduce="sum", of=("x", "weight")):
    """Gradients of a sum over relations, for which the warps' kernel must have run."""
    given = {"x": x.detach(), "weight": weight.detach()}
    given = {name: t.requires_grad_(name in of) for name, t in given.items()}
    out = relational_layer(graph, **given, edge_weight=edge_weight, reduce=reduce, out_dtype=torch.float32)
    poison("cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = torch.autograd.grad(out, [given[name] for name in of], grad)
        torch.cuda.synchronize()
    assert any("short_gradients" in event.name for event in profile.events())
    return found


@pytest.mark.parametrize("weights", ["none", "mean", "by id"])
@pytest.mark.parametrize("k,m", [(64, 64), (64, 20), (20, 64), (40, 24), (36, 36), (4, 48), (64, 18), (33, 17)])
def test_gradients_by_warps_of_every_width(k, m, weights):
    """Segments of one edge and of dozens, tiles that are not full, relations of no edges."""
    for graph in (graph_of(700, 650, 9000, 3, hub=1500), graph_of(num_src=130, hub=70), graph_of(num_edges=41)):
        x, weight = inputs(graph, torch.float32, k, m)["x"], inputs(graph, torch.float32, k, m)["weight"]
        grad = leaf(graph.num_dst, m, dtype=torch.float32, seed=9).detach()
        edge_weight = leaf(graph.num_edges, dtype=torch.float32, seed=5).detach() if weights == "by id" else None
        reduce = "mean" if weights == "mean" else "sum"
        wide = None if edge_weight is None else edge_weight.double()
        _, *expected = truth(graph, {"x": x, "weight": weight}, grad, reduce, wide)
        for of in (("x", "weight"), ("x",), ("weight",)):
            found = gradients_by_warps(graph, x, weight, grad, edge_weight, reduce, of)
            assert all(t.isfinite().all() for t in found)
            wanted = [expected[("x", "weight").index(name)] for name in of]
            assert_close([t.double() for t in found], wanted, 1e-6)


def test_gradients_by_warps_of_every_magnitude():
    """A number of a weight's gradient is exact against the sizes of its own terms, however much larger others are."""
    gen = torch.Generator().manual_seed(0)
    src, dst, types = (torch.randint(n, (30_000,), generator=gen).cuda() for n in (9000, 8000, 4))
    graph = TypedGraph.from_edge_index(torch.stack([src, dst]).int(), types.int(), 4, 9000, 8000)
    rows = torch.exp2(torch.arange(9000, device="cuda") % 60 - 30)[:, None]
    columns = torch.exp2(torch.arange(64, device="cuda") * 7 % 60 - 30)
    x = leaf(9000, 64, dtype=torch.float32, seed=0).detach() * rows * columns
    grad = leaf(8000, 64, dtype=torch.float32, seed=1).detach() * columns.flip(0)
    (found,) = gradients_by_warps(graph, x, leaf(4, 64, 64, dtype=torch.float32, seed=2), grad, of=("weight",))
    for t in range(4):
        factors = x[src[types == t]].double(), grad[dst[types == t]].double()
        expected, size = (torch.einsum("ek,em->km", *of) for of in (factors, [f.abs() for f in factors]))
        assert ((found[t] - expected).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("which", ["x", "grad"])
def test_gradients_by_warps_keep_infinities_where_they_are(which, value):
    graph = graph_of(700, 650, 9000, 3, hub=1500)
    given = inputs(graph, torch.float32, 64, 64)
    x, weight = given["x"].detach().abs(), given["weight"].detach()
    grad = leaf(graph.num_dst, 64, dtype=torch.float32, seed=9).detach().abs()
    (x if which == "x" else grad)[7, 3] = value
    found = gradients_by_warps(graph, x, weight, grad)
    assert not found[1][-1].any()  # the reference multiplies infinities by zero where a relation has no edges
    _, *expected = truth(graph, {"x": x, "weight": weight}, grad)
    for ours, theirs in ((found[0], expected[0]), (found[1][:-1], expected[1][:-1])):
        finite = theirs.isfinite()
        assert torch.equal(ours.isfinite(), finite) and torch.equal(ours.isnan(), theirs.isnan())
        assert error(ours[finite], theirs[finite]) < 1e-6
    assert not found[1].isfinite().all()


@pytest.mark.parametrize("num_types,num_edges", [(1, 700), (2, 1), (700, 900), (3, 90)])
def test_few_and_many_relations(num_types, num_edges):
    for dtype in DTYPES:
        check(graph_of(num_src=130, num_edges=num_edges, num_types=num_types), dtype, 64, 64, reduce="mean")


def test_rows_that_are_not_aligned_fall_back():
    graph = graph_of(num_src=130)
    given = inputs(graph, torch.bfloat16, 64, 64)
    grad = leaf(graph.num_dst, 64, dtype=torch.float32, seed=9).detach()
    shifted = torch.empty(130 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(130, 64)
    given["x"] = shifted.copy_(given["x"].detach()).requires_grad_()
    found = step(graph, given, grad, reduce="mean", out_dtype=torch.bfloat16)
    assert_close([t.double() for t in found], truth(graph, given, grad, "mean"), TOLERANCE[torch.bfloat16])


def test_wide_ids_of_few_nodes_are_made_narrow():
    graph = graph_of(num_src=130, dtype=torch.int64)
    assert relational.fuses(graph, torch.empty(5, 64, 64), torch.float32)
    check(graph, torch.float32, 64, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_src,num_dst", [(10, 9), (11, 11)])
def test_rows_of_very_many_segments(dtype, num_src, num_dst):
    graph = graph_of(num_src, num_dst, 9000, num_types=900)
    assert graph.tiled(True)[10].size(1) > 0 and graph.tiled(False)[10].size(1) > 0
    check(graph, dtype, 64, 64, own_width=64, reduce="mean", out_dtype=torch.float32)
    check(graph, dtype, 24, 40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_of_root_and_grad(dtype):
    graph = graph_of(num_src=130)
    given = inputs(graph, dtype, 64, 48)
    given["root"] = given["root"].detach().t().contiguous().t().requires_grad_()
    turned = leaf(48, 130, dtype=torch.float32, seed=9).detach().t()
    for grad in (torch.ones(1, 1, device="cuda").expand(130, 48), turned):
        found = step(graph, given, grad, out_dtype=dtype)
        assert_close([t.double() for t in found], truth(graph, given, grad), TOLERANCE[dtype])


@pytest.mark.parametrize("which", ["x", "weight", "own", "root", "bias"])
def test_only_what_needs_a_gradient_gets_one(which):
    graph = graph_of()
    given = inputs(graph, torch.float32, 64, 64, own_width=64)
    given = {name: t.detach().requires_grad_(name == which) for name, t in given.items()}
    want = {name: t.detach().double().requires_grad_(name == which) for name, t in given.items()}
    found = relational_layer(graph, **given, reduce="mean", out_dtype=torch.float32)
    expected = parts(graph, **want, reduce="mean")
    grads = (torch.autograd.grad(out.square().sum(), of[which]) for out, of in ((found, given), (expected, want)))
    assert_close(*([t.double() for t in grad] for grad in grads), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_infinities_stay_where_they_are(dtype, reduce):
    graph = graph_of(num_src=130)
    given = inputs(graph, dtype, 64, 64)
    with torch.no_grad():
        given["x"][2, 3] = float("inf")
    grad = leaf(graph.num_dst, 64, dtype=torch.float32, seed=9).detach()
    found = step(graph, given, grad, reduce=reduce, out_dtype=torch.float32)
    expected = truth(graph, given, grad, reduce)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
    # A weight's gradient: the reference adds infinities of both signs, the kernels their factors before.
    weight = 2
    assert not (found.pop(weight).isnan() & ~expected.pop(weight).isnan()).any()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_alone(dtype):
    graph = graph_of(num_src=130, hub=300)
    x, weight = (leaf(*shape, dtype=dtype, seed=i) for i, shape in enumerate(((130, 64), (5, 64, 64))))
    edge_weight = leaf(graph.num_edges, dtype=torch.float32, seed=7)
    found = functional.relational_sum(graph, x, weight, edge_weight, order="aggregate")
    grad = leaf(graph.num_dst, 64, dtype=dtype, seed=9).detach()
    wide = [t.detach().double().requires_grad_() for t in (x, weight, edge_weight)]
    with edgeless.backend("reference"):
        expected = functional.relational_sum(graph, *wide)
    ours = [found, *torch.autograd.grad(found, [x, weight, edge_weight], grad)]
    theirs = [expected, *torch.autograd.grad(expected, wide, grad.double())]
    assert max(error(a, b) for a, b in zip(ours, theirs, strict=True)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("k", [64, 128])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_weights_keep_their_digits(dtype, k, scale):
    """What is left of two weights that differ in their last digits: nothing, were they rounded to 16 bits."""
    src, dst = torch.arange(200), torch.arange(100).repeat_interleave(2)
    graph = TypedGraph.from_edge_index(torch.stack([src, dst]).cuda().int(), torch.zeros(200).cuda().int(), 1, 200, 100)
    weights = scale * torch.tensor([1.001, 1.0005], device="cuda").repeat(100)
    x = torch.tensor([1000.0, -1000.0], device="cuda").repeat(100)[:, None].expand(200, k).to(dtype).contiguous()
    eye = torch.eye(k, device="cuda", dtype=dtype)[None]
    found = functional.relational_sum(graph, x, eye, weights, order="aggregate")
    expected = 1000 * (weights[0::2].double() - weights[1::2].double())[:, None].expand(100, k)
    assert error(found, expected) <= TOLERANCE[dtype]


@EVERY_WAY
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_time(way, dtype):
    graph = graph_of(4000, 4100, 40_000, 4, hub=9000)
    given = inputs(graph, dtype, 64, 64, own_width=64)
    grad = leaf(graph.num_dst, 64, dtype=torch.float32, seed=9).detach()

    def run(*leaves):
        of = dict(zip(given, leaves, strict=True))
        return step(graph, of, grad, reduce="mean", out_dtype=torch.float32)

    run(*given.values())
    assert_same_bits(way, run, list(given.values()))


def test_layers_have_few_launches():
    graph = graph_of(num_src=130)
    given = inputs(graph, torch.bfloat16, 64, 64)
    grad = leaf(graph.num_dst, 64, dtype=torch.float32, seed=9).detach()

    def run():
        return step(graph, given, grad, reduce="mean", out_dtype=torch.float32)

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) <= 6, [event.name for event in kernels]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 16, 16), (8, 8, 16)])
def test_blocks_of_many_edges_are_multiplied_as_whole_matrices(shape, dtype):
    graph = graph_of(num_src=900, num_dst=900, num_edges=relational._MANY_EDGES, hub=2000)
    blocks, k, m = shape
    given = inputs(graph, dtype, blocks * k, blocks * m)
    given["weight"] = leaf(graph.num_types, *shape, dtype=dtype, seed=1, scale=k**-0.5)
    grad = leaf(graph.num_dst, blocks * m, dtype=dtype, seed=9).detach()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = step(graph, given, grad, reduce="mean", out_dtype=dtype)
        torch.cuda.synchronize()
    assert any("segment_products" in event.name for event in profile.events())
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    with edgeless.backend("reference"):
        expected = step(graph, exact, grad.double(), reduce="mean", out_dtype=torch.float64)
    assert found[2].shape == given["weight"].shape
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) < TOLERANCE[dtype]
