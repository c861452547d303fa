"""Programs by themselves: rules, levels, passes, and the check against the original function."""

from __future__ import annotations

import pytest
import torch

from edgeless import Graph
from edgeless.programs import DESTINATION, EDGE, FIRST, NODE, SOURCE, Argument, ProgramCache, Refused, Sizes, Space
from edgeless.programs.checking import check
from edgeless.programs.front.ops import argument_rows, scale_rows, share_rows
from edgeless.programs.keys import function_key, value_key
from edgeless.programs.program import Program
from edgeless.programs.run.blocks import Block, blocks_of
from edgeless.programs.run.landing import land

NODES, EDGES = 12, 50


def arguments(*tensors_and_spaces):
    ends = torch.zeros(2, 1, dtype=torch.int64)
    first = [Argument(ends, Space(EDGE, 1, is_ends=True), name="edge_index"), Argument(ends[0], Space(EDGE, 0))]
    return [*first, Argument(ends[0]), *(Argument(t, s, name=n) for n, t, s in tensors_and_spaces)]


def summed(sizes, ends, message):
    return (message.new_zeros(sizes.destinations, message.size(1)).index_add(0, ends[1], message),)


def linear(sizes, ends, ids, seed, x, weight):
    """A linear map of both ends' rows, summed."""
    return summed(sizes, ends, torch.relu(torch.cat([x[ends[0]], x[ends[1]]], 1) @ weight))


def given(seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randint(NODES, (2, EDGES), generator=g),
        torch.randn(NODES, 4, generator=g, dtype=torch.float64),
        torch.randn(8, 3, generator=g, dtype=torch.float64),
    )


def program_of(function, wanted=(3, 4)):
    _, x, weight = given()
    args = arguments(("x", x, Space(NODE, 0)), ("weight", weight, Space()))
    return Program(function, args, True, 1, wanted), args


def test_a_linear_map_goes_to_the_nodes():
    program, args = program_of(linear)
    kept = "sums of its gradients are kept by the forward"
    assert program.notes == ["a linear map is split, 2 of 2 parts on nodes", kept]
    text = program.text()
    assert "x: node [4] float64" in text and "walk by destination: gathers" in text and "backward:" in text
    assert "computes add, relu, full_like, threshold_backward; keeps" in text
    check(program, linear, args, True)


def test_a_linear_map_goes_behind_a_sum():
    def function(sizes, ends, ids, seed, x, weight):
        return summed(sizes, ends, torch.tanh(x[ends[0]] * x[ends[1]]) @ weight[:4])

    program, args = program_of(function)
    assert "a linear map goes behind the sum" in program.notes
    check(program, function, args, True)


@pytest.mark.parametrize("block", [1, 7, 4096])
def test_blocks_of_any_size_and_all_derivatives(block):
    program, _ = program_of(linear)
    edge_index, x, weight = given()
    graph = Graph.from_edge_index(edge_index, NODES, NODES)
    inputs = (x.requires_grad_(), weight.requires_grad_())
    out = program(graph, inputs, block=block)[0]
    expected = torch.relu(torch.cat([x[edge_index[0]], x[edge_index[1]]], 1) @ weight)
    expected = torch.zeros(NODES, 3, dtype=torch.float64).index_add(0, edge_index[1], expected)
    torch.testing.assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), inputs) for o in (out, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_blocks_have_whole_rows():
    edge_index, *_ = given()
    graph = Graph.from_edge_index(edge_index, NODES, NODES)
    arrays, cuts = blocks_of(graph, True, 9)
    assert cuts[0] == 0 and cuts[-1] == NODES and cuts == sorted(set(cuts))
    degrees = arrays.indptr.diff()
    assert max(int(degrees[a:b].sum()) for a, b in zip(cuts, cuts[1:], strict=False)) <= 9 + int(degrees.max())


def test_the_check_finds_what_a_trace_cannot_see():
    calls = []

    def function(sizes, ends, ids, seed, x, weight):
        calls.append(1)
        return summed(sizes, ends, x[ends[0]] * (1.0 if len(calls) < 3 else 2.0))

    program, args = program_of(function)
    with pytest.raises(Refused, match="a result differs from the layer's own, by 5.0e-01 relative by norm"):
        check(program, function, args, True)


def test_the_check_finds_a_wrong_gradient():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    calls = []

    def function(sizes, ends, ids, seed, x, weight):
        calls.append(1)
        rows = x[ends[0]]
        return summed(sizes, ends, rows * 2 if len(calls) < 3 else Twice.apply(rows))

    program, args = program_of(function)
    with pytest.raises(Refused, match="a gradient differs"):
        check(program, function, args, True)


def directions(sizes, ends, ids, seed, x, weight):
    """Unit vectors from sources to destinations: a self loop has none, and huge gradients that cancel."""
    return summed(sizes, ends, torch.nn.functional.normalize(x[ends[1]] - x[ends[0]], dim=1))


def test_self_loops_whose_gradients_are_noise_decide_nothing():
    program, args = program_of(directions)
    check(program, directions, args, True)


def test_what_is_wrong_beside_such_noise_is_found():
    for factor, added in ((1.001, 0.0), (1.0, 1e-3)):
        program, args = program_of(directions)

        def other(sizes, ends, ids, seed, x, weight, factor=factor, added=added):
            (found,) = directions(sizes, ends, ids, seed, x, weight)
            return (factor * found + added * x[:, :1],)

        with pytest.raises(Refused, match="a (result|gradient) differs from the layer's own"):
            check(program, other, args, True)


def test_landing_is_exact_about_what_it_takes():
    def weighted(sizes, ends, ids, seed, x, weight):
        return summed(sizes, ends, x[ends[0]])

    program, args = program_of(weighted)
    assert land(program).name == "spmm"
    assert land(program_of(linear)[0]) is None


@pytest.mark.parametrize("least,lands", [(None, True), (0.0, True), (1e-16, True), (1e-12, False), (1e-6, False)])
def test_a_softmax_lands_where_what_is_added_to_its_sums_changes_no_bit(least, lands):
    def attention(sizes, ends, ids, seed, x, weight):
        source, target = ends
        score = torch.nn.functional.leaky_relu(x[source, 0] + x[target, 1])
        best = score.new_zeros(sizes.destinations)
        best = best.scatter_reduce(0, target, score.detach(), "amax", include_self=False)
        exp = (score - best[target]).exp()
        total = exp.new_zeros(sizes.destinations).scatter_add(0, target, exp)
        total = total if least is None else total + least
        return summed(sizes, ends, (exp / total[target]).unsqueeze(1) * x[source])

    program, args = program_of(attention, wanted=(3,))
    check(program, attention, args, True)
    found = land(program)
    assert (found is not None) == lands and (not lands or found.name == "gat_attention")


def test_a_cache_keeps_its_most_and_drops_the_oldest():
    _, x, weight = given()
    cache, made = ProgramCache(most=2), []

    def get(key):
        args = arguments(("x", x, Space(NODE, 0)), ("weight", weight, Space()))
        cache.get(key, linear, lambda: made.append(key) or args, True, 1, ())

    for key, kept in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "bc"), ("b", "bc"), ("a", "ca")):
        get(key)
        assert len(cache) == len(kept) and all(one in cache for one in kept)
    assert made == ["a", "b", "c", "a"]


