"""In-place ops behind and before a layer or a function, batches of gradients, and inputs that are empty or of inference
mode: all that the stock layer trains with."""

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import GRAPHS

import edgeless
import edgeless.dgl.nn as fused
from edgeless.dgl import ops

ALLOWED = {"allow_zero_in_degree": True}
LAYERS = {
    "GATv2Conv": ((5, 4, 3), ALLOWED),
    "GATv2Conv-residual": ((5, 4, 3), dict(residual=True, **ALLOWED)),
    "GATv2Conv-plain": ((5, 4, 3), dict(bias=False, **ALLOWED)),
    "GATConv": ((5, 4, 3), ALLOWED),
    "GATConv-plain": ((5, 4, 3), dict(bias=False, **ALLOWED)),
    "DotGatConv": ((5, 4, 3), ALLOWED),
    "AGNNConv": ((), ALLOWED),
    "GraphConv": ((5, 4), ALLOWED),
    "GraphConv-plain": ((5, 7), dict(bias=False, **ALLOWED)),
    "GraphConv-sums": ((5, 5), dict(bias=False, weight=False, **ALLOWED)),
    "SAGEConv-mean": ((5, 4, "mean"), {}),
    "SAGEConv-gcn": ((5, 7, "gcn"), {"bias": False}),
    "SAGEConv-pool": ((5, 4, "pool"), {}),
    "GINConv": ((None, "sum"), {"learn_eps": True}),
    "GINConv-max": ((None, "max"), {"learn_eps": False}),
}
HUB = GRAPHS["hub"]()
layers = pytest.mark.parametrize("name", LAYERS)


def pair_of(name):
    args, options = LAYERS[name]
    torch.manual_seed(0)
    conv = getattr(stock, name.partition("-")[0])(*args, **options).double()
    ours = getattr(fused, name.partition("-")[0])(*args, **options).double()
    ours.load_state_dict(conv.state_dict())
    return conv, ours


def features(rows, width=5):
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(11))


def relu(h):
    return torch.nn.ReLU(inplace=True)(h)


def add(h):
    h += 1
    return h


def set_a_row(h):
    h[0] = 0
    return h


WRITES = pytest.mark.parametrize("write", [relu, add, set_a_row], ids=lambda write: write.__name__)


def assert_close(found, want):
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).norm() <= 1e-10 * b.norm() + 1e-12


def trained(conv, write, edit_input=False):
    conv.zero_grad()
    x = features(300).requires_grad_()
    given = x * 1
    h = write(conv(HUB, given))
    if edit_input:
        given.zero_()
    h.square().sum().backward()
    return [h, x.grad, *(p.grad for p in conv.parameters())]


@layers
@WRITES
def test_a_write_behind_the_layer(name, write):
    conv, ours = pair_of(name)
    with edgeless.backend("fused"):
        found = trained(ours, write)
    assert_close(found, trained(conv, write))


def test_features_may_be_edited_behind_a_maximum():
    conv, ours = pair_of("GINConv-max")
    with edgeless.backend("fused"):
        found = trained(ours, lambda h: h, edit_input=True)
    assert_close(found, trained(conv, lambda h: h, edit_input=True))


@WRITES
@pytest.mark.parametrize("name", ["copy_u_sum", "copy_u_mean", "copy_u_min", "copy_u_max", "u_mul_e_sum", "u_dot_v"])
def test_a_write_behind_a_function(name, write):
    graph = dgl.add_self_loop(HUB)  # DGL's own gradient of a node without in-edges is another
    x, y = features(300).requires_grad_(), features(graph.num_edges() if name == "u_mul_e_sum" else 300, 5)
    y = y[:, :1] if name == "u_mul_e_sum" else y
    second = [y] if name.startswith("u_") else []
    found = []
    for module in (dgl.ops, ops):
        given = x * 1
        out = write(getattr(module, name)(graph, given, *second))
        if name.startswith("copy_u"):
            given.zero_()
        found.append(torch.autograd.grad(out.square().sum(), x))
    assert_close(found[1], found[0])


