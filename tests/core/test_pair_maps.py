"""Keys and values of pairs of a source and a type against plain PyTorch: layouts, dtypes, gradients, bad input."""

import pytest
import torch
from attention_cases import GRAPHS, assert_close, error
from devices import EVERY_WAY, assert_same_bits
from test_relational_sum import typed
from test_typed_mm import device, leaf, on_cpu  # noqa: F401  device: where all tensors here are made

import edgeless
from edgeless import functional
from edgeless.functional import pair_maps
from edgeless.functional.pair_maps import pair_maps as maps

ops = torch.ops.edgeless
NAMES = ("rows", "k_weight", "v_weight", "k_scale")
# Where k and v lie in their rows, in widths, and how many widths there are; None: they are tensors of their own.
LAYOUTS = {"with queries between": (0, 2, 3), "side by side": (1, 2, 3), "values first": (2, 0, 3), "apart": None}


def inputs(graph, heads=2, width=16, out=24, layout="with queries between", dtype=torch.float64, weights=None):
    places = LAYOUTS[layout] or (0, 1, 2)
    return {
        "rows": leaf(graph.num_src, heads * width * places[2], dtype=dtype),
        "k_weight": leaf(graph.num_types, heads, width, out, dtype=weights or dtype, seed=1),
        "v_weight": leaf(graph.num_types, heads, width, out, dtype=weights or dtype, seed=2),
        "k_scale": leaf(graph.num_types, heads, dtype=weights or dtype, seed=3),
    }


def sides(rows, layout, width):
    """Keys and values of the nodes."""
    places = LAYOUTS[layout]
    k, v = (rows.narrow(1, place * width, width) for place in (places or (0, 1))[:2])
    return (k, v) if places else (k.clone(), v.clone())


def made(graph, rows, k_weight, v_weight, k_scale, layout="with queries between", function=maps):
    k, v = sides(rows, layout, k_weight.size(1) * k_weight.size(2))
    return function(graph.compact.pairs, k, v, k_weight, v_weight, k_scale)


def plain(pairs, k, v, k_weight, v_weight, k_scale):
    """A row at a time."""
    types, src = pairs.edge_type.long(), pairs.graph.csr.indices.long()
    heads = k_weight.size(1)
    keys, values = (t[src].unflatten(1, (heads, -1)).unsqueeze(2) for t in (k, v))
    keys = (keys @ (k_weight * k_scale[..., None, None]).to(k.dtype)[types]).flatten(1)
    return keys, (values @ v_weight.to(v.dtype)[types]).flatten(1)


def with_gradients(outs, given, wanted=NAMES):
    grads = [leaf(*out.shape, dtype=out.dtype, seed=8 + i).detach() for i, out in enumerate(outs)]
    return [*outs, *torch.autograd.grad(outs, [given[name] for name in wanted], grads)]


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(kind, layout):
    for index in (torch.int32, torch.int64):
        graph = typed(kind, dtype=index)
        for heads, dtype, tolerance in ((1, torch.float32, 1e-5), (2, torch.float32, 1e-5), (2, torch.float64, 1e-10)):
            given = inputs(graph, heads, layout=layout, dtype=dtype)
            found = made(graph, **given, layout=layout)
            assert "PairMaps" in found[0].grad_fn.name()
            exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
            want = with_gradients(made(graph, **exact, layout=layout, function=plain), exact)
            assert_close(with_gradients(found, given), want, tolerance)
            with torch.no_grad():
                again = made(graph, **given, layout=layout)
            assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


@pytest.mark.parametrize("width,out", [(64, 64), (7, 5), (8, 7), (4, 160), (136, 8)])
def test_every_width(width, out):
    graph = typed("hub")
    given = inputs(graph, 1, width, out, dtype=torch.float32)
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    want = with_gradients(made(graph, **exact, function=plain), exact)
    assert_close(with_gradients(made(graph, **given), given), want, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_errs_at_most_twice_as_much_as_torch(dtype, wide, layout):
    graph = typed("hub")
    given = inputs(graph, layout=layout, dtype=dtype, weights=torch.float32 if wide else None)
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    truth = with_gradients(made(graph, **exact, layout=layout, function=plain), exact)
    stock = with_gradients(made(graph, **given, layout=layout, function=plain), given)
    found = with_gradients(made(graph, **given, layout=layout), given)
    for ours, theirs, true in zip(found, stock, truth, strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, true) <= 2 * error(theirs, true)


@pytest.mark.parametrize("wanted", NAMES)
def test_only_what_needs_a_gradient_gets_one(wanted):
    graph = typed("square")
    given = inputs(graph, dtype=torch.float32)
    want = with_gradients(made(graph, **given, function=plain), given, [wanted])
    given = {name: t.detach().requires_grad_(name == wanted) for name, t in given.items()}
    assert_close(with_gradients(made(graph, **given), given, [wanted]), want, 1e-5)


def test_gradients_of_one_result_and_of_other_layouts():
    graph = typed("square")
    given = inputs(graph, dtype=torch.float32)
    leaves = list(given.values())
    for pick in (
        lambda k, v: k,
        lambda k, v: v,
        lambda k, v: k.square() + v,
        lambda k, v: (k.t() @ v).expand(2, -1, -1),
    ):
        found, want = (
            torch.autograd.grad(pick(*made(graph, **given, function=f)).sum(), leaves, allow_unused=True)
            for f in (maps, plain)
        )
        want = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(leaves, want, strict=True)]
        assert_close(found, want, 1e-5)


