"""Every layer against its stock layer: outputs and all gradients, over options, shapes and dtypes."""

import itertools

import pytest
import torch
from pyg_cases import (
    EDGE_DIM,
    GRAPHS,
    HEADS,
    IN,
    LAYERS,
    OUT,
    assert_close,
    assert_parity,
    edge_features,
    features,
    layer_pair,
    node_features,
    run,
    run_exact,
    run_fused,
    run_over_reference,
)

FULL = (torch.float32, torch.float64)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("edge_dim", (None, 2))
def test_shapes(name, graph, dtype, edge_dim):
    options = {}
    if graph == "bipartite_more_targets" and edge_dim and name != "TransformerConv":
        options["add_self_loops"] = False  # else the stock layer raises: see test_pyg_errors.py
    assert_parity(name, GRAPHS[graph], dtype=dtype, edge_dim=edge_dim, attention=True, **options)


@pytest.mark.parametrize("graph", ("random", "multi_edges", "self_loops"))
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("flow", ("source_to_target", "target_to_source"))
def test_flow(name, graph, flow):
    assert_parity(name, GRAPHS[graph], dtype=torch.float64, flow=flow, attention=True)
    assert_parity(name, GRAPHS[graph], dtype=torch.float64, flow=flow, pair=True, in_channels=(IN, IN))


@pytest.mark.parametrize("graph", ("random", "bipartite", "multi_edges", "self_loops", "no_edges"))
@pytest.mark.parametrize("name", LAYERS)
def test_int32(name, graph):
    """Against the stock layer on int64: torch's gather, and with it the stock gradient, is wrong for int32 indices."""
    graph = GRAPHS[graph]
    theirs, ours = layer_pair(name, dtype=torch.float64)
    x = node_features(graph, torch.float64)
    have = run_fused(ours, x, graph[0].int(), return_attention_weights=True)
    assert_close(have, run(theirs, theirs, x, graph[0], return_attention_weights=True))
    outputs = {key: value for key, value in have.items() if key.startswith("output")}
    stock = run(theirs, theirs, x, graph[0].int(), return_attention_weights=True)
    assert_close(outputs, {key: stock[key] for key in outputs})


def test_flow_with_edge_features_on_added_loops():
    for name in LAYERS:
        assert_parity(name, GRAPHS["random"], dtype=torch.float64, edge_dim=2, flow="target_to_source", attention=True)


def _grid(**choices):
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


