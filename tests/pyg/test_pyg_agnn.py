"""AGNNConv against the stock layer: outputs and all gradients, kinds of graph, refusals, what users do to a layer."""

import copy
import inspect
import io
import itertools
import pickle

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import (
    GRAPHS,
    IN,
    assert_close,
    edge_features,
    features,
    node_features,
    random_edges,
    run,
    run_exact,
    run_fused,
)
from pyg_cases import run_over_reference as over_reference
from test_pyg_fallback import _renamed, assert_falls_back
from test_pyg_inputs import KINDS, SPARSE, WITH_TORCH_SPARSE, _csr, kinds
from torch._dynamo.testing import CompileCounterWithBackend

import edgeless
import edgeless.pyg.nn as fused

GRAPH = GRAPHS["random"]
INPUTS = (node_features(GRAPH), GRAPH[0])
SQUARE = [name for name, (_, num_src, num_dst) in GRAPHS.items() if num_src == num_dst]
FULL = (torch.float32, torch.float64)
BOOL = (True, False)


def agnn_pair(dtype=torch.float32, beta=2.3, **options):
    """(stock layer, fused layer) with a beta that is not the initial one."""
    layers = [package.AGNNConv(**options) for package in (stock, fused)]
    for layer in layers:
        layer.beta.data.fill_(beta)
    return [layer.to(dtype) for layer in layers]


def assert_same(*inputs, **options):
    theirs, ours = agnn_pair(inputs[0].dtype, **options)
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


# Numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("loops", BOOL)
def test_shapes(graph, dtype, loops):
    graph = GRAPHS[graph]
    assert_same(node_features(graph, dtype), graph[0], add_self_loops=loops)


@pytest.mark.parametrize("beta", (2.0**12, 2.0**20))
def test_large_logits(beta):
    """Features of two kinds, so that many logits are equal."""
    theirs, ours = agnn_pair(beta=beta)
    inputs = (2 * torch.eye(IN)[torch.arange(GRAPH[1]) % 2], GRAPH[0])
    assert_close(run_fused(ours, *inputs), run_exact(theirs, *inputs))


@pytest.mark.parametrize("graph", ("random", "multi_edges", "self_loops", "isolated"))
@pytest.mark.parametrize("flow", ("source_to_target", "target_to_source"))
def test_every_combination_of_options(graph, flow):
    graph = GRAPHS[graph]
    for requires_grad, loops, aggr in itertools.product(BOOL, BOOL, ("add", "sum")):
        options = {"requires_grad": requires_grad, "add_self_loops": loops, "aggr": aggr, "flow": flow}
        assert_same(node_features(graph, torch.float64), graph[0], **options)


@pytest.mark.parametrize("width", (1, 2, 7, 16, 33, 128))
@pytest.mark.parametrize("beta", (0.0, -1.0, 30.0))
def test_widths_and_betas(width, beta):
    assert_same(features(40, width, torch.float64), GRAPH[0], beta=beta)
    if width > 1 and beta < 30:  # of one channel the cosine is a sign, and its gradient nothing but rounding
        assert_same(features(40, width), GRAPH[0], beta=beta)


@pytest.mark.parametrize("width", (2, 7, 33))
def test_sharp_attention_in_single_precision(width):
    """With weights near 0 and 1 the gradient of beta cancels to a thousandth of its terms, in the stock layer too:
    over a few problems, 1e-5 or at most twice the stock layer's own error against float64.
    """
    squares = {}
    for seed in range(8):
        (theirs, ours), (truth, _) = agnn_pair(beta=30.0), agnn_pair(torch.float64, beta=30.0)
        x = features(40, width, seed=seed)
        exact = run(truth, truth, x.double(), GRAPH[0])
        want, have = run(theirs, theirs, x, GRAPH[0]), run_fused(ours, x, GRAPH[0])
        for key, value in exact.items():
            errors = [(t[key].double() - value).norm() for t in (have, want)] + [value.norm()]
            squares[key] = squares.get(key, 0) + torch.stack(errors).square()
    for key, sums in squares.items():
        error, stock_error, size = sums.sqrt().tolist()
        assert error <= max(1e-5 * size, 2 * stock_error), f"{key}: {error:.2e}, stock {stock_error:.2e} of {size:.2e}"


