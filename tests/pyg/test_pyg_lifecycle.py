"""What users do to a layer: build, print, save, copy, script, cast, share between threads."""

import copy
import inspect
import io
import pickle
import threading

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import GRAPHS, IN, LAYERS, assert_close, edge_features, layer_pair, node_features, run, run_fused

import edgeless
import edgeless.pyg.nn as fused

GRAPH = GRAPHS["random"]
OPTIONS = {
    "GATv2Conv": ({}, {"share_weights": True}, {"residual": True, "concat": False}, {"edge_dim": 3, "bias": False}),
    "GATConv": ({}, {"residual": True, "concat": False}, {"edge_dim": 3, "bias": False}),
    "TransformerConv": ({}, {"beta": True}, {"root_weight": False, "concat": False}, {"edge_dim": 3, "bias": False}),
}
CASES = [(name, options) for name in LAYERS for options in OPTIONS[name]]


def _both(name, *args, **options):
    layers = []
    for package in (stock, fused):
        torch.manual_seed(3)
        layers.append(getattr(package, name)(*args, **options))
    return layers


@pytest.mark.parametrize("name,options", CASES)
@pytest.mark.parametrize("in_channels", (IN, (IN, 7)))
def test_seeded_initialisation_state_and_repr(name, options, in_channels):
    if options.get("share_weights") and in_channels != IN:
        pytest.skip("the stock layer shares one matrix between inputs of one width only")
    theirs, ours = _both(name, in_channels, 4, 2, **options)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert [n for n, _ in theirs.named_parameters()] == [n for n, _ in ours.named_parameters()]
    for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert repr(ours) == f"edgeless.{theirs}"
    torch.manual_seed(9), theirs.reset_parameters()
    torch.manual_seed(9), ours.reset_parameters()
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_signatures(name):
    for method in ("__init__", "forward"):
        theirs, ours = (inspect.signature(getattr(getattr(p, name), method)) for p in (stock, fused))
        assert [(p.name, p.default, p.kind) for p in theirs.parameters.values()] == [
            (p.name, p.default, p.kind) for p in ours.parameters.values()
        ]


@pytest.mark.parametrize("name", LAYERS)
def test_is_a_stock_layer(name):
    _, ours = layer_pair(name)
    assert isinstance(ours, getattr(stock, name)) and isinstance(ours, stock.MessagePassing)


@pytest.mark.parametrize("name,options", CASES)
def test_state_dicts_load_both_ways(name, options):
    theirs, ours = (getattr(p, name)(IN, 4, 2, **options) for p in (stock, fused))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    other = getattr(stock, name)(IN, 4, 2, **options)
    other.load_state_dict(ours.state_dict(), strict=True)
    attr = edge_features(GRAPH, 3) if "edge_dim" in options else None
    torch.testing.assert_close(
        other(node_features(GRAPH), GRAPH[0], attr), theirs(node_features(GRAPH), GRAPH[0], attr)
    )
    torch.testing.assert_close(ours(node_features(GRAPH), GRAPH[0], attr), theirs(node_features(GRAPH), GRAPH[0], attr))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("in_channels", (-1, (-1, -1)))
def test_lazy_layers(name, in_channels):
    options = {"residual": True} if name != "TransformerConv" else {"beta": True}
    theirs, ours = _both(name, in_channels, 4, 2, **options)
    assert repr(ours) == f"edgeless.{theirs}"
    x = node_features(GRAPH, pair=in_channels != -1)
    torch.manual_seed(4)
    want = theirs(x, GRAPH[0])
    torch.manual_seed(4)
    torch.testing.assert_close(ours(x, GRAPH[0]), want)
    for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    lazy = getattr(fused, name)(in_channels, 4, 2, **options)
    lazy.load_state_dict(theirs.state_dict())
    with edgeless.backend("fused"):
        torch.testing.assert_close(lazy(x, GRAPH[0]), want)


@pytest.mark.parametrize("name", LAYERS)
def test_lazy_edge_dim(name):
    theirs, ours = _both(name, IN, 4, 2, edge_dim=-1)
    inputs = (node_features(GRAPH), GRAPH[0], edge_features(GRAPH, 3))
    for seed in (4, 5):
        torch.manual_seed(seed)
        want = theirs(*inputs)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours(*inputs), want)
    assert edgeless.explain(ours, *inputs)


def _pickled(layer):
    return pickle.loads(pickle.dumps(layer))


def _saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("clone", (_pickled, _saved, copy.deepcopy, copy.copy))
@pytest.mark.parametrize("used", (True, False))
def test_copies(name, clone, used):
    theirs, ours = layer_pair(name)
    inputs = (node_features(GRAPH), GRAPH[0])
    if used:
        ours(*inputs)
    other = clone(ours)
    assert type(other) is type(ours)
    assert_close(run_fused(other, *inputs), run(theirs, theirs, *inputs))
    with edgeless.backend("reference"):
        torch.testing.assert_close(other(*inputs), theirs(*inputs))


