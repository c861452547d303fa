"""Attention over pairs: what it walks, and the op, against plain PyTorch in float64."""

import pytest
import torch
from attention_cases import error
from devices import EVERY_DEVICE, with_wide_indices
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeless import TypedGraph
from edgeless.functional.pair_attention import CUT, edge_ids, fits, pair_attention, walks
from edgeless.reference import dropout_mask

SLOPE = 0.2


def typed(nodes, edges, types, hub=0, seed=0, device="cpu"):
    """``hub`` edges end at one node and, of another type, as many begin at one."""
    gen = torch.Generator().manual_seed(seed)
    ends, kinds = torch.randint(nodes, (2, edges), generator=gen), torch.randint(types, (edges,), generator=gen)
    ends[1, :hub], ends[0, hub : 2 * hub], kinds[hub : 2 * hub] = 3, 5, types - 1
    return TypedGraph.from_edge_index(ends.to(device), kinds.to(device), types, nodes, nodes)


GRAPHS = {
    "random": lambda device: typed(200, 1500, 5, device=device),
    "one edge": lambda device: typed(2, 1, 3, device=device),
    "types without edges": lambda device: typed(50, 60, 40, device=device),
    "isolated nodes": lambda device: typed(5000, 300, 4, device=device),
    "hubs": lambda device: typed(300, 9000, 4, hub=3000, device=device),
    "a hub of many blocks": lambda device: typed(500, 700_000, 3, hub=300_000, device=device),
    "long rows": lambda device: typed(20, 3000, 2, device=device),
}


def operands(graph, depth, width, dtype=torch.float64, bias=True, seed=1):
    """x, weight, query, key, bias and what comes back for the result."""
    gen = torch.Generator().manual_seed(seed)
    nodes = graph.num_dst
    shapes = (nodes, depth), (graph.num_types, depth, width), (width, 1), (width, 1), (width,), (nodes, width)
    scales = 1, depth**-0.5, width**-0.5, width**-0.5, 0.5, 1
    made = [torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes]
    made = [(t * by).to(dtype).to(graph.device) for t, by in zip(made, scales, strict=True)]
    return [*made[:4], made[4] if bias else None, made[5]]


def reference(graph, x, weight, query, key, bias, grad, dtype=torch.float64, keep=None):
    """The result and the gradients, from products and logits of all edges, by PyTorch in ``dtype``.

    keep: ``[E]``, what dropout multiplies weights by.
    """
    given = (x, weight, query, key, bias)
    leaves = [None if t is None else t.detach().to("cpu", dtype).requires_grad_() for t in given]
    x, weight, query, key, bias = leaves
    (src, dst), types = graph.graph.edge_index().cpu(), graph.edge_type.long().cpu()
    parts = [torch.nonzero(types == t).squeeze(1) for t in range(graph.num_types)]
    rows = torch.cat([x[torch.stack((dst[at], src[at]))] @ weight[t] for t, at in enumerate(parts)], 1)
    own, values = rows[:, torch.cat(parts).argsort()]
    logits = torch.nn.functional.leaky_relu(own @ query + values @ key, SLOPE).squeeze(1)
    top = logits.new_full((len(x),), -torch.inf).scatter_reduce(0, dst, logits.detach(), "amax")
    shares = (logits - top[dst]).exp()
    shares = shares / shares.new_zeros(len(x)).index_add(0, dst, shares)[dst]
    shares = shares if keep is None else shares * keep.to(dtype)
    out = values.new_zeros(len(x), values.size(1)).index_add(0, dst, shares.unsqueeze(1) * values)
    out = out if bias is None else out + bias
    wanted = [t for t in leaves if t is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.to("cpu", dtype))]


