"""The op of a layer over relations, and the product that it adds in place, against the ops that they are made of."""

import pytest
import torch
from attention_cases import assert_close, error
from test_relational_sum import typed
from test_typed_mm import device, leaf, on_cpu  # noqa: F401  device: where all tensors here are made

import edgeless
from edgeless import TypedGraph, functional
from edgeless.functional import relational
from edgeless.functional.relational_layer import relational_layer

ops = torch.ops.edgeless
K, M = 24, 40  # whole vectors of 16 bytes, which the kernels on CUDA want


@pytest.fixture(params=["aggregate", "transform"])
def order(request, monkeypatch):
    monkeypatch.setattr(edgeless.functional.relational_layer, "transforms", lambda *_: request.param == "transform")
    return request.param


def inputs(graph, own=True, root=True, bias=True, dtype=torch.float64, k=K, m=M):
    given = {
        "x": leaf(graph.num_src, k, dtype=dtype),
        "weight": leaf(graph.num_types, k, m, dtype=dtype, seed=1),
        "own": leaf(graph.num_dst, 17, dtype=dtype, seed=2) if own and root else None,
        "root": leaf(17 if own else k, m, dtype=dtype, seed=3) if root else None,
        "bias": leaf(m, dtype=dtype, seed=4) if bias else None,
    }
    return {name: t for name, t in given.items() if t is not None}


def parts(graph, x, weight, edge_weight=None, own=None, root=None, bias=None, reduce="sum"):
    with edgeless.backend("reference"):
        out = functional.relational_sum(graph, x, weight, edge_weight, reduce=reduce)
    if root is not None:
        out = out + (x[: graph.num_dst] if own is None else own) @ root
    return out if bias is None else out + bias


def with_gradients(out, given):
    grad = leaf(*out.shape, dtype=out.dtype, seed=9).detach()
    return [out, *torch.autograd.grad(out, list(given.values()), grad)]


@pytest.mark.parametrize("kind", ["square", "bipartite", "hub"])
@pytest.mark.parametrize("own,root,bias", [
    (False, True, True), (True, True, True), (True, True, False), (False, False, True), (False, False, False),
])  # fmt: skip
def test_values_and_gradients(kind, own, root, bias, order):
    graph = typed(kind)
    given = inputs(graph, own or graph.num_dst > graph.num_src, root, bias)
    weights = leaf(graph.num_edges, seed=5).detach()
    for reduce in ("sum", "mean"):
        for edge_weight in (None, weights):
            options = {"edge_weight": edge_weight, "reduce": reduce}
            found = relational_layer(graph, **given, **options, out_dtype=torch.float64)
            want = parts(graph, **given, **options)
            assert "RelationalLayer" in found.grad_fn.name()
            assert_close(with_gradients(found, given), with_gradients(want, given), 1e-10)
            with torch.no_grad():
                assert torch.equal(relational_layer(graph, **given, **options, out_dtype=torch.float64), found)


@pytest.mark.parametrize("width", [16, 64, 7])
@pytest.mark.parametrize("own", [True, False])
def test_floats_of_every_width(width, own, order):
    graph = typed("square")
    given = inputs(graph, own, dtype=torch.float32, k=width, m=width)
    found = with_gradients(relational_layer(graph, **given, out_dtype=torch.float32), given)
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    assert_close(found, [t.float() for t in with_gradients(parts(graph, **wide), wide)], 1e-5)


@pytest.mark.parametrize("which", ["x", "weight", "own", "root", "bias"])
def test_only_what_needs_a_gradient_gets_one(which, order):
    graph = typed("bipartite")
    given = inputs(graph)
    want = torch.autograd.grad(parts(graph, **given).square().sum(), given[which])
    given = {name: t.detach().requires_grad_(name == which) for name, t in given.items()}
    found = relational_layer(graph, **given, out_dtype=torch.float64)
    assert_close(torch.autograd.grad(found.square().sum(), given[which]), want, 1e-10)


