"""RGATConv against the stock layer: mechanisms, modifications, heads, weights, edge features, attention."""

import copy
import re

import pytest
import torch
import torch_geometric.nn as stock
from devices import EVERY_DEVICE
from pyg_cases import GRAPHS, assert_close, edge_features, features, random_edges, run, run_exact, run_fused
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import edgeless
import edgeless.pyg.nn as fused
from edgeless import TypedGraph

IN, OUT, R = 6, 4, 5
ADDITIVE, MULTIPLICATIVE = {}, {"attention_mode": "multiplicative-self-attention", "dim": 2}
EVERY_MODE = pytest.mark.parametrize("mode", [ADDITIVE, MULTIPLICATIVE], ids=["additive", "multiplicative"])
SQUARE = [name for name, (_, num_src, num_dst) in GRAPHS.items() if num_src == num_dst and num_src > 0]


@pytest.fixture(autouse=True)
def pairs_of_the_edges(monkeypatch):
    """These graphs are so small that tests of the pairs that edges have must ask for them (see test_pyg_every_pair)."""
    monkeypatch.setattr(fused.rgat_conv, "pays", lambda *_: False)


def types_of(graph, dtype=torch.int64):
    generator = torch.Generator().manual_seed(31)
    return torch.randint(R - 1, (graph[0].size(1),), generator=generator).to(dtype)


def layer_pair(dtype=torch.float32, seed=5, **options):
    options.setdefault("heads", 2)
    theirs, ours = stock.RGATConv(IN, OUT, R, **options), fused.RGATConv(IN, OUT, R, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype)


def assert_parity(graph, dtype=torch.float32, edge_attr=None, attention=None, **options):
    theirs, ours = layer_pair(dtype, **options)
    x, edge_type = features(graph[1], IN, dtype), types_of(graph)
    inputs = (x, graph[0], edge_type, edge_attr, None, attention)
    # Gradients of the map of degrees cancel: float32 itself is off by more than the tolerance in one or the other.
    expected = run_exact(theirs, *inputs) if dtype == torch.float32 else run(theirs, theirs, *inputs)
    assert_close(with_one_map(run_fused(ours, *inputs)), with_one_map(expected))


def with_one_map(results):
    """With the gradients of both layers of the map of degrees as one vector."""
    parts = [results.pop(f"grad of {name}", None) for name in ("l1", "b1", "l2", "b2")]
    there = [part.flatten() for part in parts if part is not None]
    return {**results, "grad of the map of degrees": torch.cat(there) if there else None}


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EVERY_MODE
def test_every_graph(kind, mechanism, dtype, mode):
    assert_parity(GRAPHS[kind], dtype, attention_mechanism=mechanism, **mode)


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("mod", [None, "additive", "scaled", "f-additive", "f-scaled"])
@pytest.mark.parametrize("weights", [{}, {"num_bases": 3}, {"num_blocks": 2}])
@pytest.mark.parametrize(
    "heads,concat,mode",
    [(1, True, {}), (2, True, {}), (2, False, {}), (3, True, {}), (2, False, MULTIPLICATIVE),
     (3, True, {**MULTIPLICATIVE, "dim": 1})],
)  # fmt: skip
def test_every_option(mechanism, mod, weights, heads, concat, mode):
    options = {"attention_mechanism": mechanism, "mod": mod, "concat": concat, **weights, **mode}
    graph = GRAPHS["random"]
    for dtype in (torch.float32, torch.float64):
        assert_parity(graph, dtype, heads=heads, **options)
        if mod == "scaled" and dtype == torch.float32:
            continue  # with these edge features gradients of l1 and b1 cancel to a thousandth: float64 can tell
        edge_attr = edge_features(graph, 3, dtype)
        assert_parity(graph, dtype, heads=heads, edge_dim=3, edge_attr=edge_attr, **options)


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("heads", [4, 8, 9])
@pytest.mark.parametrize("weights", [{}, {"num_blocks": 2}])
def test_many_heads(mechanism, heads, weights):
    for dtype in (torch.float32, torch.float64):
        assert_parity(GRAPHS["random"], dtype, heads=heads, attention_mechanism=mechanism, **weights)


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@EVERY_MODE
def test_layers_of_other_heads_over_one_graph(mechanism, mode):
    """What is kept with the graph is of one number of heads."""
    graph = GRAPHS["random"]
    inputs = features(graph[1], IN, torch.float64), graph[0], types_of(graph)
    for heads in (2, 3, 2):
        theirs, ours = layer_pair(torch.float64, heads=heads, attention_mechanism=mechanism, **mode)
        assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("heads", [1, 8])