def by_walks(graph, x, weight, query, key, bias, grad):
    """The same, step by step as the kernels do it, from the arrays that they walk."""
    arrays = [t.long().cpu() for t in walks(graph).arrays]
    offsets, pair_nodes = arrays[:2]
    dst_ptr, pairs, dst_segments, pair_ptr, dsts, src_segments = arrays[2:8]
    type_ptr, types, node_ptr, nodes, ids, edge_ptr, positions, sums_ptr, columns, places = arrays[8:]

    def owners(ptr):
        return torch.arange(len(ptr) - 1).repeat_interleave(ptr.diff())

    def summed(ptr, rows):
        return rows.new_zeros(len(ptr) - 1, *rows.shape[1:]).index_add(0, owners(ptr), rows)

    of_pair = weight[owners(offsets)]
    values = torch.einsum("pk,pkm->pm", x[pair_nodes], of_pair)
    vectors = weight @ query.squeeze(1)
    queries = (x[owners(type_ptr)] * vectors[types]).sum(1)
    leaky = torch.nn.functional.leaky_relu
    logits = leaky(queries[dst_segments] + values[pairs] @ key.squeeze(1), SLOPE)
    shift = torch.log(summed(dst_ptr, logits.exp()))
    out = summed(dst_ptr, (logits - shift[owners(dst_ptr)]).exp().unsqueeze(1) * values[pairs])
    out = out if bias is None else out + bias

    deltas = (grad * (out if bias is None else out - bias)).sum(1)
    source = owners(pair_ptr)
    z = queries[src_segments] + values[source] @ key.squeeze(1)
    p = (leaky(z, SLOPE) - shift[dsts]).exp()
    ds = p * ((grad[dsts] * values[source]).sum(1) - deltas[dsts]) * (1 - (1 - SLOPE) * (z <= 0).double())
    of_pairs = summed(pair_ptr, ds)
    grad_values = summed(pair_ptr, p.unsqueeze(1) * grad[dsts]) + of_pairs.unsqueeze(1) * key.squeeze(1)
    weights = torch.cat((torch.ones(len(pair_nodes)).double(), summed(edge_ptr, ds[positions])))
    rows = torch.cat((torch.einsum("pm,pkm->pk", grad_values, of_pair), vectors))
    grad_x = summed(sums_ptr, weights[places].unsqueeze(1) * rows[columns])
    grad_vectors = summed(node_ptr, weights[len(pair_nodes) :][ids].unsqueeze(1) * x[nodes])
    outer = summed(offsets, x[pair_nodes].unsqueeze(2) * grad_values.unsqueeze(1))
    grad_weight = outer + grad_vectors.unsqueeze(2) * query.squeeze(1)
    grad_query = (weight * grad_vectors.unsqueeze(2)).sum((0, 1)).unsqueeze(1)
    grad_key = (of_pairs.unsqueeze(1) * values).sum(0).unsqueeze(1)
    return [out, grad_x, grad_weight, grad_query, grad_key, *([] if bias is None else [grad.sum(0)])]


def plain_walks(graph):
    """The arrays by PyTorch's own ops, in int64."""
    pairs, edges = graph.compact
    csr, csc, of_nodes = ([t.long() for t in of] for of in (graph.graph.csr, edges.csc, pairs.graph.csc))
    sources, num_edges, num_pairs = pairs.graph.csr.indices.long(), graph.num_edges, edges.num_src
    type_ptr, rows, ptr, _, ids, _ = (t.long() for t in graph._sorted(graph.graph.csr, CUT))

    def numbers(count):
        return torch.arange(count, device=graph.device)

    def pointers(counts):
        return torch.cat((counts.new_zeros(1), counts.cumsum(0)))

    def inverse(order):
        return torch.empty_like(order).scatter_(0, order, numbers(order.numel()))

    order = rows.argsort(stable=True)
    types = numbers(graph.num_types).repeat_interleave(type_ptr.diff())[order]
    segment_ptr, lengths = pointers(torch.bincount(rows, minlength=graph.num_dst)), ptr.diff()[order]
    edge_ptr, segment_of_position = pointers(lengths), numbers(order.numel()).repeat_interleave(lengths)
    ids = ids[(ptr[:-1][order] - edge_ptr[:-1]).repeat_interleave(lengths) + numbers(num_edges)]
    segment_of_edge = torch.empty_like(ids).scatter_(0, ids, segment_of_position)
    at_pair = numbers(num_pairs) + segment_ptr[sources[of_nodes[1]]]
    at_segment = numbers(order.numel()) + of_nodes[0][rows[order] + 1]
    place = torch.cat((at_pair, at_segment))
    columns = torch.cat((of_nodes[1], types + num_pairs))
    weights = torch.cat((of_nodes[1], numbers(order.numel()) + num_pairs))
    return [
        pointers(torch.bincount(pairs.edge_type, minlength=graph.num_types)), sources,
        csr[0], graph.pair_of_edge().long()[ids], segment_of_position,
        csc[0], csc[1], segment_of_edge[csc[2]],
        segment_ptr, types,
        type_ptr, rows, inverse(order),
        edge_ptr, inverse(csc[2])[ids],
        of_nodes[0] + segment_ptr, *(torch.empty_like(t).scatter_(0, place, t) for t in (columns, weights)),
    ]  # fmt: skip


