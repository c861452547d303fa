"""The attention layers on CUDA: fused on the GPU against the stock layer, on the CPU in float64 and under autocast."""

import copy

import pytest
import torch
from pyg_cases import EDGE_DIM, GRAPHS, OnGPU, assert_close, edge_features, layer_pair, node_features, run, run_exact

import edgeless
import edgeless.pyg.nn

pytestmark = pytest.mark.cuda
LAYERS = ("GATv2Conv", "GATConv", "TransformerConv")
OPTIONS = {
    "plain": {},
    "edges": {"edge_dim": EDGE_DIM},
    "mean of heads": {"concat": False},
    "no bias": {"bias": False},
    "one head": {"heads": 1},
}
OWN = [
    ("GATv2Conv", {"share_weights": True}),
    ("GATv2Conv", {"add_self_loops": False, "negative_slope": 0.4}),
    ("GATConv", {"add_self_loops": False, "negative_slope": 0.4}),
    ("TransformerConv", {"beta": True}),
    ("TransformerConv", {"root_weight": False}),
]


def inputs_of(graph, dtype, edge_dim=None):
    inputs = [node_features(graph, dtype), graph[0]]
    return inputs if edge_dim is None else [*inputs, edge_features(graph, edge_dim, dtype)]


def check(name, graph, dtype, attention=None, **options):
    theirs, ours = layer_pair(name, dtype=dtype, **options)
    inputs = inputs_of(graph, dtype, options.get("edge_dim"))
    kwargs = {} if attention is None else {"return_attention_weights": attention}
    assert_close(OnGPU(ours).run_fused(*inputs, **kwargs), run(theirs, theirs, *inputs, **kwargs))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_is_the_stock_layer(name, options, kind):
    options = dict(OPTIONS[options])
    if kind == "bipartite_more_targets" and "edge_dim" in options and name != "TransformerConv":
        options["add_self_loops"] = False  # else the stock layer raises: see test_pyg_errors.py
    check(name, GRAPHS[kind], torch.float64, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_single_precision(name):
    for graph in GRAPHS.values():
        theirs, ours = layer_pair(name)
        inputs = inputs_of(graph, torch.float32)
        assert_close(OnGPU(ours).run_fused(*inputs), run_exact(theirs, *inputs))


@pytest.mark.parametrize("name,options", OWN)
def test_options_of_one_layer(name, options):
    for graph in GRAPHS.values():
        check(name, graph, torch.float64, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_returned_attention(name):
    for graph in GRAPHS.values():
        check(name, graph, torch.float64, attention=True)


@pytest.mark.parametrize("name", ["GATv2Conv", "GATConv"])
@pytest.mark.parametrize("fill_value", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_of_added_loops_have_the_same_bits(name, fill_value, dtype):
    gen = torch.Generator().manual_seed(0)
    edges = torch.randint(300, (2, 20_000), generator=gen).cuda()  # self loops among them
    x = torch.randn(300, 16, generator=gen).to("cuda", dtype).requires_grad_()
    attr = torch.randn(20_000, 8, generator=gen).to("cuda", dtype).requires_grad_()
    layer = getattr(edgeless.pyg.nn, name)(16, 8, heads=2, edge_dim=8, fill_value=fill_value).to("cuda", dtype)

    def step():
        out = layer(x, edges, attr)
        return [out, *torch.autograd.grad(out.square().sum(), [x, attr, *layer.parameters()])]

    for first, second in zip(step(), step(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(name, autocast, backend):
    torch._dynamo.reset()
    num_nodes, device = 300, OnGPU.device
    edge_index = torch.randint(num_nodes, (2, 2000), generator=torch.Generator().manual_seed(0)).to(device)
    _, ours = layer_pair(name, 12, 8)
    ours = ours.to(device)
    x = torch.randn(num_nodes, 12, device=device, requires_grad=True)
    results = []
    for call in (torch.compile(ours, fullgraph=True, backend=backend), ours):
        with edgeless.backend("fused"), torch.autocast(device, torch.bfloat16, enabled=autocast):
            out = call(x, edge_index)
        grads = torch.autograd.grad(out, [x, *ours.parameters()], torch.ones_like(out))
        results.append([out, *grads])
    tolerance = 2e-2 if autocast else 1e-4
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_nodes", [200, 40_000])  # linear maps take another way where rows are many
def test_autocast_errs_at_most_twice_as_much(name, dtype, num_nodes):
    device = OnGPU.device
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(num_nodes, (2, 4 * num_nodes), generator=generator).to(device)
    x = torch.randn(num_nodes, 12, generator=generator).to(device)
    theirs, ours = (layer.to(device) for layer in layer_pair(name, 12, 8))
    exact = copy.deepcopy(theirs).double()
    grad = torch.randn(num_nodes, 8 * theirs.heads, generator=generator).to(device)

    def found(layer, x):
        x = x.detach().requires_grad_()
        out = layer(x, edge_index)
        # Of softmax nothing reaches the bias of a key but rounding.
        leaves = [x, *(p for key, p in layer.named_parameters() if key != "lin_key.bias")]
        return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    wanted = found(exact, x.double())
    with torch.autocast(device, dtype):
        stock = found(theirs, x)
        with edgeless.backend("fused"):
            fused = found(ours, x)
    for a, b, c in zip(fused, stock, wanted, strict=True):
        assert a.dtype == b.dtype
        error, theirs_error = ((t.double() - c).norm() / c.norm() for t in (a, b))
        assert error <= 2 * theirs_error + 1e-5