@EVERY_MODE
def test_gradients_of_what_asks_for_them(heads, mode):
    graph = GRAPHS["random"]
    _, ours = layer_pair(heads=heads, **mode)
    x, edge_type = features(40, IN), types_of(graph)
    everything = run_fused(ours, x, graph[0], edge_type)
    for names in (["q"], ["k"], ["weight"], ["bias"], []):
        given = x.clone().requires_grad_(not names)
        for name, parameter in ours.named_parameters():
            parameter.requires_grad_(name in names)
        wanted = [getattr(ours, name) for name in names] or [given]
        generator = torch.Generator().manual_seed(23)
        with edgeless.backend("fused"):
            out = ours(given, graph[0], edge_type)
        loss = (out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
        keys = [f"grad of {name}" for name in names] or ["grad of input[0]"]
        found = dict(zip(keys, torch.autograd.grad(loss, wanted), strict=True))
        assert_close(found, {key: everything[key] for key in keys})


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
def test_batches_of_gradients(mechanism):
    graph = GRAPHS["random"]
    _, ours = layer_pair(attention_mechanism=mechanism)
    x, grads = features(40, IN).requires_grad_(), features(3 * 40, 2 * OUT, seed=29).view(3, 40, -1)
    wanted = [x, ours.q, ours.k, ours.weight]
    out = ours(x, graph[0], types_of(graph))
    together = torch.autograd.grad(out, wanted, grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, wanted, grad, retain_graph=True) for grad in grads]
    for i, found in enumerate(together):
        torch.testing.assert_close(found, torch.stack([one[i] for one in each]), rtol=1e-5, atol=1e-6)