@pytest.mark.parametrize("dtype", FULL)
def test_zero_rows(dtype):
    x = node_features(GRAPH, dtype)
    x[::3] = 0
    theirs, ours = agnn_pair(dtype)
    have, want = run_fused(ours, x, GRAPH[0]), run(theirs, theirs, x, GRAPH[0])
    name = "grad of input[0]"  # a zero row's gradient is 1e12 times the others': compare the two kinds apart
    for rows in (x.any(dim=1), ~x.any(dim=1)):
        parts = ({**found, name: found[name][rows]} for found in (have, want))
        assert_close(*parts)


@pytest.mark.parametrize("graph", ("random", "multi_edges", "self_loops", "no_edges"))
@pytest.mark.parametrize("loops", BOOL)
def test_int32(graph, loops):
    """Against the stock layer on int64: torch's gather, and with it the stock gradient, is wrong for int32 indices."""
    graph = GRAPHS[graph]
    theirs, ours = agnn_pair(torch.float64, add_self_loops=loops)
    x = node_features(graph, torch.float64)
    assert_close(run_fused(ours, x, graph[0].int()), run(theirs, theirs, x, graph[0]))


def test_strides_of_features_do_not_matter():
    assert_same(torch.randn(IN, 40).t(), GRAPH[0])
    assert_same(torch.randn(40, 2 * IN)[:, ::2], GRAPH[0])
    assert_same(torch.randn(40, 1, dtype=torch.float64).expand(40, IN), GRAPH[0])


@pytest.mark.parametrize("graph", ("random", "hub", "isolated"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("width", (IN, 64))
def test_16_bit(graph, dtype, width):
    """Against float64, at most twice the stock layer's own error (or twice the rounding of the true result).

    Over a few problems, since one number, the gradient of beta, may be right by luck.
    """
    graph, squares = GRAPHS[graph], {}
    theirs, ours = agnn_pair(dtype)
    truth, _ = agnn_pair(torch.float64, beta=theirs.beta.item())
    for seed in range(8):
        x = features(graph[1], width, dtype, seed)
        exact = run(truth, truth, x.double(), graph[0])
        want, have = run(theirs, theirs, x, graph[0]), run_fused(ours, x, graph[0])
        for key, value in exact.items():
            assert have[key].dtype == want[key].dtype and have[key].shape == want[key].shape
            errors = [(t[key].double() - value).norm() for t in (have, want)] + [(value.to(dtype) - value).norm()]
            squares[key] = squares.get(key, 0) + torch.stack(errors).square()
    for key, sums in squares.items():
        error, stock_error, rounding = sums.sqrt().tolist()
        assert error <= 2 * max(stock_error, rounding), f"{key}: {error:.2e}, stock {stock_error:.2e}"


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("autocast", (None, torch.bfloat16, torch.float16))
def test_dtypes_of_mixed_precision(dtype, autocast):
    """Features of any dtype and beta in float32: the dtypes of the stock layer, with autocast and without."""
    theirs, ours = agnn_pair()
    inputs = (node_features(GRAPH, dtype), GRAPH[0])
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        have, want = run_fused(ours, *inputs), run(theirs, theirs, *inputs)
    assert [t.dtype for t in have.values()] == [t.dtype for t in want.values()]
    assert_close(have, want, 8 * torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 1e-5)


@pytest.mark.parametrize("training", BOOL)
def test_train_and_eval(training):
    theirs, ours = (layer.train(training) for layer in agnn_pair())
    assert_close(run_fused(ours, *INPUTS), run(theirs, theirs, *INPUTS))


@pytest.mark.parametrize("graph", ("random", "self_loops", "isolated"))
def test_over_the_reference(graph):
    """The layer's own forward with plain PyTorch for the kernels: an error here is the adapter's, not a kernel's."""
    theirs, ours = agnn_pair(torch.float64)
    inputs = (node_features(GRAPHS[graph], torch.float64), GRAPHS[graph][0])
    assert_close(over_reference(ours, *inputs), run(theirs, theirs, *inputs))


def test_gradcheck():
    _, ours = agnn_pair(torch.float64)
    x = features(3, 4, torch.float64).requires_grad_()

    def call(x, beta):
        return torch.func.functional_call(ours, {"beta": beta}, (x, GRAPHS["self_loops"][0]))

    assert torch.autograd.gradcheck(call, (x, ours.beta))


def test_bitwise_reproducible():
    graph = GRAPHS["hub"]
    _, ours = agnn_pair()
    runs = [run_fused(ours, node_features(graph), graph[0]) for _ in range(3)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), again.values(), strict=True))