def check_walks(graph):
    found, expected = walks(graph), plain_walks(graph)
    for ours, theirs in zip(found.arrays, expected, strict=True):
        assert ours.dtype == graph.graph.index_dtype and ours.is_contiguous() and torch.equal(ours.long(), theirs)
    assert found.max_degrees == [max(expected[i].diff().tolist(), default=0) for i in (2, 5, 15)]


@EVERY_DEVICE
@pytest.mark.parametrize("kind", GRAPHS)
def test_walks_are_those_of_plain_pytorch(kind, device):
    check_walks(GRAPHS[kind](device))
    check_walks(with_wide_ids(GRAPHS[kind](device)))


def with_wide_ids(graph):
    return TypedGraph(with_wide_indices(graph.graph), graph.edge_type.long(), graph.num_types)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(1, 60), st.integers(1, 20), st.integers(0, 100), st.integers(0, 10_000))
def test_walks_of_small_graphs(edges, nodes, types, hub, seed):
    check_walks(typed(max(nodes, 6), edges, types, hub=hub, seed=seed))


@EVERY_DEVICE
@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
def test_opcheck_of_walks(device):
    args, op = [], torch.ops.edgeless.pair_walks

    class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, given=(), options=None):
            if func is op.default:
                args.append(given)
            return func(*given, **(options or {}))

    with Recorded():
        walks(GRAPHS["hubs"](device))
    options = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}
    torch.library.opcheck(op, *args, **options)


@pytest.mark.parametrize("changed,message", [
    ({1: [torch.zeros(6).int()]}, "pair_walks: by_pair must hold 2 tensors, got 1"),
    ({4: []}, "pair_walks: by_node must hold 2 tensors, got 0"),
    ({5: [torch.zeros(2).int()] * 3}, "pair_walks: segments must hold 4 tensors, got 3"),
    ({6: torch.zeros(9).int()}, r"pair_walks: segment_ptr must have shape \[4\], got \[9\]"),
    ({7: torch.zeros(5).long()}, "pair_walks: order must be Int, got Long"),
    ({0: torch.zeros(4)}, "pair_walks: indptr must be int32 or int64, got Float"),
])  # fmt: skip
def test_bad_walks_are_named(changed, message):
    """Of five edges, pairs and segments and three nodes."""
    five, ends, nodes = torch.arange(5).int(), torch.arange(6).int(), torch.tensor([0, 2, 4, 5]).int()
    types = torch.tensor([0, 5]).int()
    args = [nodes, [ends, five], five % 3, five, [nodes, five], [types, five % 3, ends, five], nodes, five]
    for i, value in changed.items():
        args[i] = value
    with pytest.raises(ValueError, match=message):
        torch.ops.edgeless.pair_walks(*args)