def test_the_first_sources_are_the_destinations(order):
    edges = torch.tensor([[0, 5, 6, 2, 6], [0, 1, 1, 2, 2]])
    graph = TypedGraph.from_edge_index(edges, torch.tensor([0, 1, 2, 0, 1]), 3, 7, 3)
    given = inputs(graph, own=False)
    found = relational_layer(graph, **given, out_dtype=torch.float64)
    assert_close(with_gradients(found, given), with_gradients(parts(graph, **given), given), 1e-10)
    weight = leaf(graph.num_edges, seed=5)  # with a gradient, for which the layer is made of other ops
    found = relational_layer(graph, **given, edge_weight=weight, out_dtype=torch.float64)
    assert "RelationalLayer" not in found.grad_fn.name()
    assert_close(with_gradients(found, given), with_gradients(parts(graph, **given, edge_weight=weight), given), 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_half_precision_errs_at_most_twice_as_much_as_torch(dtype, wide, own, order):
    graph = typed("hub")
    given = inputs(graph, own, dtype=dtype)
    out_dtype = torch.float32 if wide else dtype
    src, dst = graph.graph.edge_index()

    def plain(x, weight, root, bias, own=None):
        messages = torch.bmm(x[src].unsqueeze(1), weight[graph.edge_type]).squeeze(1).to(out_dtype)
        out = messages.new_zeros(graph.num_dst, M).index_add(0, dst, messages)
        return out + (x[: graph.num_dst] if own is None else own) @ root + bias

    found = relational_layer(graph, **given, out_dtype=out_dtype)
    assert found.dtype == out_dtype
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    grad = leaf(graph.num_dst, M, seed=9).detach()
    results = []
    for out, leaves in ((found, given), (plain(**given), given), (parts(graph, **exact), exact)):
        results.append([out, *torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))])
    for ours, stock, truth, leaf_ in zip(*results, [None, *given.values()], strict=True):
        assert leaf_ is None or ours.dtype == dtype
        assert error(ours, truth) <= 2 * error(stock, truth)


def test_a_gradient_that_is_no_rows_in_memory(order):
    graph = typed("square")
    given = inputs(graph, own=False)
    for grad in (torch.ones(1, 1, dtype=torch.float64).expand(graph.num_dst, M), leaf(M, graph.num_dst).detach().t()):
        found, want = (
            torch.autograd.grad(out, list(given.values()), grad)
            for out in (relational_layer(graph, **given, out_dtype=torch.float64), parts(graph, **given))
        )
        assert_close(found, want, 1e-10)


def test_gradcheck(order):
    graph = TypedGraph.from_edge_index(
        torch.tensor([[0, 1, 2, 2, 3, 3, 0], [0, 0, 1, 2, 2, 2, 0]]), torch.tensor([0, 1, 0, 2, 2, 0, 0]), 4, 5, 4
    )
    given = inputs(graph, own=False, k=4, m=3)
    names = list(given)

    def layer(*tensors):
        return relational_layer(graph, **dict(zip(names, tensors, strict=True)), reduce="mean", out_dtype=torch.float64)

    assert torch.autograd.gradcheck(layer, list(given.values()))


def test_results_may_be_written_over(order):
    graph = typed("square")
    given = inputs(graph, own=False)
    found = torch.relu_(relational_layer(graph, **given, out_dtype=torch.float64))
    assert_close(with_gradients(found, given), with_gradients(torch.relu(parts(graph, **given)), given), 1e-10)