def test_shares_of_an_extremum():
    ids = torch.tensor([4, 7, 9])
    src = torch.tensor([[1.0], [2.0], [2.0]])
    best = torch.full((3, 1), 2.0)
    assert share_rows(src, best, torch.full((3, 1), -2), ids).view(-1).tolist() == [0, 0.5, 0.5]
    assert share_rows(src, best, torch.full((3, 1), 7), ids).view(-1).tolist() == [0, 1, 0]
    zero = torch.zeros(3, 1)
    assert share_rows(src * 0, zero, torch.full((3, 1), -3), ids).view(-1).tolist() == [0.25] * 3
    for value in (float("inf"), -float("inf")):
        infinite = torch.full((2, 1), value)
        assert share_rows(infinite, infinite, torch.full((2, 1), -2), ids[:2]).view(-1).tolist() == [0.5] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equal_maxima_of_long_rows_are_those_of_the_layer(dtype):
    """Of 16 bits, rows of some hundred messages have equal maxima, and many messages that are a rounding below."""

    def maxima(sizes, ends, ids, seed, x):
        index = ends[1].view(-1, 1).expand(-1, x.size(1))
        out = x.new_zeros(sizes.destinations, x.size(1))
        return (out.scatter_reduce(0, index, x[ends[0]], "amax", include_self=False),)

    g = torch.Generator().manual_seed(2)
    ends = torch.randint(4, (2, 900), generator=g)
    ends[0] = torch.randint(300, (900,), generator=g)
    x = torch.randn(300, 8, generator=g).to(dtype).requires_grad_()
    program = Program(maxima, arguments(("x", x.detach(), Space(SOURCE, 0))), False, 1, [FIRST])
    weights = torch.randn(4, 8, generator=g, dtype=torch.float64)
    found = []
    for given in (x, x.detach().double().requires_grad_()):
        if given is x:
            (out,) = program(Graph.from_edge_index(ends, 300, 4), [x])
        else:
            (out,) = maxima(Sizes(300, 4, 900), ends, None, None, given)
        found += [out, *torch.autograd.grad(out, given, weights.to(out.dtype))]
    for mine, exact in zip(found[:2], found[2:], strict=True):
        eps = torch.finfo(dtype).eps
        assert float((mine.detach().double() - exact).norm() / exact.norm()) <= 2 * eps


def gated_maxima(sizes, ends, ids, seed, x, y):
    """Maxima of gates that are 1, or a few roundings less, times a number of the node."""
    messages = torch.sigmoid(x[ends[0]] + y[ends[1]]) * y[ends[1]]
    index = ends[1].view(-1, 1).expand(-1, x.size(1))
    return (x.new_zeros(sizes.destinations, x.size(1)).scatter_reduce(0, index, messages, "amax", include_self=False),)