@EVERY_DEVICE
@pytest.mark.parametrize("kind", [kind for kind in GRAPHS if kind != "a hub of many blocks"])
def test_what_is_walked(kind, device):
    graph = GRAPHS[kind](device)
    given = operands(graph, 6, 4)
    found = by_walks(graph, *[t.cpu() for t in given])
    for ours, want in zip(found, reference(graph, *given), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-12)
    arrays, degrees = walks(graph)
    assert walks(graph).arrays is arrays
    assert int(arrays[13].diff().max()) <= CUT
    assert degrees == [int(arrays[i].diff().max()) for i in (2, 5, 15)]


def gradients(graph, given, wanted=None, **dropout):
    leaves = [None if t is None else t.detach().requires_grad_() for t in given[:5]]
    out = pair_attention(graph, *leaves, SLOPE, **dropout)
    wanted = [t for t in leaves if t is not None] if wanted is None else [leaves[i] for i in wanted]
    return [out.detach(), *torch.autograd.grad(out, wanted, given[5])]


WIDTHS = [(64, 64), (6, 4), (24, 8), (64, 96), (40, 128), (63, 11)]


@EVERY_DEVICE
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_float32(kind, widths, bias, device):
    if kind == "a hub of many blocks" and (widths != (64, 64) or device == "cpu"):
        pytest.skip("takes the reference long, and the CPU has no blocks")
    graph = GRAPHS[kind](device)
    given = operands(graph, *widths, torch.float32, bias)
    assert fits(graph, given[0], given[1], tuple(given[2:5])) == (device == "cuda")
    for ours, want in zip(gradients(graph, given), reference(graph, *given), strict=True):
        assert error(ours.cpu(), want) <= 1e-5


def drawn(graph, p, seed):
    """The options of the op, and what it multiplies the edges' weights by."""
    keep = dropout_mask(seed, graph.num_edges, 1, p).squeeze(1).double() / (1 - p if p < 1 else 1)
    return {"dropout": p, "seed": torch.tensor([seed], device=graph.device)}, keep


@EVERY_DEVICE
@pytest.mark.parametrize("p", [0.3, 0.75, 1.0])
@pytest.mark.parametrize("widths", [(64, 64), (24, 8), (64, 96)])
@pytest.mark.parametrize("kind", GRAPHS)
def test_dropout_is_drawn_by_the_ids_of_edges(kind, widths, p, device):
    if kind == "a hub of many blocks" and (widths != (64, 64) or p != 0.3 or device == "cpu"):
        pytest.skip("takes the reference long, and the CPU has no blocks")
    graph = GRAPHS[kind](device)
    given, (options, keep) = operands(graph, *widths, torch.float32), drawn(graph, p, 11)
    for ours, want in zip(gradients(graph, given, **options), reference(graph, *given, keep=keep), strict=True):
        assert error(ours.cpu(), want) <= 1e-5


@EVERY_DEVICE
@pytest.mark.parametrize("size", [4e3, 3e5])
@pytest.mark.parametrize("kind", ["random", "hubs", "long rows"])
def test_gradients_of_large_logits(kind, size, device):
    """They differ by whole numbers, so that float32 has them as they are and PyTorch is as right as with small ones."""
    graph = GRAPHS[kind](device)
    gen = torch.Generator().manual_seed(1)
    x = torch.randint(0, 3, (graph.num_dst, 8), generator=gen).double()
    weight = torch.eye(8).double().repeat(graph.num_types, 1, 1)
    query, key, bias = torch.zeros(8, 1).double(), torch.zeros(8, 1).double(), torch.zeros(8).double()
    x[:, 0], query[0], key[1] = 1, size, 1
    grad = torch.randn(graph.num_dst, 8, dtype=torch.float64, generator=gen)
    given = [t.float().to(device) for t in (x, weight, query, key, bias, grad)]
    want, torchs = (reference(graph, *given, dtype=dtype) for dtype in (torch.float64, torch.float32))
    for ours, exact, theirs in zip(gradients(graph, given), want, torchs, strict=True):
        assert error(ours.cpu(), exact) <= max(2 * error(theirs, exact), 1e-5)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["random", "hubs", "long rows", "isolated nodes"])
