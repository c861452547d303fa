"""Layers whose messages are generated against PyG's, and what else is true of a layer."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch_geometric.nn as stock
from generated_cases import CASES, Inputs, N, compare, error, mlp, pair_of_layers
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import MessagePassing as StockMessagePassing
from torch_geometric.utils import softmax

import edgeless
import edgeless.pyg.nn as fused
from edgeless.layers.calls import recording
from edgeless.pyg.generated import known_forwards
from edgeless.pyg.generated.calls import PROGRAMS
from edgeless.pyg.generated.classes import GeneratedLayer

STOCK = ("SimpleConv mul",)  # the gradient of a product
WHOLE = ("HEATConv", "CFConv")  # make tensors by edge before they propagate
LANDED = {
    "SimpleConv": "spmm",
    "ChebConv": "spmm",
    "GatedGraphConv": "spmm",
    "TAGConv": "spmm",
    "SGConv": "spmm",
    "APPNP": "spmm",
    "GCN2Conv": "spmm",
    "HypergraphConv": "spmm",
    "LEConv": "spmm and a sum of edge rows",
    "PDNConv": "spmm",
    "HANConv": "gat_attention",
}


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")


def recorded(layer, *args, **kwargs):
    """The result, and for every propagate() (what is said of it, whether a program ran)."""
    with recording() as calls:
        out = layer(*args, **kwargs)
    return out, [(found.how or found.reasons[0], found.fused) for of, found in calls if is_generated(of)]


def is_generated(layer) -> bool:
    """Whether a layer's messages may be generated; others have kernels of their own."""
    return isinstance(layer, GeneratedLayer)


def recorded_texts(layer, *args, **kwargs):
    """The result, and what the programs' texts say, one below the other."""
    with recording() as calls:
        out = layer(*args, **kwargs)
    return out, "\n".join(found.levels for _, found in calls if found.levels and not found.how.startswith("landed"))


def case(name):
    make, inputs, *names = CASES[name]
    given = Inputs()
    kwargs = {key: getattr(given, value) for key, value in (names[0] if names else {}).items()}
    return *pair_of_layers(make), inputs(given), kwargs


INTERPRETED = ("DNAConv",)  # a maximum with its index is not in the closed list


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("name", CASES)
def test_parity_with_one_program(name, mode, monkeypatch):
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", mode)
    layer, ours, args, kwargs = case(name)
    _, calls = recorded(ours, *args, **kwargs)
    assert any(said == known_forwards.NEXT for said, _ in calls) == (name in WHOLE)
    if name in WHOLE:
        _, calls = recorded(ours, *args, **kwargs)
    assert calls and all(ran for _, ran in calls) == (name not in STOCK), calls
    if name in LANDED:
        assert {said for said, _ in calls} == {f"landed on {LANDED[name]}"}
    layer.load_state_dict(ours.state_dict())  # statistics of norms
    compare(layer, ours, args, kwargs)
    traces = PROGRAMS.traces
    ours(*args, **kwargs)
    ours(*args, **kwargs)
    assert PROGRAMS.traces == traces
    if mode == "now" and name not in (*STOCK, *INTERPRETED):
        _, texts = recorded_texts(ours, *args, **kwargs)
        assert "interpreted" not in texts, texts