class _Ops(TorchDispatchMode):
    """The names of the ops that run inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("heads", [1, 8])
@EVERY_MODE
def test_nothing_is_added_by_atomics_and_nothing_is_sorted_again(mechanism, heads, mode):
    graph = GRAPHS["random"]
    _, ours = layer_pair(heads=heads, attention_mechanism=mechanism, **mode)
    inputs = features(40, IN), graph[0], types_of(graph)
    with edgeless.backend("fused"), torch.no_grad():
        ours(*inputs)
        with _Ops() as inference:
            ours(*inputs)
    run_fused(ours, *inputs)
    with _Ops() as ops:
        run_fused(ours, *inputs)
    words = (
        "index_add",
        "index_put",
        "scatter",
        "embedding_dense",
        "csr_transpose",
        "coo_to_csr",
        "typed_edges",
        "eye",
    )
    assert "edgeless::attention" in ops.names & inference.names
    assert not [name for name in ops.names | inference.names if any(f"::{word}" in name for word in words)]


@pytest.mark.cuda
@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_MODE
def test_bitwise_the_same_from_run_to_run_on_cuda(mechanism, heads, dtype, mode):
    generator = torch.Generator().manual_seed(3)
    edge_index = torch.randint(500, (2, 100_000), generator=generator).cuda()  # so many that atomics would meet
    edge_type = torch.randint(R, (100_000,), generator=generator).cuda()
    _, ours = layer_pair(dtype, heads=heads, attention_mechanism=mechanism, **mode)
    ours, x = ours.cuda(), features(500, IN, dtype).cuda().requires_grad_()
    wanted = [x, ours.q, ours.k, ours.weight, ours.bias]
    grad = features(500, ours.bias.numel(), dtype, seed=23).cuda()
    runs = []
    with edgeless.backend("fused"):
        for _ in range(5):
            out = ours(x, edge_index, edge_type)
            runs.append([out, *torch.autograd.grad(out, wanted, grad)])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@EVERY_MODE
def test_returned_attention_and_edge_features_of_one_number(mechanism, mode):
    graph, options = GRAPHS["random"], {"attention_mechanism": mechanism, **mode}
    for attention in (True, False):
        for mod in (None, "f-additive"):
            assert_parity(graph, attention=attention, mod=mod, **options)
    assert_parity(graph, edge_dim=1, edge_attr=edge_features(graph, 1).squeeze(1), **options)
    assert_parity(graph, edge_dim=3, bias=False, **options)


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@EVERY_MODE
def test_f_additive_counts_edges_of_the_least_weight(mechanism, mode):
    """The stock layer adds 1 to a weight that is more than 0, which float32 rounds to 0 where float64 does not."""
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(mod="f-additive", attention_mechanism=mechanism, heads=1, **mode)
    x, edge_type = features(40, IN) * 8, types_of(graph)
    with torch.no_grad():
        for layer in (theirs, ours):
            layer.k.mul_(2 if mode else 20)
    rounded, (_, weights) = theirs(x, graph[0], edge_type, return_attention_weights=True)
    exact, (_, truth) = copy.deepcopy(theirs).double()(x.double(), graph[0], edge_type, return_attention_weights=True)
    assert (weights == 0).any() and (truth > 0).all()
    with edgeless.backend("fused"):
        found = ours(x, graph[0], edge_type)
    assert (found - exact).norm() <= 1e-4 * exact.norm() < 1e-2 * (rounded - exact).norm()


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
def test_edge_features_of_no_edges(mechanism):
    graph = GRAPHS["no_edges"]
    theirs, ours = layer_pair(attention_mechanism=mechanism, edge_dim=3)
    x, attr = features(graph[1], IN), torch.empty(0, 3)
    with edgeless.backend("fused"):
        torch.testing.assert_close(ours(x, graph[0], types_of(graph), attr), theirs(x, graph[0], types_of(graph), attr))


def test_other_kinds_of_graphs():
    graph = GRAPHS["random"]
    theirs, ours = layer_pair()
    x, edge_type = features(40, IN), types_of(graph)
    expected = run(theirs, theirs, x, graph[0], edge_type)
    handle = edgeless.Graph.from_edge_index(graph[0], 40, 40)
    for inputs in ((x, handle, edge_type), (x, TypedGraph(handle, edge_type, R)), (x, graph[0].int(), edge_type.int())):
        assert_close(run_fused(ours, *inputs), expected)
        with edgeless.backend("reference"):
            assert_close(run(ours, ours, *inputs), expected)


@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@EVERY_MODE
def test_dropout_has_the_rate_and_keeps_the_scale(mechanism, mode):
    graph = GRAPHS["hub"]
    _, ours = layer_pair(dropout=0.5, attention_mechanism=mechanism, **mode)
    x, edge_type = features(300, IN), types_of(graph)
    exact = ours.eval()(x, graph[0], edge_type)[0]
    ours.train()
    with edgeless.backend("fused"):
        mean = torch.stack([ours(x, graph[0], edge_type)[0] for _ in range(400)]).mean(0)
    assert (mean - exact).norm() <= 0.1 * exact.norm()


@pytest.mark.parametrize("mod", ["additive", "scaled", "f-additive", "f-scaled"])
@EVERY_MODE
def test_a_modified_attention_is_not_dropped(mod, mode):
    """The stock layer's constructor takes no dropout beside a modification, but the attribute can be set."""
    graph = GRAPHS["random"]
    theirs, ours = (layer.train() for layer in layer_pair(torch.float64, mod=mod, **mode))
    theirs.dropout = ours.dropout = 0.5
    inputs = features(graph[1], IN, torch.float64), graph[0], types_of(graph)
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("mode", [ADDITIVE, {"mod": "f-additive"}, MULTIPLICATIVE], ids=str)
def test_half_precision_errs_at_most_twice_as_much(dtype, mechanism, mode):
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(dtype, attention_mechanism=mechanism, **mode)
    x, edge_type = features(40, IN, dtype), types_of(graph)
    exact_layer = copy.deepcopy(theirs).double()
    exact = run(exact_layer, exact_layer, x.double(), graph[0], edge_type)
    found, stocks = run_fused(ours, x, graph[0], edge_type), run(theirs, theirs, x, graph[0], edge_type)
    for key, want in exact.items():
        if want is None:
            continue
        errors = [float((t[key].double() - want).norm() / want.norm()) for t in (found, stocks)]
        assert found[key].dtype == stocks[key].dtype and errors[0] <= 2 * errors[1] + 1e-6, (key, errors)