def test_dropout_in_half_precision(kind, dtype, device):
    check_half_precision(GRAPHS[kind](device), (64, 64), dtype, p=0.5)


def check_half_precision(graph, widths, dtype, p):
    """The median of five draws: where rounding turns the sign of a logit, the LeakyReLU bends elsewhere for either."""
    draws = []
    for seed in range(5):
        given, (options, keep) = operands(graph, *widths, dtype, seed=seed), drawn(graph, p, seed)
        found, want = gradients(graph, given, **options), reference(graph, *given, keep=keep)
        torchs = reference(graph, *given, dtype=dtype, keep=keep)
        assert all(t.dtype == dtype for t in found)
        draws.append([[error(t.cpu(), w) for t, w in zip(side, want, strict=True)] for side in (found, torchs)])
    ours, theirs = torch.tensor(draws).median(0).values
    assert (ours <= (2 * theirs).clamp_min(torch.finfo(dtype).eps)).all(), (ours, theirs)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("widths", [(64, 64), (24, 8), (40, 256)])
@pytest.mark.parametrize("kind", ["random", "hubs", "long rows", "isolated nodes"])
def test_half_precision_errs_at_most_twice_as_much_as_torch(kind, widths, dtype, device):
    if device == "cpu" and widths == (40, 256):
        pytest.skip("takes long there, and shows nothing that narrow rows do not")
    check_half_precision(GRAPHS[kind](device), widths, dtype, p=0.0)


@EVERY_DEVICE
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2), (0, 4)])
def test_gradients_that_are_asked_for(wanted, device):
    graph = GRAPHS["hubs"](device)
    given = operands(graph, 64, 64, torch.float32)
    all_of_them = gradients(graph, given)[1:]
    for ours, i in zip(gradients(graph, given, wanted)[1:], wanted, strict=True):
        torch.testing.assert_close(ours, all_of_them[i], rtol=1e-6, atol=1e-6)


@EVERY_DEVICE
@pytest.mark.parametrize("kind", ["hubs", "a hub of many blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_bitwise_the_same_from_run_to_run(kind, dtype, p, device):
    graph = GRAPHS[kind](device)
    given, (options, _) = operands(graph, 64, 64, dtype), drawn(graph, p, 3)
    first = gradients(graph, given, **options)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(graph, given, **options), strict=True))


@EVERY_DEVICE
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_the_result_may_be_written_over(p, device):
    graph = GRAPHS["random"](device)
    given, (options, _) = operands(graph, 64, 64, torch.float32), drawn(graph, p, 3)
    leaves = [t.detach().requires_grad_() for t in given[:5]]
    out = pair_attention(graph, *leaves, SLOPE, **options)
    out.mul_(2)
    found = torch.autograd.grad(out, leaves, given[5] / 2)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(graph, given, **options)[1:], strict=True))


@EVERY_DEVICE
def test_batches_of_gradients(device):
    graph = GRAPHS["random"](device)
    given = operands(graph, 64, 64, torch.float32)
    leaves = [t.detach().requires_grad_() for t in given[:5]]
    out = pair_attention(graph, *leaves, SLOPE)
    grads = torch.stack([given[5], 2 * given[5]])
    together = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        each = torch.autograd.grad(out, leaves, grads[i], retain_graph=True)
        assert all(torch.equal(t[i], one) for t, one in zip(together, each, strict=True))