@pytest.mark.parametrize("name", ["GINEConv", "GENConv softmax", "PNAConv", "LEConv", "CGConv norm", "HANConv"])
def test_float32_and_two_runs_give_the_same_bits(name):
    make, inputs, *_ = CASES[name]
    layer, ours = pair_of_layers(make, torch.float32)

    def single(value):
        if isinstance(value, torch.Tensor):
            return value.detach().float().requires_grad_() if value.is_floating_point() else value
        if isinstance(value, dict):
            return {key: single(v) for key, v in value.items()}
        return tuple(map(single, value)) if isinstance(value, tuple) else value

    args = tuple(map(single, inputs(Inputs())))
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        module = copy.deepcopy(ours)
        out, calls = recorded(module, *args)
        assert all(ran for _, ran in calls)
        out = list(out.values())[0] if isinstance(out, dict) else out
        grads = torch.autograd.grad(out.square().sum(), list(module.parameters()), allow_unused=True)
        runs.append([out, *(g for g in grads if g is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    compare(layer, ours, args, tolerance=2e-5)


def test_16_bits_and_autocast():
    given = Inputs()
    torch.manual_seed(0)
    layer = stock.ResGatedGraphConv(6, 8)
    reference = layer(given.x.float(), given.edge_index)
    ours = copy.deepcopy(layer)
    edgeless.accelerate(ours)
    x = given.x.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, given.edge_index)
        out, calls = recorded(ours, x, given.edge_index)
    assert calls == [("generated", True)] and out.dtype == expected.dtype
    assert error(out.float(), reference) < 2 * error(expected.float(), reference) + 1e-3
    torch.autograd.grad(out.float().sum(), x)
    half, ours = layer.bfloat16(), copy.deepcopy(ours).bfloat16()
    out, calls = recorded(ours, x.bfloat16(), given.edge_index)
    assert calls == [("generated", True)] and out.dtype == torch.bfloat16
    expected = half(x.bfloat16(), given.edge_index)
    assert error(out.float(), reference) < 2 * error(expected.float(), reference) + 1e-3


def test_second_derivatives():
    _, ours, args, _ = case("ResGatedGraphConv attr")
    layer = case("ResGatedGraphConv attr")[0]
    grads = []
    for module in (layer, ours):
        x = args[0].detach().requires_grad_()
        out = module(x, *args[1:])
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), [x, *module.parameters()], allow_unused=True))
    assert all(error(a, b) < 1e-10 for a, b in zip(*grads, strict=True) if b is not None)


def test_batches_of_gradients_and_overwritten_results():
    layer, ours, args, _ = case("GENConv softmax")
    batch = torch.randn(3, N, 8, dtype=torch.float64)
    grads = []
    for module in (layer, ours):
        out = module(*args)
        many = torch.autograd.grad(out, args[0], batch, is_grads_batched=True, retain_graph=True)[0]
        out.mul_(2)
        grads.append([many, torch.autograd.grad(out.sum(), args[0])[0]])
    assert all(error(a, b) < 1e-10 for a, b in zip(*grads, strict=True))


def test_features_of_inference_mode():
    _, ours, args, _ = case("GINEConv")
    with torch.inference_mode():
        x = args[0].detach() * 1
        assert recorded(ours, x, *args[1:])[1] == [("inference mode is on", False)]


@pytest.mark.parametrize("name", ["GINEConv", "LEConv", "PNAConv", "GENConv softmax"])
def test_graphs_of_all_kinds(name):
    layer, ours, args, kwargs = case(name)
    given = Inputs()
    expected = layer(*args)
    for edge_index in (given.edge_index.int(), EdgeIndex(given.edge_index, sparse_size=(N, N))):
        place = next(i for i, a in enumerate(args) if a is args[1])
        changed = [*args[:place], edge_index, *args[place + 1 :]]
        out, calls = recorded(ours, *changed)
        assert error(out, expected) < 1e-10 and all(ran for _, ran in calls)
    empty = torch.empty(2, 0, dtype=torch.long)
    rest = [a[:0] if isinstance(a, torch.Tensor) else a for a in args[2:]]
    out, calls = recorded(ours, args[0], empty, *rest)
    assert error(out, layer(args[0], empty, *rest)) < 1e-10 and not any(ran for _, ran in calls)


def test_a_sparse_matrix():
    given = Inputs()
    layer = stock.ResGatedGraphConv(6, 8, edge_dim=1).double()
    ours = copy.deepcopy(layer)
    edgeless.accelerate(ours)
    ends = torch.unique(given.edge_index, dim=1)
    values = torch.rand(ends.size(1), 1, dtype=torch.float64)
    adj_t = torch.sparse_coo_tensor(ends.flip(0), values, (N, N, 1)).coalesce()
    out, calls = recorded(ours, given.x, adj_t)
    assert error(out, layer(given.x, adj_t)) < 1e-10
    assert calls == [("generated", True)], calls


class ByWeight(StockMessagePassing):
    """Messages that the values of a sparse matrix weight, unless a weight is given."""

    def forward(self, x, edges, value=None):
        return self.propagate(edges, x=x, edge_weight=value)

    def message(self, x_j, edge_weight):
        return x_j * edge_weight.view(-1, 1).exp()