@pytest.mark.parametrize("mechanism,share", [("across-relation", 0.6), ("within-relation", 1.0)])
def test_rounded_logits_change_their_sign_less_often_than_the_stock_layers(mechanism, share):
    """Where the LeakyReLU's slope is another, gradients of edge_attr are far off, so their mean counts the signs."""
    graph, errors = GRAPHS["random"], []
    for seed in range(40):
        theirs, ours = layer_pair(torch.bfloat16, attention_mechanism=mechanism, edge_dim=3, seed=seed)
        inputs = [features(40, IN, torch.bfloat16), graph[0], types_of(graph)]
        attr = edge_features(graph, 3, torch.bfloat16)
        exact = copy.deepcopy(theirs).double()
        runs = []
        for layer, dtype in ((exact, torch.float64), (ours, torch.bfloat16), (theirs, torch.bfloat16)):
            leaf = attr.detach().to(dtype).requires_grad_()
            with edgeless.backend("auto" if layer is not ours else "fused"):
                out = layer(inputs[0].to(dtype), *inputs[1:], leaf)
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            runs.append(torch.autograd.grad((out.double() * weights).sum(), leaf)[0].double())
        errors.append([float((t - runs[0]).norm() / runs[0].norm()) for t in runs[1:]])
    ours, stocks = torch.tensor(errors).mean(0).tolist()
    assert ours <= share * stocks, (ours, stocks)


def _autocast_results(layer, inputs, attr, device, dtype, autocast, **chosen):
    """Output, attention and gradients; under autocast unless that is None."""
    layer = copy.deepcopy(layer).to(device, dtype)
    x, edge_index, edge_type = (t.detach().to(device) for t in inputs)
    x = x.to(dtype).requires_grad_()
    leaves = [x] if attr is None else [x, attr.detach().to(device, dtype).requires_grad_()]
    with edgeless.backend(chosen.get("backend", "auto")):
        with torch.autocast(device, autocast, enabled=autocast is not None):
            out, (_, alpha) = layer(x, edge_index, edge_type, *leaves[1:], return_attention_weights=True)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(device)
        wanted = [*leaves, *layer.parameters()]
        grads = torch.autograd.grad((out.double() * weights).sum(), wanted, allow_unused=True)
    return [None if t is None else t.detach().cpu() for t in (out, alpha, *grads)]


@EVERY_DEVICE
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"mod": "additive"}, {"mod": "scaled"}, {"mod": "f-scaled", "bias": False},
     {"num_bases": 2, "concat": False}, {"num_blocks": 2, "edge_dim": 3}, {"mod": "f-additive"}, MULTIPLICATIVE,
     {**MULTIPLICATIVE, "edge_dim": 3}],
)  # fmt: skip
def test_autocast(options, mechanism, autocast, device):
    """Dtypes as stock under autocast; the numbers as far from float64 as stock, at most twice, in the median."""
    if device == "cuda" and mechanism == "within-relation":
        pytest.skip("the stock layer writes a float32 softmax into 16 bits, which torch refuses")
    graph, errors = GRAPHS["random"], []
    inputs = features(40, IN), graph[0], types_of(graph)
    attr = edge_features(graph, 3) if "edge_dim" in options else None
    for seed in range(9):
        theirs, ours = layer_pair(attention_mechanism=mechanism, seed=seed, **options)
        exact = _autocast_results(theirs, inputs, attr, "cpu", torch.float64, None)
        want = _autocast_results(theirs, inputs, attr, device, torch.float32, autocast)
        found = _autocast_results(ours, inputs, attr, device, torch.float32, autocast, backend="fused")
        assert [t is None or t.dtype for t in found] == [t is None or t.dtype for t in want]
        kept = [i for i, t in enumerate(exact) if t is not None and t.norm() > 0]
        errors.append(
            [[float((t[i].double() - exact[i]).norm() / exact[i].norm()) for i in kept] for t in (found, want)]
        )
    ours, stocks = torch.tensor(errors).median(0).values
    assert (ours <= (2 * stocks).clamp_min(torch.finfo(autocast).eps)).all(), (ours, stocks)