def error_of_gated_maxima(dtype, device="cpu"):
    """By how much the gradient of the node's number is off, relative by norm; every edge is there twice."""
    g = torch.Generator().manual_seed(2)
    ends = torch.stack([torch.randint(n, (450,), generator=g) for n in (300, 4)]).repeat(1, 2)
    x, y = (4 * torch.randn(300, 8, generator=g)).to(dtype), torch.rand(4, 8, generator=g).to(dtype)
    weights = torch.rand(4, 8, generator=g).to(dtype)
    program = Program(
        gated_maxima, arguments(("x", x, Space(SOURCE, 0)), ("y", y, Space(DESTINATION, 0))), False, 1, [3, 4]
    )
    graph = Graph.from_edge_index(ends.to(device), 300, 4)
    given = [t.to(device).requires_grad_() for t in (x, y)]
    (found,) = torch.autograd.grad(program(graph, given)[0], given[1], weights.to(device))
    exact = [t.double().requires_grad_() for t in (x, y)]
    (right,) = torch.autograd.grad(
        gated_maxima(Sizes(300, 4, 900), ends, None, None, *exact), exact[1], weights.double()
    )
    return float((found.cpu().double() - right).norm() / right.norm())


BY_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", BY_ROUNDING)
def test_shares_of_messages_that_are_almost_equal_sum_to_one(dtype):
    assert error_of_gated_maxima(dtype) < BY_ROUNDING[dtype]


def test_almost_equal_messages_are_counted_where_others_are_equal():
    above = 1 + torch.finfo(torch.float32).eps
    src = torch.tensor([[above], [1.0], [above], [0.5], [3.0], [float("nan")]])
    index = torch.tensor([0, 0, 0, 0, 1, 2])
    best = torch.tensor([[above], [3.0], [float("nan")]])
    assert argument_rows(src, best, index, torch.arange(6), 0).view(-1).tolist() == [-3, 4, 0]
    arg = torch.tensor([-3] * 4).view(4, 1)
    shares = share_rows(src[:4], best[index[:4]], arg, torch.arange(4))
    assert shares.view(-1).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    infinite = torch.tensor([[float("inf")], [float("inf")], [1.0]])
    arg = argument_rows(infinite, infinite[:1], torch.zeros(3, dtype=torch.int64), torch.arange(3), 0)
    assert arg.tolist() == [[-2]]
    shares = share_rows(infinite, infinite[:1].expand(3, 1), arg.expand(3, 1), torch.arange(3))
    assert shares.view(-1).tolist() == [0.5, 0.5, 0]


def test_dropout_of_no_edges():
    ids = torch.zeros(0, dtype=torch.int64)
    assert scale_rows(torch.zeros(0, 3), torch.tensor([1]), ids, 1, 0.5).shape == (0, 3)


def test_keys_hold_contents():
    a, b = {"x": [1, 2.0, (3,)]}, {"x": [1, 2.0, (3,)]}
    assert value_key(a) == value_key(b) and hash(value_key(a)) == hash(value_key(b))
    b["x"].append(4)
    assert value_key(a) != value_key(b)
    assert value_key(1) != value_key(True) and value_key(float("nan")) == value_key(float("nan"))
    deep = [[[[[[[1]]]]]]]
    with pytest.raises(Refused, match="nested too deeply"):
        value_key(deep)
    state = 1

    def function():
        return state

    before = function_key(function)
    state = 2
    assert function_key(function) != before


def test_positions_of_arguments():
    program, _ = program_of(linear, wanted=())
    assert program.backward is None and FIRST == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape,dim", [((), 0), ((1,), 0), ((5,), 0), ((3, 4), 0), ((3, 4), 1), ((3, 4), 2), ((0,), 0)])
@pytest.mark.parametrize("device", [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.cuda)])
def test_sums_of_a_block_are_in_a_fixed_order(device, dtype, shape, dim):
    """Every row's sum, wherever the edges' dimension stands; a row of many edges twice with the same bits."""
    graph = Graph.from_edge_index(torch.stack((torch.randint(9, (5000,)), torch.randint(3, (5000,)))), 9, 6).to(device)
    block = Block(graph.csr, 1, 6)
    rows = torch.randn(block.edges, *shape, dtype=torch.float64)
    src = rows.movedim(0, dim).to(device, dtype)
    found = block.sum(src, dim)
    assert not found._is_view()  # else nobody could write over it
    own, given = block.own.cpu(), src.movedim(dim, 0).cpu().double()
    exact = torch.zeros(5, *shape, dtype=torch.float64).index_add_(0, own, given)
    assert found.dtype == dtype and found.shape == exact.movedim(0, dim).shape
    most = 1e-10 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert float((found.movedim(dim, 0).cpu().double() - exact).norm()) <= most * float(exact.norm())
    assert torch.equal(found, block.sum(src, dim))
    assert not float(found.select(dim, 4).abs().sum())  # a row without edges