class ByAttr(StockMessagePassing):
    def forward(self, x, edges, value=None):
        return self.propagate(edges, x=x, edge_attr=value)

    def message(self, x_j, edge_attr):
        return x_j * edge_attr.exp()


class ByType(StockMessagePassing):
    def forward(self, x, edges, value=None):
        return self.propagate(edges, x=x, edge_type=value)

    def message(self, x_j, edge_type):
        return x_j * edge_type.view(-1, 1).exp()


MATRICES = {"edge_weight": ByWeight, "edge_attr": ByAttr, "edge_type": ByType}


@pytest.mark.parametrize("name", ["edge_weight", "edge_attr", "edge_type"])
@pytest.mark.parametrize("given", [False, True])
def test_what_is_given_goes_before_the_values_of_a_sparse_matrix(name, given):
    inputs = Inputs()
    layer, ours = MATRICES[name](), copy.deepcopy(MATRICES[name]())
    edgeless.accelerate(ours)
    ends = torch.unique(inputs.edge_index, dim=1)
    shape, more = ((), ()) if name != "edge_attr" else ((1,), (1,))
    values, others = (torch.rand(ends.size(1), *shape, dtype=torch.float64) for _ in range(2))
    adj_t = torch.sparse_coo_tensor(ends.flip(0), values, (N, N, *more)).coalesce()
    args = (inputs.x, adj_t, others if given else None)
    out, calls = recorded(ours, *args)
    assert error(out, layer(*args)) < 1e-10 and [ran for _, ran in calls] == [True], calls


class Shifted(StockMessagePassing):
    """A layer that saves none of its inputs for the backward."""

    def forward(self, x, edges, e):
        return self.propagate(edges, x=x, e=e)

    def message(self, x_j, e):
        return x_j + e


def test_features_that_were_made_in_inference_mode():
    layer, ours = pair_of_layers(Shifted)
    given = Inputs()
    with torch.inference_mode():
        x = given.x.detach() * 1
    args = (x, given.edge_index, given.attr6)
    out, calls = recorded(ours, *args)
    assert [ran for _, ran in calls] == [False] and "was made in inference mode" in calls[0][0]
    assert error(out, layer(*args)) < 1e-10 and out.requires_grad
    with torch.no_grad():
        assert [ran for _, ran in recorded(ours, *args)[1]] == [True]


def test_new_graphs_share_a_program():
    _, ours, args, _ = case("GINEConv")
    layer = case("GINEConv")[0]
    ours(*args)
    traces, programs = PROGRAMS.traces, len(PROGRAMS)
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        nodes, edges = 10 + seed, 31 + 3 * seed
        new = (
            torch.randn(nodes, 6, dtype=torch.float64, generator=g).requires_grad_(),
            torch.randint(nodes, (2, edges), generator=g),
            torch.randn(edges, 3, dtype=torch.float64, generator=g).requires_grad_(),
        )
        compare(layer, ours, new)
    assert (PROGRAMS.traces, len(PROGRAMS)) == (traces, programs)


def test_copies_share_programs():
    _, ours, args, _ = case("GINEConv")
    first = ours(*args)
    traces = PROGRAMS.traces
    twin = copy.deepcopy(ours)
    assert type(twin) is type(ours) and torch.equal(twin(*args), first)
    assert PROGRAMS.traces == traces
    loaded = pickle.loads(pickle.dumps(ours))
    assert type(loaded) is type(ours) and torch.equal(loaded(*args), first)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(*args), first)


class Mine(StockMessagePassing):
    """A user's layer over PyG's class."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.lin = nn.Linear(15, 4)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i, x_j, e):
        return self.lin(torch.cat([x_i, x_j, e], dim=-1)).relu()


class Ours(fused.MessagePassing):
    """The same over ours."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.lin = nn.Linear(15, 4)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i, x_j, e):
        return self.lin(torch.cat([x_i, x_j, e], dim=-1)).relu()