def test_nothing_but_the_inputs_is_saved(order):
    graph = typed("square")
    given = inputs(graph, own=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        relational_layer(graph, **given, out_dtype=torch.float64)
    floating = {t.data_ptr() for t in saved if t.is_floating_point()}
    assert floating == {given[name].data_ptr() for name in ("x", "weight", "root")}


def test_weights_of_edges_with_a_gradient_go_to_the_parts():
    graph = typed("square")
    given = {**inputs(graph, own=False), "edge_weight": leaf(graph.num_edges, seed=5)}
    found = relational_layer(graph, **given, out_dtype=torch.float64)
    assert_close(with_gradients(found, given), with_gradients(parts(graph, **given), given), 1e-10)
    with pytest.raises(ValueError, match="relational_layer: edge_weight must not need a gradient"):
        x, weight, edge_weight = given["x"], given["weight"], given["edge_weight"]
        ops.relational_layer(
            x, weight, edge_weight, None, None, None, graph.by_dst, [], [], [], graph.num_dst, torch.float64
        )


def test_other_dtypes_go_to_the_parts():
    graph = typed("square")
    given = inputs(graph, own=False, dtype=torch.float32)
    out = relational_layer(graph, **given, out_dtype=torch.float64)
    assert out.dtype == torch.float64
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    assert error(out, parts(graph, **wide)) < 1e-5


def test_the_same_bits_every_time(order):
    graph = typed("hub")
    given = inputs(graph, own=False, dtype=torch.float32)
    first, again = (with_gradients(relational_layer(graph, **given, out_dtype=torch.float32), given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_batches_of_gradients(order):
    graph = typed("square")
    given = inputs(graph, own=False)
    out, leaves = relational_layer(graph, **given, out_dtype=torch.float64), list(given.values())
    batch = torch.randn(3, *out.shape, dtype=torch.float64)
    found = torch.autograd.grad(out, leaves, batch, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(batch):
        one = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        assert all(torch.equal(a[i], b) for a, b in zip(found, one, strict=True))


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
def test_opcheck():
    graph = typed("bipartite")
    x, weight, own, root, bias = inputs(graph).values()
    edge_weight, num_dst = leaf(graph.num_edges).detach(), graph.num_dst
    pairs, edges = graph.compact
    whole = (graph.by_dst, graph.by_src, [], [])
    split = (pairs.by_dst, pairs.by_src, edges.csr_arrays(True), edges.csc_arrays(True))
    grad = leaf(num_dst, M).detach()
    for arrays in (whole, split):
        for given in ((own, root, bias), (own, root, None), (None, None, bias)):
            args = (x, weight, edge_weight, *given, *arrays, num_dst, torch.float64)
            torch.library.opcheck(ops.relational_layer, args)
        flat = [t.detach() for t in (x, weight, edge_weight, own, root)]
        for needs in ([True] * 5, [False, True, False, True, False]):
            torch.library.opcheck(ops.relational_layer_backward, (grad, *flat, *arrays, needs))
    torch.library.opcheck(ops.project_onto, (grad.clone(), own.detach(), root.detach().t(), bias.detach()))


def test_compiles_whole():
    graph = typed("square")
    given = inputs(graph, own=False)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda given: relational_layer(graph, **given, reduce="mean", out_dtype=torch.float64),
        fullgraph=True,
        backend="aot_eager",
    )
    found, want = compiled(given), parts(graph, **given, reduce="mean")
    assert_close(with_gradients(found, given), with_gradients(want, given), 1e-10)


def test_the_order_is_chosen_once(monkeypatch):
    graph, weight, chosen = typed("hub"), leaf(5, 64, 4), []
    monkeypatch.setattr(relational, "choose_order", lambda *_: chosen.append(1) or "transform")
    assert relational.transforms(graph, weight) and relational.transforms(graph, weight)
    assert len(chosen) == 1


def call(graph, **changed):
    given = {**inputs(graph), "edge_weight": None, **changed}
    names = ("x", "weight", "edge_weight", "own", "root", "bias")
    arrays = (graph.by_dst, graph.by_src, [], [])
    return ops.relational_layer(*(given[name] for name in names), *arrays, graph.num_dst, torch.float64)


@on_cpu
@pytest.mark.parametrize("changed,message", [
    ({"own": None}, r"root must have shape \[24, 40\], got \[17, 40\]"),
    ({"root": None}, "own must come with root"),
    ({"own": torch.zeros(3, 17, dtype=torch.float64)}, r"own must have shape"),
    ({"bias": torch.zeros(3, dtype=torch.float64)}, r"bias must have shape \[40\], got \[3\]"),
    ({"bias": torch.zeros(40)}, "bias must be"),
    ({"x": torch.zeros(50, 3, dtype=torch.float64)}, r"x must have shape"),
])  # fmt: skip
def test_bad_input_is_named(changed, message):
    with pytest.raises(ValueError, match=f"relational_(layer|sum): {message}"):
        call(typed("bipartite"), **changed)


def test_the_sources_cannot_stand_for_more_destinations():
    edges = torch.tensor([[0, 2, 1, 2], [0, 5, 6, 2]])
    graph = TypedGraph.from_edge_index(edges, torch.tensor([0, 1, 1, 0]), 2, 3, 7)
    given = inputs(graph, own=False)
    with pytest.raises(ValueError, match="own must be given, for there are more destinations, 7, than sources, 3"):
        relational_layer(graph, **given, out_dtype=torch.float64)


@pytest.mark.parametrize("rows,depth,width", [(1, 16, 32), (300, 64, 64), (1000, 40, 72), (5, 3, 7), (0, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_product_is_added_in_place(rows, depth, width, dtype, transposed):
    x = leaf(rows, depth, dtype=dtype).detach()
    shape = (depth, width) if transposed else (width, depth)
    weight = leaf(*shape, dtype=dtype, seed=1).detach()
    weight = weight.t() if transposed else weight
    bias = leaf(width, dtype=dtype, seed=2).detach()
    for to_dtype in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
        for row in (bias, None):
            to = leaf(rows, width, dtype=to_dtype, seed=3).detach()
            want = to.double() + x.double() @ weight.double().t() + (0 if row is None else row.double())
            before = to.data_ptr()
            assert ops.project_onto(to, x, weight, row) is None
            assert to.data_ptr() == before
            tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 1e-2)
            assert rows == 0 or error(to, want) < tolerance