def attended(graph, rows, k_weight, v_weight, k_scale, function=maps, **options):
    heads = k_weight.size(1)
    keys, values = made(graph, rows, k_weight, v_weight, k_scale, function=function)
    q = rows.narrow(1, k_weight.size(1) * k_weight.size(2), keys.size(1))[: graph.num_dst]
    parts = (t.unflatten(1, (heads, -1)) for t in (q, keys, values))
    return functional.dot_attention(graph.compact.edges, *parts, **options)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_attention_over_them(donate, heads):
    """Whose gradients may take the place of the keys and values, side by side as these are."""
    graph = typed("square")
    given = inputs(graph, heads, 16, 16, dtype=torch.float32)
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    with edgeless.backend("reference"):
        want = with_gradients([attended(graph, **exact, function=plain)], exact)
    assert_close(with_gradients([attended(graph, **given, donate=donate)], given), want, 1e-5)


def gradients_of_pairs(graph, heads, width, dtype, between, infinite):
    """What pair_maps_backward is given, with the gradients of keys and values in one tensor."""
    pairs, given = graph.compact.pairs, inputs(graph, heads, width, width, dtype=dtype)
    k, v = sides(given.pop("rows").detach(), "with queries between", heads * width)
    grads = leaf(pairs.num_edges, (2 + between) * heads * width, dtype=dtype, seed=8).detach()
    if infinite:
        grads[3, 1] = grads[5, -1] = float("inf")
    side = heads * width
    of_pairs = grads[:, :side], grads[:, -side:]
    return *of_pairs, k, v, *(t.detach() for t in given.values()), pairs.by_dst, pairs.by_src


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("between", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads,width", [(1, 64), (2, 16), (3, 40), (2, 4), (1, 7), (1, 136), (5, 8)])
def test_gradients_written_over_those_of_pairs(heads, width, dtype, between, infinite, device):  # noqa: F811
    graph = typed("hub")
    args = gradients_of_pairs(graph, heads, width, dtype, between, infinite)
    needs, given = [True] * 5, [t.clone() for t in args[:2]]
    expected = ops.pair_maps_backward(*args, needs)
    assert all(torch.equal(a, b) for a, b in zip(args[:2], given, strict=True))
    found = ops.pair_maps_backward_over(*args, needs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    whole = dtype != torch.float64 and width * args[0].element_size() % 16 == 0
    written = device == "cuda" and whole and width <= 64
    assert all(torch.equal(a, b) is not written for a, b in zip(args[:2], given, strict=True))


@pytest.mark.parametrize("part", [lambda grad: grad, lambda grad: grad[:1], None])
def test_gradients_of_pairs_that_somebody_keeps_stay_as_they_are(part):
    graph = typed("hub")
    given = inputs(graph, 1, 16, 16, dtype=torch.float32)
    want = torch.autograd.grad(attended(graph, **given, donate=True).square().sum(), list(given.values()))
    out, kept = attended(graph, **given, donate=True).square().sum(), []

    def keep(grads):
        if part is not None:
            kept.extend((part(grad), part(grad).clone()) for grad in grads)

    nodes = [out.grad_fn]
    while "PairMaps" not in nodes[0].name():
        nodes += [node for node, _ in nodes.pop(0).next_functions if node is not None]
    nodes[0].register_prehook(keep)
    found = torch.autograd.grad(out, list(given.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert len(kept) == (0 if part is None else 2) and all(torch.equal(a, b) for a, b in kept)


def test_columns_of_one_tensor_are_multiplied_together(device):  # noqa: F811
    graph = typed("square")
    for layout in LAYOUTS:
        for dtype in (torch.float32, torch.float64):
            keys, values = made(graph, **inputs(graph, layout=layout, dtype=dtype), layout=layout)
            together = keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
            wanted = layout in ("with queries between", "side by side") and dtype == torch.float32
            assert together == (wanted and device == "cuda"), (layout, dtype)


def test_gradcheck():
    graph = typed("square")
    given = inputs(graph, 2, 3, 2)
    assert torch.autograd.gradcheck(lambda *tensors: made(graph, *tensors), list(given.values()))


def test_the_same_bits_every_time():
    graph = typed("hub")
    given = inputs(graph, dtype=torch.float32)
    first, again = (with_gradients(made(graph, **given), given) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
@EVERY_WAY
def test_streams_and_graphs(device, way):  # noqa: F811
    graph = typed("hub")
    given = inputs(graph, dtype=torch.float32)
    grads = [leaf(graph.compact.pairs.num_edges, 48, dtype=torch.float32, seed=seed).detach() for seed in (8, 9)]

    def step(*tensors):
        outs = made(graph, *tensors)
        return [t.detach() for t in (*outs, *torch.autograd.grad(outs, tensors, grads))]

    assert_same_bits(way, step, list(given.values()))


def test_batches_of_gradients():
    graph = typed("square")
    given = inputs(graph)
    keys, _ = made(graph, **given)
    batch, leaves = torch.randn(3, *keys.shape, dtype=keys.dtype), list(given.values())
    found = torch.autograd.grad(keys, leaves, batch, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(batch):
        one = torch.autograd.grad(keys, leaves, grad, retain_graph=True)
        assert_close([t[i] for t in found], one, 1e-12)


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
def test_opcheck():
    graph = typed("bipartite")
    pairs, given = graph.compact.pairs, inputs(graph, dtype=torch.float32, layout="apart")
    k, v = (t.detach().requires_grad_() for t in sides(given["rows"], "apart", 32))
    tensors = (k, v, given["k_weight"], given["v_weight"], given["k_scale"])
    torch.library.opcheck(ops.pair_maps, (*tensors, pairs.by_dst, pairs.by_src, False))
    grads = [leaf(pairs.num_edges, 48, dtype=torch.float32).detach() for _ in range(2)]
    flat = [t.detach() for t in tensors]
    # As HGTConv has them: columns of one tensor, and matrices that are kept by head, then by type.
    columns = [t.detach() for t in sides(inputs(graph, dtype=torch.float32)["rows"], "with queries between", 32)]
    columns += [t.transpose(0, 1).contiguous().transpose(0, 1) for t in flat[2:]]
    sides_of_grads = torch.cat(grads, 1).split(48, 1)
    for given in ((*grads, *flat), (*sides_of_grads, *columns)):
        for needs in ([True] * 5, [False, True, False, False, True]):
            for op in (ops.pair_maps_backward, ops.pair_maps_backward_over):
                torch.library.opcheck(op, (*given, pairs.by_dst, pairs.by_src, needs))


def test_compiles_whole():
    graph = typed("square")
    given = inputs(graph, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: made(graph, **given), fullgraph=True, backend="aot_eager")
    want = with_gradients(made(graph, **given, function=plain), given)
    assert_close(with_gradients(compiled(given), given), want, 1e-5)


def test_other_dtypes_go_to_the_parts(monkeypatch):
    graph = typed("square")
    given = inputs(graph, dtype=torch.float32)
    given["k_scale"] = leaf(graph.num_types, 2, dtype=torch.bfloat16, seed=3)
    found, function = [], pair_maps.relational_sum
    monkeypatch.setattr(pair_maps, "relational_sum", lambda *a, **k: (found.append(1), function(*a, **k))[1])
    assert_close(made(graph, **given), made(graph, **given, function=plain), 1e-5)
    assert len(found) == 2


@on_cpu
@pytest.mark.parametrize("changed,message", [
    ({"k": torch.zeros(40, 5)}, r"k must have shape \[40, 32\], got \[40, 5\]"),
    ({"v": torch.zeros(3, 32)}, r"v must have shape \[40, 32\], got \[3, 32\]"),
    ({"v": torch.zeros(40, 32, dtype=torch.float64)}, "v must be"),
    ({"k_weight": torch.zeros(5, 32, 24)}, r"k_weight must be \[types, H, K, M\], got shape \[5, 32, 24\]"),
    ({"v_weight": torch.zeros(4, 2, 16, 24)}, r"v_weight must have shape \[5, 2, 16, 24\], got \[4, 2, 16, 24\]"),
    ({"v_weight": torch.zeros(5, 2, 16, 24, dtype=torch.float64)}, "v_weight must be"),
    ({"k_scale": torch.zeros(5)}, r"k_scale must have shape \[5, 2\], got \[5\]"),
    ({"by_dst": []}, "by_dst must hold the 6 tensors of typed_edges, got 0"),
])  # fmt: skip
def test_bad_input_is_named(changed, message):
    graph = typed("square")
    tensors = inputs(graph, dtype=torch.float32)
    pairs = graph.compact.pairs
    k, v = sides(tensors.pop("rows"), "with queries between", 32)
    given = {"k": k, "v": v, **tensors, "by_dst": pairs.by_dst, "by_src": pairs.by_src, **changed}
    with pytest.raises(ValueError, match=f"pair_maps: {message}"):
        ops.pair_maps(*given.values(), True)