# Kinds of graph --------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("graph", ("random", "self_loops", "isolated", "no_edges"))
@pytest.mark.parametrize("loops", BOOL)
def test_kinds(kind, graph, loops):
    graph = GRAPHS[graph]
    assert_same(node_features(graph, torch.float64), KINDS[kind](graph), add_self_loops=loops)


@pytest.mark.parametrize("kind", [k for k in SPARSE if k != "torch_sparse" or WITH_TORCH_SPARSE])
@pytest.mark.parametrize("width", (None, 2))
@pytest.mark.parametrize("loops", BOOL)
def test_values_of_a_sparse_matrix_are_ignored(kind, width, loops):
    graph = (GRAPH[0].unique(dim=1), *GRAPH[1:])
    values = edge_features(graph, width or 1, torch.float64)
    index = KINDS[kind](graph, values if width else values.squeeze(1))
    theirs, ours = agnn_pair(torch.float64, add_self_loops=loops)
    x = node_features(graph, torch.float64)
    if not (width and loops):
        assert_close(run_fused(ours, x, index), run(theirs, theirs, x, index))
        return
    # PyG may not be able to add self loops to a matrix of rows: whatever the stock layer does is done.
    assert kind == "torch_sparse" or not edgeless.explain(ours, x, index)
    try:
        expected = run(theirs, theirs, x, index)
    except Exception as error:
        with pytest.raises(type(error)):
            run(ours, ours, x, index)
    else:
        assert_close(run(ours, ours, x, index), expected)


@pytest.mark.parametrize("graph", ("random", "self_loops", "no_edges"))
@pytest.mark.parametrize("loops", BOOL)
def test_graph_handle(graph, loops):
    graph = GRAPHS[graph]
    theirs, ours = agnn_pair(torch.float64, add_self_loops=loops)
    x, handle = node_features(graph, torch.float64), edgeless.Graph.from_edge_index(*graph)
    want = run(theirs, theirs, x, graph[0])
    with edgeless.backend("fused"):
        assert_close(run(ours, ours, x, handle), want)
    with edgeless.backend("reference"):
        assert_close(run(ours, ours, x, handle), want)


def test_graph_handle_errors():
    handle = edgeless.Graph.from_edge_index(*GRAPHS["bipartite"])
    with pytest.raises(ValueError, match="AGNNConv: edge_index must have as many sources as destinations, got Graph"):
        fused.AGNNConv(add_self_loops=False)(torch.randn(20, IN), handle)
    with pytest.raises(ValueError, match=r"x must have shape \[Ns, H, C\] = \[40, \*, \*\], got \[7, 1, 5\]"):
        fused.AGNNConv()(torch.randn(7, IN), edgeless.Graph.from_edge_index(*GRAPH))
    with pytest.raises(ValueError, match=r"got 'target_to_source'; pass graph.reverse\(\)"):
        fused.AGNNConv(flow="target_to_source")(INPUTS[0], edgeless.Graph.from_edge_index(*GRAPH))


def test_second_call_builds_nothing_and_an_edit_is_noticed():
    theirs, ours = agnn_pair()
    edge_index = GRAPH[0].clone()
    first = ours(INPUTS[0], edge_index)
    built = edgeless.cache_info().misses
    assert torch.equal(ours(INPUTS[0], edge_index), first) and edgeless.cache_info().misses == built
    edge_index[0, 3] = (edge_index[0, 3] + 1) % 40
    torch.testing.assert_close(ours(INPUTS[0], edge_index), theirs(INPUTS[0], edge_index))


# Falling back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggr", ("mean", "max", "softmax"))
def test_other_aggregations(aggr):
    assert_falls_back(*agnn_pair(aggr=aggr), "aggr_module is", *INPUTS)


def test_decomposed_layers():
    assert_falls_back(*agnn_pair(decomposed_layers=5), "decomposed_layers is 5", *INPUTS)