@EVERY_DEVICE
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_opcheck(p, device):
    graph = GRAPHS["random"](device)
    given = operands(graph, 64, 64, torch.float32)
    arrays, degrees = walks(graph)
    leaves = [t.detach().requires_grad_() for t in given[:5]]
    torch.library.opcheck(
        torch.ops.edgeless.pair_attention,
        (*leaves, arrays, edge_ids(graph), SLOPE, degrees, False, torch.tensor([5], device=device), p),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_gradients_in_float64():
    graph = GRAPHS["random"]("cpu")
    given = operands(graph, 7, 5)
    for ours, want in zip(gradients(graph, given), reference(graph, *given), strict=True):
        assert error(ours, want) <= 1e-10
    small = typed(8, 40, 3)
    leaves = [t.requires_grad_() for t in operands(small, 3, 2)[:5]]
    for options in ({}, drawn(small, 0.4, 2)[0]):
        assert torch.autograd.gradcheck(lambda *given, o=options: pair_attention(small, *given, SLOPE, **o), leaves)


def test_any_width_on_the_cpu():
    graph = GRAPHS["types without edges"]("cpu")
    for depth, width in ((1, 1), (3, 2), (5, 300)):
        given = operands(graph, depth, width, torch.float32)
        for ours, want in zip(gradients(graph, given), reference(graph, *given), strict=True):
            assert error(ours, want) <= 1e-5


def kernels_of(call):
    """The names of the kernels and copies that a call puts on the device."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.cuda
def test_few_launches_and_no_product_of_one_column():
    """With the edges' logits as a product of a column and one number, am spent a sixth of its time there."""
    graph = GRAPHS["random"]("cuda")
    given = operands(graph, 64, 64, torch.float32)
    leaves = [t.detach().requires_grad_() for t in given[:5]]
    with torch.no_grad():
        forward = kernels_of(lambda: pair_attention(graph, *leaves, SLOPE))
    assert len(forward) <= 5, forward
    both = kernels_of(lambda: gradients(graph, given))
    assert len(both) <= 5 + 14, both
    assert not [name for name in both if "gemmk1" in name or "scatter" in name or "elementwise" in name], both


@pytest.mark.cuda
def test_what_does_not_fit():
    graph = GRAPHS["random"]("cuda")
    x, weight, *others = operands(graph, 64, 64, torch.float32)[:5]
    assert fits(graph, x, weight, tuple(others))
    assert not fits(graph, x.double(), weight.double(), tuple(t.double() for t in others))
    assert not fits(graph, x.bfloat16(), weight, tuple(others))
    assert not fits(graph, x, torch.cat([weight] * 3, 2), tuple(others))
    assert not fits(graph, x, weight.unsqueeze(1), tuple(others))
    arrays, degrees = walks(graph)
    with pytest.raises(ValueError, match="walks must hold 18 tensors, got 17"):
        torch.ops.edgeless.pair_attention(x, weight, *others, arrays[1:], [], SLOPE, degrees)
    with pytest.raises(ValueError, match=r"query must have shape \[64, 1\], got \[64\]"):
        torch.ops.edgeless.pair_attention(x, weight, others[0].view(-1), *others[1:], arrays, [], SLOPE, degrees)


@EVERY_DEVICE
@pytest.mark.parametrize("changed,message", [
    ({"dropout": 1.5}, r"dropout must lie in \[0, 1\], got 1.5"),
    ({"seed": None}, "dropout needs a seed"),
    ({"seed": torch.tensor([1], dtype=torch.int32)}, "seed must be Long, got Int"),
    ({"edge_ids": []}, "edge_ids must hold 2 tensors, got 0"),
    ({"edge_ids": [torch.zeros(3).int()] * 2}, r"edge_ids must have shape \[1500\], got \[3\]"),
    ({"edge_ids": [torch.zeros(1500)] * 2}, "edge_ids must be Int, got Float"),
])  # fmt: skip
def test_bad_dropout_is_named(changed, message, device):
    graph = GRAPHS["random"](device)
    arrays, degrees = walks(graph)
    options = {"edge_ids": edge_ids(graph), "seed": torch.tensor([1]), "dropout": 0.5, **changed}
    options["edge_ids"] = [t.to(device) for t in options["edge_ids"]]
    options["seed"] = None if options["seed"] is None else options["seed"].to(device)
    given, ids = operands(graph, 64, 64, torch.float32)[:5], options.pop("edge_ids")
    with pytest.raises(ValueError, match=message):
        torch.ops.edgeless.pair_attention(*given, arrays, ids, SLOPE, degrees, **options)
