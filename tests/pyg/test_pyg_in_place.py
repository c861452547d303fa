"""In-place ops behind and before a layer, batches of gradients, and inputs that are empty or of inference mode: all
that the stock layer trains with."""

import copy

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import GRAPHS, features

import edgeless
import edgeless.pyg.nn as fused

EDGE_INDEX, NODES, _ = GRAPHS["hub"]
LAYERS = {
    "GATv2Conv": ((5, 4), {"heads": 3}),
    "GATv2Conv-plain": ((5, 4), {"heads": 3, "bias": False}),
    "GATv2Conv-shared": ((5, 4), {"heads": 3, "bias": False, "share_weights": True}),
    "GATConv": ((5, 4), {"heads": 3}),
    "GATConv-plain": ((5, 4), {"heads": 3, "bias": False}),
    "GATConv-mean": ((5, 4), {"heads": 3, "bias": False, "concat": False}),
    "TransformerConv": ((5, 4), {"heads": 3}),
    "TransformerConv-plain": ((5, 4), {"heads": 3, "root_weight": False}),
    "TransformerConv-beta": ((5, 4), {"heads": 3, "beta": True}),
    "AGNNConv": ((), {}),
    "AGNNConv-fixed": ((), {"requires_grad": False, "add_self_loops": False}),
    "GCNConv": ((5, 4), {}),
    "GCNConv-plain": ((5, 4), {"bias": False}),
    "SAGEConv": ((5, 4), {}),
    "SAGEConv-max": ((5, 4), {"aggr": "max"}),
    "GraphConv": ((5, 4), {}),
    "GraphConv-max": ((5, 4), {"aggr": "max"}),
    "GINConv": ((torch.nn.Identity(),), {"train_eps": True}),
    "GINConv-max": ((torch.nn.Identity(),), {"aggr": "max"}),
}
layers = pytest.mark.parametrize("name", LAYERS)


def pair_of(name, dtype=torch.float64):
    args, options = LAYERS[name]
    torch.manual_seed(0)
    conv = getattr(stock, name.partition("-")[0])(*args, **options).to(dtype)
    ours = getattr(fused, name.partition("-")[0])(*copy.deepcopy(args), **options).to(dtype)
    ours.load_state_dict(conv.state_dict())
    return conv, ours


def relu(h, x):
    return torch.nn.ReLU(inplace=True)(h)


def add(h, x):
    h += 1
    return h


def set_a_row(h, x):
    h[0] = 0
    return h


def mask(h, x):
    with torch.no_grad():
        h.mul_(torch.arange(len(h)).unsqueeze(1) % 2)
    return h


def trained(conv, write, x, edge_index=EDGE_INDEX):
    """The result and all gradients of a step with ``write`` behind the layer."""
    conv.zero_grad()
    x = x.clone().requires_grad_()
    h = write(conv(x * 1, edge_index), x)
    h.square().sum().backward()
    return [h, x.grad, *(p.grad for p in conv.parameters())]


def assert_close(found, want):
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).norm() <= 1e-10 * b.norm() + 1e-12


@layers
@pytest.mark.parametrize("write", [relu, add, set_a_row, mask], ids=lambda write: write.__name__)
def test_a_write_behind_the_layer(name, write):
    x = features(NODES, dtype=torch.float64)
    conv, ours = pair_of(name)
    with edgeless.backend("fused"):
        found = trained(ours, write, x)
    assert_close(found, trained(conv, write, x))


@layers
def test_a_batch_of_gradients(name):
    conv, ours = pair_of(name)
    found = []
    for layer in (conv, ours):
        x = features(NODES, dtype=torch.float64).requires_grad_()
        out = layer(x, EDGE_INDEX)
        grads = torch.linspace(-1, 1, 2 * out.numel(), dtype=out.dtype).view(2, *out.shape)
        given = [x, *(p for p in layer.parameters() if p.requires_grad)]
        found.append(torch.autograd.grad(out, given, grads, is_grads_batched=True, allow_unused=True))
    assert_close(found[1], found[0])


@layers
def test_a_vectorised_jacobian(name):
    conv, ours = pair_of(name)
    x = features(NODES, dtype=torch.float64)[:6]
    edge_index = EDGE_INDEX[:, (EDGE_INDEX < 6).all(0)]
    want, found = (
        torch.autograd.functional.jacobian(lambda x: layer(x, edge_index), x, vectorize=True)  # noqa: B023
        for layer in (conv, ours)
    )
    assert_close([found], [want])


@layers
@pytest.mark.parametrize("graph", ["random", "no_edges", "no_nodes"])
@pytest.mark.parametrize("of_inference", [False, True])
def test_no_features_and_features_of_inference_mode(name, graph, of_inference):
    edge_index, nodes, _ = GRAPHS[graph]
    conv, ours = pair_of(name)
    agnn = name.startswith("AGNN")
    for width in (0, 5) if agnn else (5,):
        with torch.inference_mode(of_inference):
            x = features(nodes, width, dtype=torch.float64)
        results = []
        for layer in (conv, ours):
            layer.zero_grad()
            try:
                out = layer(x, edge_index)
                if out.requires_grad:
                    out.square().sum().backward()
                results.append([out, *(p.grad for p in layer.parameters())])
            except RuntimeError as error:
                results.append(str(error).partition("\nedgeless: ")[0])  # behind which ours says why
        if isinstance(results[0], str):
            assert results[1] == results[0]
        else:
            assert_close(results[1], results[0])
        with torch.inference_mode():
            assert_close([ours(x, edge_index)], [conv(x, edge_index)])


@pytest.mark.parametrize("part,learnt", [("lin_root", False), ("edge_weight", True)])
def test_what_the_stock_layer_can_learn_from_features_of_inference_mode(part, learnt):
    conv, ours = pair_of("GraphConv")
    with torch.inference_mode():
        x = features(NODES, dtype=torch.float64)
    weight = torch.rand(EDGE_INDEX.size(1), dtype=torch.float64).requires_grad_(learnt)
    found = []
    for layer in (conv, ours):
        layer.lin_root.requires_grad_(False)
        out = layer(x, EDGE_INDEX, weight)
        found.append(torch.autograd.grad(out.square().sum(), [layer.lin_rel.weight, *([weight] if learnt else [])]))
    assert_close(found[1], found[0])
    assert "inference mode" in str(edgeless.explain(ours, x, EDGE_INDEX, weight))


@pytest.mark.parametrize("name,mapped", [("GATv2Conv", "lin_l"), ("TransformerConv", "lin_value")])
def test_gradients_stand_where_rows_were_that_nobody_has_seen(name, mapped):
    conv, ours = pair_of(name)
    x = features(NODES, dtype=torch.float64)

    def ops_of_a_step():
        with torch.profiler.profile() as profile:
            found = trained(ours, relu, x)
        assert_close(found, trained(conv, relu, x))
        return {event.key for event in profile.key_averages()}

    assert "edgeless::attention_backward_into" in ops_of_a_step()
    seen = []
    getattr(ours, mapped).register_forward_hook(lambda module, given, rows: seen.append((rows, rows.detach().clone())))
    assert "edgeless::attention_backward_into" not in ops_of_a_step()
    assert seen and all(torch.equal(rows, copy) for rows, copy in seen)