@pytest.mark.parametrize("hook", ("propagate_forward_pre", "message_forward", "aggregate_forward"))
def test_message_passing_hooks(hook):
    theirs, ours = agnn_pair()
    for layer in (theirs, ours):
        getattr(layer, f"register_{hook}_hook")(lambda *args: None)
    assert_falls_back(theirs, ours, "a message passing hook is registered", *INPUTS)


def test_explain_mode():
    theirs, ours = agnn_pair(add_self_loops=False)
    for layer in (theirs, ours):
        layer.explain = True
        layer._edge_mask = torch.linspace(-2, 2, GRAPH[0].size(1))
        layer._loop_mask = GRAPH[0][0] != GRAPH[0][1]
        layer._apply_sigmoid = True
    assert_falls_back(theirs, ours, "explain mode is on", *INPUTS)
    for layer in (theirs, ours):
        layer.explain = None
    assert edgeless.explain(ours, *INPUTS)
    torch.testing.assert_close(ours(*INPUTS), theirs(*INPUTS))


def test_overridden_message():
    def own(base):
        class Changed(base):
            def message(self, x_j, x_norm_i, x_norm_j, index, ptr, size_i):
                return 2 * super().message(x_j, x_norm_i, x_norm_j, index, ptr, size_i)

        return _renamed(Changed)()

    assert_falls_back(own(stock.AGNNConv), own(fused.AGNNConv), "message() is overridden", *INPUTS)


def test_a_subclass_that_only_wraps_forward_stays_fused():
    @_renamed
    class Wrapped(fused.AGNNConv):
        def forward(self, x, edge_index):
            return super().forward(x, edge_index).relu()

    with edgeless.backend("fused"):
        torch.testing.assert_close(Wrapped()(*INPUTS), stock.AGNNConv()(*INPUTS).relu())


@pytest.mark.parametrize(
    "inputs,reason",
    [
        (((INPUTS[0], INPUTS[0]), GRAPH[0]), "x is not a tensor"),
        ((torch.randn(2, 40, IN), GRAPH[0]), "source features are not a plain floating tensor of two dimensions"),
        ((INPUTS[0], _csr(GRAPHS["bipartite"])), "not a matrix of shape"),
        ((INPUTS[0], GRAPH[0].float()), "edge_index is not an int64 or int32 tensor"),
        ((INPUTS[0].long(), GRAPH[0]), "source features are not a plain floating tensor"),
    ],
    ids=("pair", "three dimensions", "rectangular", "float ids", "integers"),
)
def test_what_the_stock_layer_refuses(inputs, reason):
    theirs, ours = agnn_pair()
    assert reason in str(edgeless.explain(ours, *inputs))
    with pytest.raises(Exception) as want:
        theirs(*inputs)
    with pytest.raises(want.type):
        ours(*inputs)


def test_an_id_that_x_does_not_have():
    with pytest.raises(IndexError):
        fused.AGNNConv()(INPUTS[0][:20], GRAPH[0])


def test_transforms():
    theirs, ours = agnn_pair(torch.float64)
    x = node_features(GRAPH, torch.float64)
    for transform in (
        lambda layer: torch.func.jvp(lambda x: layer(x, GRAPH[0]), (x,), (x.flip(0),))[1],
        lambda layer: torch.func.grad(lambda x: layer(x, GRAPH[0]).square().sum())(x),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))


# What users do to a layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ({}, {"requires_grad": False}, {"add_self_loops": False}), ids=str)
def test_construction_state_and_repr(options):
    theirs, ours = (package.AGNNConv(**options) for package in (stock, fused))
    assert isinstance(ours, stock.AGNNConv) and repr(ours) == f"edgeless.{theirs}"
    assert theirs.state_dict() == ours.state_dict() and list(ours.state_dict()) == ["beta"]
    assert [n for n, _ in theirs.named_parameters()] == [n for n, _ in ours.named_parameters()]
    for layer in (theirs, ours):
        layer.beta.data.fill_(3)
        layer.reset_parameters()
    assert theirs.state_dict() == ours.state_dict()
    theirs.load_state_dict(ours.state_dict(), strict=True), ours.load_state_dict(theirs.state_dict(), strict=True)
    for method in ("__init__", "forward"):
        signatures = (inspect.signature(getattr(package.AGNNConv, method)) for package in (stock, fused))
        assert len({tuple((p.name, p.default, p.kind) for p in s.parameters.values()) for s in signatures}) == 1


