"""What users do with layers, of those whose messages are generated: train, copy, explain, sample, run in threads."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
import torch_geometric.nn as stock
from generated_cases import CASES, Inputs, N, compare, error, mlp, pair_of_layers
from generated_nets import given, in_parallel, pair_of_nets
from part_cases import spawn
from test_generated_layers import recorded
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.explain import Explainer, GNNExplainer

import edgeless
from edgeless.pyg.generated.calls import PROGRAMS


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", "off")


def train(net, steps=6, clip=0.5):
    """Training with accumulated and clipped gradients, a frozen and a replaced parameter, and both modes."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    losses = []
    for step in range(steps):
        if step == 2:
            net.first.lin.weight.requires_grad_(False)
        if step == 4:
            net.second.lin_key.weight = nn.Parameter(net.second.lin_key.weight.detach() * 0.5)
            optimizer.add_param_group({"params": [net.second.lin_key.weight]})
        net.train(step % 3 != 1)
        optimizer.zero_grad()
        for part in range(2):
            loss = net(*given(10 * step + part)).square().mean()
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return losses


def test_a_training():
    theirs, ours = pair_of_nets()
    _, calls = recorded(ours, *given())
    assert [ran for _, ran in calls] == [True] * 2
    ours.load_state_dict(theirs.state_dict())
    for a, b in zip(train(theirs), train(ours), strict=True):
        assert abs(a - b) < 1e-10
    for (name, a), b in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        assert error(b.double(), a.double()) < 1e-9, name


def test_two_processes_under_ddp(tmp_path):
    assert not spawn(in_parallel, 2, tmp_path)


def test_threads_share_programs():
    """The first calls of several threads trace and run at once."""
    theirs, ours = pair_of_nets()
    theirs.eval(), ours.eval()
    PROGRAMS.clear()
    twins = [copy.deepcopy(ours) for _ in range(4)]
    found: dict[int, float] = {}

    def work(number):
        worst = 0.0
        for seed in range(number, number + 5):
            worst = max(worst, error(twins[number](*given(seed)), theirs(*given(seed))))
        found[number] = worst

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2, 3] and max(found.values()) < 1e-10


def test_a_thousand_graphs_have_one_program_and_no_memory():
    _, ours = pair_of_layers(lambda: stock.GINEConv(mlp(6, 8), edge_dim=3))
    g = torch.Generator().manual_seed(0)

    def step():
        nodes, edges = (int(n) for n in torch.randint(20, 60, (2,), generator=g))
        edges += 40
        x = torch.randn(nodes, 6, generator=g, dtype=torch.float64)
        e = torch.randn(edges, 3, generator=g, dtype=torch.float64)
        ours(x, torch.randint(nodes, (2, edges), generator=g), e).sum().backward()

    def kept():
        edgeless.clear_cache()
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(isinstance(x, torch.Tensor) for x in objects)

    for _ in range(20):
        step()
    traces, before = PROGRAMS.traces, kept()
    for _ in range(1000):
        step()
    objects, tensors = kept()
    assert PROGRAMS.traces == traces
    assert tensors <= before[1] + 2 and objects < before[0] + 200


@pytest.mark.parametrize("name", ["GINEConv", "GENConv softmax", "EdgeConv norm"])
def test_training_and_evaluation_are_programs_of_their_own(name):
    make, inputs, *_ = CASES[name]
    layer, ours = pair_of_layers(make)
    args = inputs(Inputs())
    for mode in (True, False, True):
        layer.train(mode), ours.train(mode)
        compare(layer, ours, args)


def test_explainers_of_pyg():
    theirs, ours = pair_of_nets()
    masks = []
    for net in (theirs.eval(), ours.eval()):
        torch.manual_seed(0)
        x, edge_index, e = given()
        explainer = Explainer(
            net,
            GNNExplainer(epochs=3),
            explanation_type="model",
            edge_mask_type="object",
            node_mask_type="attributes",
            model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        )
        masks.append(explainer(x, edge_index, edge_attr=e, index=3).edge_mask)
    assert error(masks[1], masks[0]) < 1e-10 and masks[0].abs().sum() > 0
    out, calls = recorded(ours, *given())
    assert all(ran for _, ran in calls) and error(out, theirs(*given())) < 1e-10


def test_to_hetero():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = stock.EdgeConv(mlp(12, 8)), stock.ResGatedGraphConv((-1, -1), 4)

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index).relu(), edge_index)

    inputs = Inputs()
    data = HeteroData()
    data["a"].x, data["b"].x = inputs.pair[0].detach(), inputs.pair[1].detach()
    for relation, edge_index in inputs.relations.items():
        data[relation].edge_index = edge_index
    torch.manual_seed(0)
    try:
        theirs = stock.to_hetero(Layers().double(), data.metadata(), aggr="sum")
    except AttributeError as reason:
        pytest.skip(f"this PyG's to_hetero does not work with this torch: {reason}")
    with torch.no_grad():
        theirs(data.x_dict, data.edge_index_dict)
    ours = copy.deepcopy(theirs)
    assert len(edgeless.accelerate(ours).swapped) == 6
    mine, calls = recorded(ours, data.x_dict, data.edge_index_dict)
    assert all(ran for _, ran in calls) and len(calls) == 6
    for kind, rows in theirs(data.x_dict, data.edge_index_dict).items():
        assert error(mine[kind], rows) < 1e-10