_BOOL = (True, False)
_EDGES = (None, 1, 3)
OPTIONS = {
    "GATv2Conv": list(
        _grid(concat=_BOOL, add_self_loops=_BOOL, bias=_BOOL, share_weights=_BOOL, residual=_BOOL, edge_dim=_EDGES)
    ),
    "GATConv": list(_grid(concat=_BOOL, add_self_loops=_BOOL, bias=_BOOL, residual=_BOOL, edge_dim=_EDGES)),
    "TransformerConv": list(_grid(concat=_BOOL, beta=_BOOL, bias=_BOOL, root_weight=_BOOL, edge_dim=_EDGES)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graph", ("self_loops", "bipartite"))
def test_every_combination_of_options(name, graph):
    for options in OPTIONS[name]:
        bipartite = graph == "bipartite"
        if bipartite and not options.get("share_weights"):
            options = {**options, "in_channels": (IN, IN)}
        assert_parity(name, GRAPHS[graph], dtype=torch.float64, **options)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("heads,channels", ((1, 1), (1, 7), (2, 33), (8, 8), (4, 32), (5, 3)))
def test_widths(name, heads, channels):
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(name, IN, channels, heads)
    inputs = (node_features(graph), graph[0])
    assert_close(run_fused(ours, *inputs), run_exact(theirs, *inputs))


@pytest.mark.parametrize("name", ("GATv2Conv", "GATConv"))
@pytest.mark.parametrize("slope", (0.0, 0.2, 1.0, -0.5))
def test_negative_slope(name, slope):
    assert_parity(name, GRAPHS["random"], dtype=torch.float64, negative_slope=slope, edge_dim=2)


@pytest.mark.parametrize("name", ("GATv2Conv", "GATConv"))
@pytest.mark.parametrize("graph", ("random", "self_loops", "isolated", "multi_edges", "bipartite", "no_edges"))
@pytest.mark.parametrize(
    "fill_value",
    ("mean", "add", "sum", "min", "max", "mul", 0.5, 2, torch.tensor([0.3, -1.0]), torch.tensor([[2.0, 1.0]])),
    ids=str,
)
def test_fill_value(name, graph, fill_value):
    assert_parity(name, GRAPHS[graph], dtype=torch.float64, edge_dim=2, fill_value=fill_value, attention=True)


@pytest.mark.parametrize("name", ("GATv2Conv", "GATConv"))
@pytest.mark.parametrize("loops", (True, False))
def test_edge_features_of_one_dimension(name, loops):
    graph = GRAPHS["self_loops"]
    theirs, ours = layer_pair(name, dtype=torch.float64, edge_dim=1, add_self_loops=loops)
    inputs = (node_features(graph, torch.float64), graph[0], edge_features(graph, 1, torch.float64).squeeze(1))
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("name", ("GATv2Conv", "GATConv"))
def test_edge_dim_without_edge_features(name):
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(name, edge_dim=2)
    inputs = (node_features(graph), graph[0])
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


def test_gat_ignores_edge_features_without_edge_dim():
    graph = GRAPHS["random"]
    theirs, ours = layer_pair("GATConv")
    inputs = (node_features(graph), graph[0], edge_features(graph))
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("loops", (True, False))
@pytest.mark.parametrize("residual", (True, False))
@pytest.mark.parametrize("in_channels", (IN, (IN, IN)))
@pytest.mark.parametrize("size", (None, (20, 11), (20, 20)))
def test_gat_without_target_features(loops, residual, in_channels, size):
    edge_index, num_src, _ = GRAPHS["bipartite"]
    theirs, ours = layer_pair(
        "GATConv", in_channels, dtype=torch.float64, add_self_loops=loops, residual=residual, edge_dim=2
    )
    inputs = ((node_features(GRAPHS["bipartite"], torch.float64)[0], None), edge_index)
    inputs += (edge_features(GRAPHS["bipartite"], dtype=torch.float64), size, True)
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("size", ((20, 11), [20, 11]))
def test_gat_size(size):
    graph = GRAPHS["bipartite"]
    theirs, ours = layer_pair("GATConv", (IN, IN))
    inputs = (node_features(graph), graph[0], None, size)
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_pairs_of_equal_size_and_of_the_same_tensor(name):
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(name, (IN, IN) if name != "TransformerConv" else IN)
    inputs = (node_features(graph, pair=True), graph[0])
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))
    x = node_features(graph)
    with torch.no_grad():
        torch.testing.assert_close(ours((x, x), graph[0]), theirs((x, x), graph[0]))


@pytest.mark.parametrize("name", LAYERS)
def test_other_widths_of_source_and_target(name):
    edge_index, num_src, num_dst = GRAPHS["bipartite"]
    theirs, ours = layer_pair(name, (3, 6))
    inputs = ((torch.randn(num_src, 3), torch.randn(num_dst, 6)), edge_index)
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_strides_of_features_do_not_matter(name):
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(name, edge_dim=2)
    x = torch.randn(IN, graph[1]).t()
    attr = torch.randn(1, 2).expand(graph[0].size(1), 2)
    for inputs in ((x, graph[0], attr), (torch.randn(1, IN).expand(graph[1], IN), graph[0], attr[:, :].flip(1))):
        assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("size", (1e2, 1e4, 1e6))
@pytest.mark.parametrize("name", LAYERS)
def test_large_logits_of_nodes_that_are_alike(name, size):
    """Equal weights that sum to one."""
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(name)
    inputs = (size * features(1).expand(graph[1], IN), graph[0])
    want = run_exact(theirs, *inputs, return_attention_weights=True)
    have = run_fused(ours, *inputs, return_attention_weights=True)
    assert_close({k: have[k] for k in have if "output" in k}, {k: want[k] for k in want if "output" in k})