def _saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("clone", (lambda x: pickle.loads(pickle.dumps(x)), _saved, copy.deepcopy, copy.copy))
@pytest.mark.parametrize("used", BOOL)
def test_copies(clone, used):
    theirs, ours = agnn_pair()
    if used:
        ours(*INPUTS)
    other = clone(ours)
    assert type(other) is type(ours)
    assert_close(run_fused(other, *INPUTS), run(theirs, theirs, *INPUTS))
    with edgeless.backend("reference"):
        torch.testing.assert_close(other(*INPUTS), theirs(*INPUTS))


def test_torchscript_and_trace():
    theirs, ours = agnn_pair()
    other = GRAPH[0].flip(0)[:, :100]
    torch.testing.assert_close(torch.jit.script(ours)(INPUTS[0], other), theirs(INPUTS[0], other))
    torch.testing.assert_close(torch.jit.trace(ours, INPUTS)(INPUTS[0], other), theirs(INPUTS[0], other))


def test_accelerate_and_training():
    def model():
        torch.manual_seed(1)
        convs = [(stock.AGNNConv(requires_grad=False), "x, edge_index -> x"), (stock.AGNNConv(), "x, edge_index -> x")]
        last = (torch.nn.Linear(8, 2), "x -> x")
        return stock.Sequential("x, edge_index", [(torch.nn.Linear(IN, 8), "x -> x"), *convs, last])

    theirs, ours = model(), model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.001, momentum=0.9) for m in (theirs, ours)]
    assert [new for _, _, new in edgeless.accelerate(ours).swapped] == [fused.AGNNConv] * 2
    for _ in range(3):
        for module, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            module(*INPUTS).square().sum().backward()
            optimizer.step()
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_hetero_conv():
    edge_types = [("user", "follows", "user"), ("user", "likes", "user"), ("game", "beside", "game")]
    x = {"user": torch.randn(20, IN), "game": torch.randn(11, 7)}
    edges = {e: random_edges(len(x[e[0]]), len(x[e[2]]), 50, seed=i) for i, e in enumerate(edge_types)}
    theirs, ours = (
        stock.HeteroConv({e: package.AGNNConv() for e in edge_types}, aggr="sum") for package in (stock, fused)
    )
    with edgeless.backend("fused"):
        have = ours(x, edges)
    for key, want in theirs(x, edges).items():
        torch.testing.assert_close(have[key], want)


def test_nothing_of_the_size_of_the_edges_is_allocated():
    edge_index = random_edges(50, 50, 20_000)
    x = features(50, 8)
    theirs, ours = agnn_pair()

    def largest(layer):
        leaf = x.clone().requires_grad_()
        layer(leaf, edge_index).sum().backward()  # builds the graph
        with torch.profiler.profile(profile_memory=True) as profile:
            layer(leaf, edge_index).sum().backward()
        return max(event.cpu_memory_usage for event in profile.events())

    with edgeless.backend("fused"):
        mine = largest(ours)
    assert mine < edge_index.size(1) * 4 <= largest(theirs)


# torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ("graph", "tensor"))
def test_compiles_whole(fresh_dynamo, form):
    theirs, ours = agnn_pair(torch.float64)
    x = node_features(GRAPH, torch.float64)
    index = GRAPH[0] if form == "tensor" else edgeless.Graph.from_edge_index(*GRAPH)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    want = run(theirs, theirs, x, GRAPH[0])
    for _ in range(2):
        with edgeless.backend("fused"):
            assert_close(run(compiled, ours, x, index), want)


def test_no_recompile_for_every_number_of_edges(fresh_dynamo):
    theirs, ours = agnn_pair()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for i in range(6):
        num_nodes = 40 + 3 * i
        edge_index = random_edges(num_nodes, num_nodes, 100 + 17 * i, seed=i)
        x = features(num_nodes)
        with edgeless.backend("fused"):
            torch.testing.assert_close(compiled(x, edge_index), theirs(x, edge_index))
    assert counter.frame_count <= 2  # once with fixed, once with dynamic sizes


def test_export():
    theirs, ours = agnn_pair()
    program = torch.export.export(ours, INPUTS)
    torch.testing.assert_close(program.module()(*INPUTS), theirs(*INPUTS))
