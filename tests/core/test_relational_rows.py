"""Rows that add up few products of segments each, and their own times a matrix, on CUDA: sixteen a warp."""

import pytest
import torch
from attention_cases import assert_close, error
from devices import EVERY_WAY, assert_same_bits, poison
from test_relational_fused import (  # noqa: F401  marks and a fixture
    TOLERANCE,
    inputs,
    leaf,
    pytestmark,
    step,
    sums_first,
    truth,
)

from edgeless import TypedGraph
from edgeless.functional.relational_layer import relational_layer

NUM_TYPES = 40


def sizes():
    """Sources and destinations, so many that all warps have some, and no whole sixteens of them."""
    rows = 200 * torch.cuda.get_device_properties(0).multi_processor_count
    return rows + 531, rows + 5


def edges_of(num_types=NUM_TYPES, many=20):
    """Three edges a destination; a thousand destinations, and as many sources, have one of each of `many` types."""
    gen = torch.Generator().manual_seed(0)
    num_src, num_dst = sizes()
    src, dst, types = (torch.randint(n, (3 * num_dst,), generator=gen) for n in (num_src, num_dst - 3, num_types - 1))
    count = 1000 * many
    dst[:count], types[:count] = torch.arange(1000).repeat(many), torch.arange(many).repeat_interleave(1000)
    src[count : 2 * count], types[count : 2 * count] = dst[:count], types[:count]
    return src.cuda().int(), dst.cuda().int(), types.cuda().int()


def graph_of(num_types=NUM_TYPES, many=20):
    src, dst, types = edges_of(num_types, many)
    return TypedGraph.from_edge_index(torch.stack([src, dst]), types, num_types, *sizes())


def by_warps(run):
    """What run() returns, for which the warps' kernel must have run."""
    run()
    poison("cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = run()
        torch.cuda.synchronize()
    return found, sum("short_rows" in event.name for event in profile.events())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("k,m,own_width", [
    (64, 64, None), (64, 64, 64), (40, 64, None), (64, 20, None), (36, 44, 4), (64, 4, 60), (33, 50, None),
])  # fmt: skip
def test_every_width(k, m, own_width, reduce):
    graph = graph_of()
    given = inputs(graph, torch.float32, k, m, own_width)
    grad = leaf(graph.num_dst, m, dtype=torch.float32, seed=9).detach()
    found, launches = by_warps(lambda: step(graph, given, grad, reduce=reduce, out_dtype=torch.float32))
    assert launches == 2  # forward and gradients of features
    assert_close(found, truth(graph, given, grad, reduce), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("k,m,own_width", [
    (64, 64, None), (64, 64, 64), (40, 64, None), (64, 24, None), (48, 56, 8), (64, 8, 56), (33, 50, None),
])  # fmt: skip
def test_every_width_of_halves(k, m, own_width, out_dtype, dtype):
    graph = graph_of()
    given = inputs(graph, dtype, k, m, own_width)
    grad = leaf(graph.num_dst, m, dtype=torch.float32, seed=9).detach()
    found, launches = by_warps(lambda: step(graph, given, grad, reduce="mean", out_dtype=out_dtype or dtype))
    assert launches == 2
    assert_close([t.double() for t in found], truth(graph, given, grad, "mean"), TOLERANCE[dtype])


@pytest.mark.parametrize("missing", [["root"], ["bias"], ["root", "bias"]])
def test_without_root_or_bias(missing):
    graph = graph_of()
    given = {name: t for name, t in inputs(graph, torch.float32, 64, 64).items() if name not in missing}
    grad = leaf(graph.num_dst, 64, dtype=torch.float32, seed=9).detach()
    found, launches = by_warps(lambda: step(graph, given, grad, out_dtype=torch.float32))
    assert launches == 2
    assert_close(found, truth(graph, given, grad), 1e-6)


def test_rows_of_very_many_segments():
    """Six hundred segments of one row: more than it adds up itself, so that a part of them is added up before."""
    num_types = 600
    src, dst, types = edges_of(num_types, 17)
    dst[-600:], types[-600:] = 3, torch.arange(600)
    graph = TypedGraph.from_edge_index(torch.stack([src, dst]), types, num_types, *sizes())
    given = inputs(graph, torch.float32, 64, 64)
    given = {name: t.detach() for name, t in given.items()}
    found, launches = by_warps(lambda: relational_layer(graph, **given, out_dtype=torch.float32))
    assert launches == 1
    x, weight, root, bias = (given[name].double() for name in ("x", "weight", "root", "bias"))
    expected = x[: graph.num_dst] @ root + bias
    for t in range(num_types):
        of = types == t
        expected.index_add_(0, dst[of], x[src[of]] @ weight[t])
    assert error(found, expected) < 1e-6


def test_every_magnitude():
    """A row's own product is exact against its own numbers, however much larger others are."""
    graph = graph_of()
    given = {name: t.detach() for name, t in inputs(graph, torch.float32, 64, 64).items()}
    own = torch.exp2(torch.arange(graph.num_dst, device="cuda") % 150 - 110)[:, None]
    own = own * leaf(graph.num_dst, 64, dtype=torch.float32, seed=6).detach()
    root = given["root"] * torch.exp2(torch.arange(64, device="cuda") % 60 - 30)
    options = {"own": own, "root": root, "out_dtype": torch.float32}
    found, launches = by_warps(lambda: relational_layer(graph, given["x"], given["weight"] * 0, **options))
    assert launches == 1
    size = own.double().abs() @ root.double().abs()
    assert ((found - own.double() @ root.double()).abs() <= 1e-6 * size + 1e-38).all()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("which", ["own", "root", "x", "bias"])
def test_infinities_stay_where_they_are(which, value):
    graph = graph_of()
    given = {name: t.detach() for name, t in inputs(graph, torch.float32, 64, 64, own_width=64).items()}
    given[which].view(-1, 64)[3 if which != "bias" else 0, 5] = value
    found, launches = by_warps(lambda: relational_layer(graph, **given, out_dtype=torch.float32))
    assert launches == 1
    expected = truth(graph, {**given}, torch.zeros(graph.num_dst, 64, device="cuda"))[0]
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite) and torch.equal(found.isnan(), expected.isnan())
    assert not finite.all() and error(found[finite], expected[finite]) < 1e-6


@EVERY_WAY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_every_time(way, dtype):
    graph = graph_of()
    given = inputs(graph, dtype, 64, 64)
    grad = leaf(graph.num_dst, 64, dtype=torch.float32, seed=9).detach()

    def run(*leaves):
        return step(graph, dict(zip(given, leaves, strict=True)), grad, reduce="mean", out_dtype=torch.float32)

    run(*given.values())
    assert_same_bits(way, run, list(given.values()))