@layers
@pytest.mark.parametrize("large", [False, True])
def test_a_batch_of_gradients(name, large, monkeypatch):
    if large:
        monkeypatch.setattr("edgeless.dgl.nn.sageconv.pays", lambda *_: True)
    found = []
    for layer in pair_of(name):
        x = features(300).requires_grad_()
        out = layer(HUB, x)
        grads = torch.linspace(-1, 1, 2 * out.numel(), dtype=out.dtype).view(2, *out.shape)
        given = [x, *(p for p in layer.parameters() if p.requires_grad)]
        each = [torch.autograd.grad(out, given, grad, retain_graph=True) for grad in grads]
        found.append([torch.stack(of_one) for of_one in zip(*each, strict=True)])
    # DGL's own functions know no batches: what is compared with is one backward after the other.
    assert_close(torch.autograd.grad(out, given, grads, is_grads_batched=True), found[0])
    assert_close(found[1], found[0])


@pytest.mark.parametrize("graph", ["no_edges", "random", "zero_nodes"])
@pytest.mark.parametrize("name,args,width", [("AGNNConv", (), 0), ("GATConv", (5, 4, 0), 5)])
def test_nothing_to_attend_to(name, args, width, graph):
    graph = GRAPHS[graph]()
    conv, ours = (getattr(module, name)(*args, **ALLOWED).double() for module in (stock, fused))
    x = features(graph.num_nodes(), width)
    try:
        want = conv(graph, x)
    except dgl.DGLError:
        with pytest.raises(dgl.DGLError):
            ours(graph, x)
        return
    found = ours(graph, x)
    assert found.shape == want.shape and torch.equal(found, want)


@layers
def test_features_of_inference_mode(name):
    conv, ours = pair_of(name)
    with torch.inference_mode():
        x = features(300)
        assert_close([ours(HUB, x)], [conv(HUB, x)])
    # Without its reason the stock layer's error, or what it learns, would be a matter of luck.
    assert any("inference mode" in reason for reason in edgeless.explain(ours, HUB, x).reasons)
    results = []
    for layer in (conv, ours):
        try:
            out = layer(HUB, x)
            out.square().sum().backward()
            results.append([out, *(p.grad for p in layer.parameters())])
        except RuntimeError as error:
            results.append(str(error).partition("\nedgeless: ")[0])  # behind which ours says why
    if isinstance(results[0], str):
        assert results[1] == results[0]
    else:
        assert_close(results[1], results[0])


def test_infinite_maxima_and_nan_are_not_taken_for_missing_neighbours():
    """DGL's layer makes 0 of them, or skips them; its function copy_u_max keeps infinities."""
    graph = dgl.graph(([0, 1, 2, 3, 0, 2], [4, 4, 5, 5, 6, 6]), num_nodes=8)
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, 1, -inf, -inf, 0, 0, 0, 0]).unsqueeze(1)
    want = [inf, -inf, inf, 0]
    for layer, expected in ((stock, [0, 0, 0, 0]), (fused, want)):
        assert layer.GINConv(None, "max")(graph, x)[4:].flatten().tolist() == expected
    for module in (dgl.ops, ops):
        assert module.copy_u_max(graph, x)[4:7].flatten().tolist() == want[:3]
    x[0], x[2] = nan, 2
    assert stock.GINConv(None, "max")(graph, x)[4:].flatten().tolist() == [1, 2, 2, 0]
    found = fused.GINConv(None, "max")(graph, x)[4:].flatten()
    assert found.isnan().tolist() == [True, False, True, False] and found[1] == 2 and found[3] == 0


def test_gradients_stand_where_rows_were_that_nobody_has_seen():
    conv, ours = pair_of("GATv2Conv")

    def ops_of_a_step():
        with torch.profiler.profile() as profile:
            found = trained(ours, relu)
        assert_close(found, trained(conv, relu))
        return {event.key for event in profile.key_averages()}

    assert "edgeless::attention_backward_into" in ops_of_a_step()
    seen = []
    ours.fc_src.register_forward_hook(lambda module, given, rows: seen.append((rows, rows.detach().clone())))
    assert "edgeless::attention_backward_into" not in ops_of_a_step()
    assert seen and all(torch.equal(rows, copy) for rows, copy in seen)