def test_bitwise_the_same_from_run_to_run():
    graph = GRAPHS["random"]
    _, ours = layer_pair()
    first, second = (run_fused(ours, features(40, IN), graph[0], types_of(graph)) for _ in range(2))
    assert all(a is b or torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))


@pytest.mark.parametrize("mechanism,options", [
    ("across-relation", {"mod": "additive"}),
    ("within-relation", {"mod": "f-additive"}),
    ("across-relation", MULTIPLICATIVE),
    ("within-relation", {"heads": 8, "num_bases": 3, "edge_dim": 3}),
], ids=str)  # fmt: skip
def test_compiles_whole(mechanism, options, fresh_dynamo):
    graph, dtype = GRAPHS["random"], torch.float64
    x, edge_type = features(graph[1], IN, dtype), types_of(graph)
    attr = edge_features(graph, 3, dtype) if "edge_dim" in options else None
    theirs, ours = layer_pair(dtype, attention_mechanism=mechanism, **options)
    typed = TypedGraph.from_edge_index(graph[0], edge_type, R, graph[1], graph[2])
    expected = run(theirs, theirs, x, graph[0], edge_type, attr)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with edgeless.backend("fused"):
        for edges in ((graph[0], edge_type), (typed, None), (typed, None)):  # which keeps what the program sorted
            assert_close(run(compiled, ours, x, *edges, attr), expected)


def test_no_recompile_for_every_number_of_edges(fresh_dynamo):
    theirs, ours = layer_pair()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for i in range(5):
        num_nodes, num_edges = 40 + 3 * i, 100 + 17 * i
        inputs = features(num_nodes, IN), random_edges(num_nodes, num_nodes, num_edges, seed=i)
        inputs += (torch.arange(num_edges) % R,)
        with edgeless.backend("fused"):
            torch.testing.assert_close(compiled(*inputs), theirs(*inputs))
    assert counter.frame_count <= 2  # once with fixed, once with dynamic sizes


def test_accelerate_and_state():
    torch.manual_seed(3)
    theirs = stock.RGATConv(IN, OUT, R)
    edgeless.accelerate(theirs)
    assert type(theirs) is fused.RGATConv
    graph = GRAPHS["random"]
    assert edgeless.explain(theirs, features(40, IN), graph[0], types_of(graph))


def test_refusals_are_said_in_words():
    graph = GRAPHS["random"]
    x, edge_type = features(40, IN), types_of(graph)
    for options, inputs, words in (
        ({"mod": "another"}, (x, graph[0], edge_type), "mod is 'another'"),
        ({}, (x[:, 1:], graph[0], edge_type), r"x is no plain floating tensor \[N, 6\]"),
        ({}, (x, graph[0], edge_type[1:]), "edge_type is not an int64 or int32 tensor"),
        ({}, (x, graph[0], edge_type, edge_features(graph, 3)), "edge_attr is given to a layer without edge_dim"),
        ({}, (x, graph[0], edge_type, None, (40, 39)), r"size is \(40, 39\)"),
    ):
        _, ours = layer_pair(**options)
        assert re.search(words, str(edgeless.explain(ours, *inputs))), words
    theirs, ours = layer_pair(mod="another")
    assert_close(run(ours, ours, x, graph[0], edge_type), run(theirs, theirs, x, graph[0], edge_type))