@pytest.mark.parametrize("size", (1e2, 1e4))
def test_large_logits_leave_the_values_their_gradient(size):
    """Whatever the weights are, they sum to one: the bias of the values gets all that comes to rows with edges."""
    graph = GRAPHS["random"]
    theirs, ours = layer_pair("TransformerConv")
    inputs = (size * node_features(graph), graph[0])
    key = "grad of lin_value.bias"
    assert_close({key: run_fused(ours, *inputs)[key]}, {key: run_exact(theirs, *inputs)[key]})


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("edge_dim", (None, 2))
@pytest.mark.parametrize("graph", ("random", "hub", "bipartite", "isolated"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_16_bit(name, edge_dim, graph, dtype):
    """Against float64, at most twice the stock layer's own error (or twice the rounding of the true result)."""
    graph = GRAPHS[graph]
    theirs, ours = layer_pair(name, dtype=dtype, edge_dim=edge_dim)
    truth, _ = layer_pair(name, dtype=torch.float64, edge_dim=edge_dim)
    truth.load_state_dict(theirs.state_dict())
    x = node_features(graph, dtype)
    attr = None if edge_dim is None else edge_features(graph, edge_dim, dtype)
    exact = run(truth, truth, tuple(t.double() for t in x) if isinstance(x, tuple) else x.double(), graph[0],
                None if attr is None else attr.double(), return_attention_weights=True)  # fmt: skip
    want = run(theirs, theirs, x, graph[0], attr, return_attention_weights=True)
    have = run_fused(ours, x, graph[0], attr, return_attention_weights=True)
    largest = max(float(t.norm()) for t in exact.values() if t is not None)
    for key, value in exact.items():
        if value is None:
            assert have[key] is None
            continue
        assert have[key].dtype == want[key].dtype and have[key].shape == want[key].shape
        error, stock_error = (float((found[key].double() - value).norm()) for found in (have, want))
        rounding = float((value.to(dtype).double() - value).norm())
        noise = torch.finfo(dtype).eps * largest if float(value.norm()) < 1e-3 * largest else 0.0
        limit = 2 * max(stock_error, rounding, noise)
        assert error <= limit, f"{key}: error {error:.2e}, stock {stock_error:.2e}, rounding {rounding:.2e}"


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", (True, False))
def test_train_and_eval(name, training):
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(name, dropout=0.0 if training else 0.6)
    theirs.train(training), ours.train(training)
    inputs = (node_features(graph), graph[0])
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graph", ("random", "bipartite", "self_loops"))
def test_over_the_reference(name, graph):
    """The layer's own forward with plain PyTorch for the kernels: an error here is the adapter's, not a kernel's."""
    graph = GRAPHS[graph]
    theirs, ours = layer_pair(name, dtype=torch.float64, edge_dim=2)
    inputs = (node_features(graph, torch.float64), graph[0], edge_features(graph, dtype=torch.float64))
    rest = (None, True) if name == "GATConv" else (True,)
    assert_close(run_over_reference(ours, *inputs, *rest), run(theirs, theirs, *inputs, *rest))


@pytest.mark.parametrize("name", LAYERS)
def test_gradcheck(name):
    graph = GRAPHS["self_loops"]
    _, ours = layer_pair(name, 3, 2, 2, dtype=torch.float64, edge_dim=2)
    x = torch.randn(graph[1], 3, dtype=torch.float64, requires_grad=True)
    attr = torch.randn(graph[0].size(1), 2, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*ours.named_parameters(), strict=True)

    def call(x, attr, *parameters):
        return torch.func.functional_call(ours, dict(zip(names, parameters, strict=True)), (x, graph[0], attr))

    assert torch.autograd.gradcheck(call, (x, attr, *parameters))


def test_the_cases_are_what_they_say():
    assert not GRAPHS["non_contiguous"][0].is_contiguous() and GRAPHS["expanded"][0].stride() == (1, 0)
    assert len(OPTIONS["GATv2Conv"]) == 96 and HEADS * OUT == 12


# The maps of the destinations' features.
OF_DESTINATIONS = {"GATConv": ["lin_dst"], "GATv2Conv": ["lin_r"], "TransformerConv": ["lin_query", "lin_skip"]}


@pytest.mark.parametrize("other", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("attention", (None, True))
@pytest.mark.parametrize("name", LAYERS)
def test_destinations_of_another_dtype(name, attention, other):
    """Their logits are added to those of the sources, and the result is of what both promote to."""
    own = torch.float32 if other == torch.float64 else torch.float64
    graph = GRAPHS["bipartite"]
    theirs, ours = layer_pair(name, (IN, IN), dtype=own)
    for layer in (theirs, ours):
        for linear in OF_DESTINATIONS[name]:
            getattr(layer, linear).to(other)
    x = (features(graph[1], dtype=own), features(graph[2], dtype=other, seed=13))
    given = {"return_attention_weights": attention}
    assert_close(run_fused(ours, x, graph[0], **given), run(theirs, theirs, x, graph[0], **given), 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_edge_features_of_another_dtype(name):
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(name, edge_dim=EDGE_DIM)
    theirs.lin_edge.double(), ours.lin_edge.double()
    inputs = (node_features(graph), graph[0], edge_features(graph, dtype=torch.float64))
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs), 1e-5)