class _Net(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.conv = layer
        self.lin = torch.nn.Linear(12, 2)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.lin(self.conv(x, edge_index).relu())


def _outcomes(module, *inputs):
    """Results of the scripted module, before and after saving. Where PyG itself cannot do one, the error's type."""
    outcomes = []
    try:
        scripted = torch.jit.script(module)
        outcomes.append(scripted(*inputs))
        file = io.BytesIO()
        torch.jit.save(scripted, file)
        file.seek(0)
        outcomes.append(torch.jit.load(file)(*inputs))
    except Exception as error:
        outcomes.append(type(error))
    return outcomes


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("wrap", (_Net, lambda layer: layer), ids=("in a model", "alone"))
@pytest.mark.parametrize("swapped", (True, False))
def test_script(name, wrap, swapped):
    theirs, ours = layer_pair(name)
    if swapped:
        ours = copy.deepcopy(theirs)
        edgeless.accelerate(ours)
    net = wrap(ours).eval()  # a scripted dropout of rate 0 draws numbers in training
    inputs = (node_features(GRAPH), GRAPH[0])
    eager = net(*inputs)
    state = torch.get_rng_state()
    have = _outcomes(net, *inputs)
    assert torch.equal(state, torch.get_rng_state())
    want = _outcomes(wrap(theirs).eval(), *inputs)
    assert len(have) == len(want)
    for mine, other in zip(have, want, strict=True):
        if isinstance(other, type):
            assert mine is other
        else:
            torch.testing.assert_close(mine, eager)
    # Scripting leaves the stock layer in a model, with the same parameters, and accelerate brings the fused one back.
    torch.testing.assert_close(net(*inputs), eager)
    edgeless.accelerate(net)
    with edgeless.backend("fused"):
        torch.testing.assert_close(net(*inputs), eager)


@pytest.mark.parametrize("name", LAYERS)
def test_trace_does_not_bake_in_the_graph(name):
    theirs, ours = layer_pair(name)
    x = node_features(GRAPH)
    traced = torch.jit.trace(ours, (x, GRAPH[0]))
    other = GRAPH[0].flip(0)[:, :100]
    torch.testing.assert_close(traced(x, other), theirs(x, other))


@pytest.mark.parametrize("name", LAYERS)
def test_casts_and_moves(name):
    theirs, ours = layer_pair(name)
    for layer in (theirs, ours):
        layer.double().float().bfloat16().double()
    inputs = (node_features(GRAPH, torch.float64), GRAPH[0])
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_optimizer_keeps_its_parameters_after_accelerate(name):
    theirs, _ = layer_pair(name)
    layer = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (theirs, layer)]
    edgeless.accelerate(layer)
    for _ in range(3):
        for module, optimizer in zip((theirs, layer), optimizers, strict=True):
            optimizer.zero_grad()
            module(node_features(GRAPH), GRAPH[0]).square().sum().backward()
            optimizer.step()
    for a, b in zip(theirs.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("edge_dim", (None, 2))
def test_autocast(name, dtype, edge_dim):
    """Dtypes as stock under autocast; the numbers as far from float64 as stock, at most twice."""
    theirs, ours = layer_pair(name, edge_dim=edge_dim)
    truth, _ = layer_pair(name, edge_dim=edge_dim, dtype=torch.float64)
    x, attr = node_features(GRAPH), None if edge_dim is None else edge_features(GRAPH, edge_dim)
    exact = run(
        truth, truth, x.double(), GRAPH[0], None if attr is None else attr.double(), return_attention_weights=True
    )
    with torch.autocast("cpu", dtype):
        want = run(theirs, theirs, x, GRAPH[0], attr, return_attention_weights=True)
        have = run_fused(ours, x, GRAPH[0], attr, return_attention_weights=True)
    for key, value in exact.items():
        if value is None:
            continue
        assert have[key].dtype == want[key].dtype, key
        error, stock_error = (float((found[key].double() - value).norm()) for found in (have, want))
        assert error <= 2 * max(stock_error, torch.finfo(dtype).eps * 1e-2 * float(value.norm())), (
            key,
            error,
            stock_error,
        )


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_takes_edge_features_of_another_dtype(name):
    theirs, ours = layer_pair(name, edge_dim=2)
    inputs = (node_features(GRAPH), GRAPH[0], edge_features(GRAPH, dtype=torch.bfloat16))
    assert not edgeless.explain(ours, *inputs)  # as torch itself: without autocast the two do not multiply
    with torch.autocast("cpu", torch.bfloat16):
        have, want = run_fused(ours, *inputs), run(theirs, theirs, *inputs)
    for found in (have, want):
        found.pop("grad of lin_key.bias", None)  # zero in exact arithmetic, so nothing but rounding
    assert [None if t is None else t.dtype for t in have.values()] == [
        None if t is None else t.dtype for t in want.values()
    ]
    assert_close(have, want, tolerance=0.03)  # bfloat16 has 8 bits: test_autocast has the comparison with float64


def test_autocast_does_not_round_what_a_hook_raised_to_float32():
    theirs, ours = layer_pair("GATConv")
    for layer in (theirs, ours):
        layer.lin.register_forward_hook(lambda module, inputs, output: output.float())
    inputs = (node_features(GRAPH), GRAPH[0])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(ours(*inputs), theirs(*inputs))


def test_threads():
    """Many threads on one layer and one graph: forward, backward and the cache hold."""
    theirs, ours = layer_pair("GATv2Conv", dtype=torch.float64)
    x = node_features(GRAPH, torch.float64)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(theirs(leaf, GRAPH[0]).square().sum(), leaf)
    edges = [GRAPH[0].clone() for _ in range(3)]
    errors = []

    def work(i):
        try:
            for step in range(20):
                leaf = x.clone().requires_grad_()
                ours(leaf, edges[(i + step) % 3]).square().sum().backward()
                torch.testing.assert_close(leaf.grad, want)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.parametrize("name", LAYERS)
def test_bitwise_reproducible(name):
    graph = GRAPHS["hub"]
    _, ours = layer_pair(name, edge_dim=2)
    runs = [run_fused(ours, node_features(graph), graph[0], edge_features(graph)) for _ in range(3)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), again.values(), strict=True) if a is not None)