class Attention(StockMessagePassing):
    """A user's attention."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin, self.score = nn.Linear(6, 4), nn.Linear(11, 1)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=self.lin(x), e=e)

    def message(self, x_i, x_j, e, index):
        score = torch.nn.functional.leaky_relu(self.score(torch.cat([x_i, x_j, e], dim=-1)))
        return softmax(score, index) * x_j


def test_users_classes():
    given = Inputs()
    args = (given.x, given.edge_index, given.attr)
    layer, ours = pair_of_layers(Mine)
    assert isinstance(ours, Mine) and type(ours) is not Mine
    compare(layer, ours, args)
    assert str(edgeless.explain(ours, *args)) == "Mine runs fused, generated."
    loaded = pickle.loads(pickle.dumps(ours))
    assert isinstance(loaded, Mine) and torch.equal(loaded(*args), ours(*args))
    assert edgeless.accelerate(ours).swapped == []


def test_a_users_attention_lands():
    given = Inputs()
    given.edge_index[:, -1] = N - 1  # softmax() gets no size, so the last node must have an edge
    args = (given.x, given.edge_index, given.attr)
    layer, ours = pair_of_layers(Attention)
    compare(layer, ours, args)
    assert edgeless.explain(ours, *args).how == "landed on gat_attention with an edge term"
    given.edge_index[given.edge_index == N - 1] = 0
    compare(layer, ours, args)
    assert "whose last node has no edge" in str(edgeless.explain(ours, *args))


def test_our_base_class():
    ours, layer = Ours().double(), Mine().double()
    layer.load_state_dict(ours.state_dict())
    given = Inputs()
    args = (given.x, given.edge_index, given.attr)
    compare(layer, ours, args)
    assert edgeless.explain(ours, *args)
    assert isinstance(ours, fused.MessagePassing) and isinstance(fused.GATConv(4, 4), fused.MessagePassing)
    assert isinstance(layer, fused.MessagePassing) and issubclass(Mine, fused.MessagePassing)
    assert not isinstance(layer, Ours) and not isinstance(nn.Linear(1, 1), fused.MessagePassing)
    again = pickle.loads(pickle.dumps(ours))
    assert type(again) is Ours and torch.equal(again(*args), ours(*args))
    plan = str(edgeless.explain(ours, *args, plan=True))
    assert "walk by destination" in plan and "backward:" in plan


def test_the_setting(monkeypatch):
    _, ours, args, _ = case("GINEConv")
    monkeypatch.setenv("EDGELESS_GENERATE", "land")
    assert "lands on no op" in str(edgeless.explain(ours, *args))
    _, lands, others, _ = case("LEConv")
    assert edgeless.explain(lands, *others)
    monkeypatch.setenv("EDGELESS_GENERATE", "off")
    assert "EDGELESS_GENERATE is off" in str(edgeless.explain(ours, *args))
    kept = edgeless.accelerate(nn.ModuleList([case("GINEConv")[0]])).kept
    hint = "unless EDGELESS_GENERATE is off, its messages are generated"
    assert [why for _, _, why in kept] == [f"edgeless has no fused GINEConv; {hint}"]
    monkeypatch.setenv("EDGELESS_GENERATE", "yes")
    with pytest.raises(ValueError, match="EDGELESS_GENERATE must be one of auto, off, land, on, got 'yes'"):
        ours(*args)


def test_torchscript_compiles_the_stock_layer():
    given = Inputs()
    layer = fused.LEConv(6, 8)
    scripted = torch.jit.script(layer)
    x = given.x.detach().float()
    torch.testing.assert_close(scripted(x, given.edge_index), layer(x, given.edge_index))


def test_torch_compile_runs_the_stock_layer(fresh_dynamo):
    given = Inputs()
    layer = fused.GINEConv(mlp(6, 8), edge_dim=3)
    args = (given.x.detach().float(), given.edge_index, given.attr.detach().float())
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), layer(*args))


def test_explain_mode_of_pyg():
    given = Inputs()
    layer = Ours().double()
    args = (given.x, given.edge_index, given.attr)
    before = layer(*args)
    layer.explain = True
    layer._edge_mask, layer._apply_sigmoid = torch.ones(given.edge_index.size(1), dtype=torch.float64), False
    assert error(layer(*args), before) < 1e-10
    layer.explain = False
    assert error(layer(*args), before) < 1e-10