def test_hooks_of_modules_around_and_of_gradients():
    theirs, ours = pair_of_nets()
    for net in (theirs, ours):
        net.seen = []
        net.first.register_forward_hook(lambda module, args, out, net=net: net.seen.append(out.detach().sum()))
        net.second.register_full_backward_hook(lambda module, grads, out, net=net: net.seen.append(out[0].sum()))
        net.first.lin.weight.register_hook(lambda grad, net=net: (net.seen.append(grad.sum()), 2 * grad)[1])
        net(*given()).square().mean().backward()
    assert len(ours.seen) == 3
    for a, b in zip(ours.seen, theirs.seen, strict=True):
        assert error(a, b) < 1e-10
    assert error(ours.first.lin.weight.grad, theirs.first.lin.weight.grad) < 1e-10


def test_derivatives_that_are_not_supported_are_right_or_refused():
    layer, ours = pair_of_layers(lambda: stock.EdgeConv(mlp(12, 8)))
    x, edge_index, _ = given()
    for module in (layer, ours):
        module.found = torch.func.jvp(lambda rows, m=module: m(rows, edge_index), (x,), (torch.ones_like(x),))
    assert all(error(a, b) < 1e-10 for a, b in zip(ours.found, layer.found, strict=True))
    hessians = [
        torch.autograd.functional.hessian(lambda rows, m=module: m(rows, edge_index).square().sum(), x[:, :6])
        for module in (layer, ours)
    ]
    assert error(*hessians) < 1e-10


def test_a_checkpointed_layer():
    theirs, ours = pair_of_nets()
    grads = []
    for net in (theirs, ours):
        x, edge_index, e = given()
        x.requires_grad_()
        out = torch.utils.checkpoint.checkpoint(net, x, edge_index, e, use_reentrant=False)
        grads.append(torch.autograd.grad(out.square().sum(), [x, *net.parameters()]))
    assert all(error(a, b) < 1e-10 for a, b in zip(*grads, strict=True))


# Models of PyG ------------------------------------------------------------------------------------------------------


class GPS(nn.Module):
    """GraphGPS: attention over all nodes beside GINEConv, in two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            stock.GPSConv(8, stock.GINEConv(mlp(8, 8), edge_dim=3), heads=2, dropout=0.0) for _ in range(2)
        )

    def forward(self, x, edge_index, e):
        for layer in self.layers:
            x = layer(x, edge_index, edge_attr=e)
        return x


class Deep(nn.Module):
    """DeepGCN: GENConv in DeepGCNLayer, two of them, with a residual."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            stock.DeepGCNLayer(
                stock.GENConv(8, 8, aggr="softmax", learn_t=True, num_layers=2, edge_dim=3),
                stock.LayerNorm(8),
                nn.ReLU(),
                block="res+",
                dropout=0.0,
            )
            for _ in range(2)
        )

    def forward(self, x, edge_index, e):
        for layer in self.layers:
            x = layer(x, edge_index, e)
        return x


class Gated(nn.Module):
    """GatedGCN, as PyG has it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(stock.ResGatedGraphConv(8, 8, edge_dim=3) for _ in range(2))

    def forward(self, x, edge_index, e):
        for layer in self.layers:
            x = x + layer(x, edge_index, e).relu()
        return x


class Sums(nn.Module):
    """A model of PyG's that takes no edge features, or takes them by name."""

    def __init__(self, model, **names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, x, edge_index, e):
        return self.model(x, edge_index, **dict.fromkeys(self.names, e))


MODELS = {
    "GPS": GPS,
    "DeepGCN": Deep,
    "GatedGCN": Gated,
    "PNA": lambda: Sums(
        stock.PNA(8, 8, 2, 4, aggregators=["mean", "min", "max", "std"],
                  scalers=["identity", "amplification", "attenuation"], deg=Inputs().degrees, edge_dim=3),
        edge_attr=True,
    ),
    "EdgeCNN": lambda: Sums(stock.EdgeCNN(8, 8, 2, 4)),
    "AttentiveFP": None,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["off", "now"])
@pytest.mark.parametrize("name", MODELS)
def test_models_by_accelerate_alone(name, mode, monkeypatch):
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", mode)
    inputs = Inputs()
    if name == "AttentiveFP":
        theirs, ours = pair_of_layers(lambda: stock.AttentiveFP(8, 8, 4, edge_dim=3, num_layers=2, num_timesteps=2))
        args = (inputs.wide, inputs.edge_index, inputs.attr, torch.zeros(N, dtype=torch.long))
    else:
        theirs, ours = pair_of_layers(MODELS[name])
        args = (inputs.wide, inputs.edge_index, inputs.attr)
    state = copy.deepcopy(theirs.state_dict())
    _, calls = recorded(ours, *args)
    assert calls and all(ran for _, ran in calls), calls
    ours.load_state_dict(state)
    compare(theirs, ours, args)
