"""PyG's layers whose messages are generated, with inputs, and the comparison with the stock layer."""

from __future__ import annotations

import copy

import torch
import torch_geometric.nn as stock
from torch import Tensor, nn
from torch_geometric.nn.aggr import PowerMeanAggregation, SoftmaxAggregation
from torch_geometric.nn.models import AttentiveFP, visnet
from torch_geometric.nn.models.attentive_fp import GATEConv
from torch_geometric.nn.models.schnet import CFConv

import edgeless

N, E, NUM_SRC, NUM_DST = 20, 70, 23, 11
AGGREGATIONS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation"]
TYPES = (["a", "b"], [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a")])


class Inputs:
    """Random inputs in float64; the graph has repeated edges, loops and nodes without edges."""

    def __init__(self, seed: int = 0):
        g = torch.Generator().manual_seed(seed)

        def rows(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

        def edges(src, dst, count=E):
            ends = torch.stack([torch.randint(n - 1, (count,), generator=g) for n in (src, dst)])
            ends[:, 1], ends[:, 2] = ends[:, 0], 3
            return ends

        self.edge_index, self.across = edges(N, N), edges(NUM_SRC, NUM_DST)
        self.x, self.x0, self.narrow, self.wide = rows(N, 6), rows(N, 6), rows(N, 1), rows(N, 8)
        self.attr, self.attr6, self.attr8 = rows(E, 3), rows(E, 6), rows(E, 8)
        self.weight = torch.rand(E, generator=g, dtype=torch.float64).requires_grad_()
        self.pseudo = torch.rand(E, 2, generator=g, dtype=torch.float64).requires_grad_()
        self.pos = rows(N, 3)
        self.normal = nn.functional.normalize(torch.randn(N, 3, generator=g, dtype=torch.float64)).requires_grad_()
        self.pair = (rows(NUM_SRC, 6), rows(NUM_DST, 6))
        self.pair_pos = (rows(NUM_SRC, 3), rows(NUM_DST, 3))
        self.history, self.vectors = rows(N, 2, 8), rows(N, 8, 8)
        self.batched = rows(2, N, 6)
        self.edge_type = torch.randint(3, (E,), generator=g)
        self.node_type = torch.randint(2, (N,), generator=g)
        self.hyper = torch.stack([torch.randint(n, (E,), generator=g) for n in (N, 9)])
        self.hyper_attr = rows(9, 6)
        self.degrees = torch.bincount(torch.bincount(self.edge_index[1], minlength=N))
        self.without_loops = self.edge_index[:, self.edge_index[0] != self.edge_index[1]]
        self.nodes = {"a": self.pair[0], "b": self.pair[1]}
        self.relations = {
            TYPES[1][0]: self.across,
            TYPES[1][1]: self.across.flip(0),
            TYPES[1][2]: edges(NUM_SRC, NUM_SRC),
        }


def mlp(width: int, out: int, norm: bool = False) -> nn.Sequential:
    """Two linear maps with a ReLU between."""
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(width, 8), *middle, nn.ReLU(), nn.Linear(8, out))


# name -> (layer, positional inputs, and where there are some the names of keyword inputs)
CASES = {
    "SimpleConv": (lambda: stock.SimpleConv("sum"), lambda i: (i.x, i.edge_index, i.weight)),
    "SimpleConv mul": (lambda: stock.SimpleConv("mul"), lambda i: (i.x, i.edge_index)),
    "ChebConv": (lambda: stock.ChebConv(6, 8, 3), lambda i: (i.x, i.edge_index, i.weight)),
    "GatedGraphConv": (lambda: stock.GatedGraphConv(8, 2), lambda i: (i.x, i.edge_index, i.weight)),
    "ResGatedGraphConv": (lambda: stock.ResGatedGraphConv(6, 8), lambda i: (i.x, i.edge_index)),
    "ResGatedGraphConv attr": (
        lambda: stock.ResGatedGraphConv(6, 8, edge_dim=3),
        lambda i: (i.x, i.edge_index, i.attr),
    ),
    "ResGatedGraphConv pair": (lambda: stock.ResGatedGraphConv((6, 6), 8), lambda i: (i.pair, i.across)),
    "TAGConv": (lambda: stock.TAGConv(6, 8), lambda i: (i.x, i.edge_index, i.weight)),
    "GINEConv": (
        lambda: stock.GINEConv(mlp(6, 8), train_eps=True, edge_dim=3),
        lambda i: (i.x, i.edge_index, i.attr),
    ),
    "GINEConv wide": (lambda: stock.GINEConv(mlp(6, 8)), lambda i: (i.x, i.edge_index, i.attr6)),
    "GINEConv pair": (lambda: stock.GINEConv(mlp(6, 8), edge_dim=3), lambda i: (i.pair, i.across, i.attr)),
    "ARMAConv": (lambda: stock.ARMAConv(6, 8, 2, 2), lambda i: (i.x, i.edge_index, i.weight)),
    "SGConv": (lambda: stock.SGConv(6, 8, 2), lambda i: (i.x, i.edge_index, i.weight)),
    "SSGConv": (lambda: stock.SSGConv(6, 8, 0.1, 2), lambda i: (i.x, i.edge_index, i.weight)),
    "APPNP": (lambda: stock.APPNP(3, 0.1), lambda i: (i.x, i.edge_index, i.weight)),
    "MFConv": (lambda: stock.MFConv(6, 8), lambda i: (i.x, i.edge_index)),
    "SignedConv": (
        lambda: stock.SignedConv(6, 8, True),
        lambda i: (i.x, i.edge_index[:, :30].contiguous(), i.edge_index[:, 30:].contiguous()),
    ),
    "DNAConv": (lambda: stock.DNAConv(8, 2), lambda i: (i.history, i.edge_index, i.weight)),
    "PointNetConv": (
        lambda: stock.PointNetConv(mlp(9, 8), mlp(8, 8), add_self_loops=False),
        lambda i: (i.x, i.pos, i.edge_index),
    ),
    "PointNetConv pair": (
        lambda: stock.PointNetConv(mlp(9, 8), None),
        lambda i: (i.pair, i.pair_pos, i.across),
    ),
    "GMMConv": (lambda: stock.GMMConv(6, 8, 3, 4), lambda i: (i.x, i.edge_index, i.attr)),
    "GMMConv separate": (
        lambda: stock.GMMConv(6, 8, 3, 4, separate_gaussians=True),
        lambda i: (i.x, i.edge_index, i.attr),
    ),
    "NNConv": (lambda: stock.NNConv(6, 8, mlp(3, 48)), lambda i: (i.x, i.edge_index, i.attr)),
    "CGConv": (lambda: stock.CGConv(6, 3), lambda i: (i.x, i.edge_index, i.attr)),
    "CGConv norm": (lambda: stock.CGConv(6, 3, batch_norm=True), lambda i: (i.x, i.edge_index, i.attr)),
    "EdgeConv": (lambda: stock.EdgeConv(mlp(12, 8)), lambda i: (i.x, i.edge_index)),
    "EdgeConv mean": (lambda: stock.EdgeConv(mlp(12, 8), "mean"), lambda i: (i.x, i.edge_index)),
    "EdgeConv norm": (lambda: stock.EdgeConv(mlp(12, 8, norm=True)), lambda i: (i.x, i.edge_index)),
    "EdgeConv MLP": (lambda: stock.EdgeConv(stock.MLP([12, 8, 8])), lambda i: (i.x, i.edge_index)),
    "EdgeConv pair": (lambda: stock.EdgeConv(mlp(12, 8)), lambda i: (i.pair, i.across)),
    "PPFConv": (
        lambda: stock.PPFConv(mlp(10, 8), mlp(8, 8), add_self_loops=False),
        lambda i: (i.x, i.pos, i.normal, i.without_loops),
    ),
    "FeaStConv": (lambda: stock.FeaStConv(6, 8, 2, add_self_loops=False), lambda i: (i.x, i.edge_index)),
    "PointTransformerConv": (
        lambda: stock.PointTransformerConv(6, 8, mlp(3, 8), mlp(8, 8), add_self_loops=False),
        lambda i: (i.x, i.pos, i.edge_index),
    ),
    "HypergraphConv": (lambda: stock.HypergraphConv(6, 8), lambda i: (i.x, i.hyper)),
    "HypergraphConv attention": (
        lambda: stock.HypergraphConv(6, 8, use_attention=True, heads=2),
        lambda i: (i.x, i.hyper, None, i.hyper_attr),
    ),
    "LEConv": (lambda: stock.LEConv(6, 8), lambda i: (i.x, i.edge_index, i.weight)),
    "PNAConv": (
        lambda: stock.PNAConv(6, 8, AGGREGATIONS, SCALERS, Inputs().degrees, edge_dim=3, towers=2),
        lambda i: (i.x, i.edge_index, i.attr),
    ),
    "PNAConv deep": (
        lambda: stock.PNAConv(6, 8, AGGREGATIONS, SCALERS, Inputs().degrees, pre_layers=2),
        lambda i: (i.x, i.edge_index),
    ),
    "ClusterGCNConv": (lambda: stock.ClusterGCNConv(6, 8), lambda i: (i.x, i.edge_index)),
    "GENConv softmax": (
        lambda: stock.GENConv(6, 8, "softmax", learn_t=True, edge_dim=3),
        lambda i: (i.x, i.edge_index, i.attr),
    ),
    "GENConv powermean": (
        lambda: stock.GENConv(6, 8, "powermean", learn_p=True, edge_dim=3),
        lambda i: (i.x, i.edge_index, i.attr),
    ),
    "GENConv batched": (lambda: stock.GENConv(6, 6, "sum", norm=None), lambda i: (i.batched, i.edge_index)),
    "GCN2Conv": (lambda: stock.GCN2Conv(6, 0.1), lambda i: (i.x, i.x0, i.edge_index, i.weight)),
    "WLConvContinuous": (lambda: stock.WLConvContinuous(), lambda i: (i.x, i.edge_index, i.weight)),
    "FiLMConv": (lambda: stock.FiLMConv(6, 8), lambda i: (i.x, i.edge_index)),
    "FiLMConv relations": (lambda: stock.FiLMConv(6, 8, 3), lambda i: (i.x, i.edge_index, i.edge_type)),
    "SuperGATConv MX": (
        lambda: stock.SuperGATConv(6, 8, heads=2, attention_type="MX").eval(),
        lambda i: (i.x, i.edge_index),
    ),
    "SuperGATConv SD": (
        lambda: stock.SuperGATConv(6, 8, heads=2, attention_type="SD", add_self_loops=False).eval(),
        lambda i: (i.x, i.edge_index),
    ),
    "FAConv": (lambda: stock.FAConv(6), lambda i: (i.x, i.x0, i.edge_index)),
    "EGConv": (
        lambda: stock.EGConv(6, 8, ["sum", "mean", "std", "max", "symnorm"]),
        lambda i: (i.x, i.edge_index),
    ),
    "PDNConv": (lambda: stock.PDNConv(6, 8, 3, 4), lambda i: (i.x, i.edge_index, i.attr)),
    "GeneralConv": (lambda: stock.GeneralConv(6, 8, 3), lambda i: (i.x, i.edge_index, i.attr)),
    "GeneralConv additive": (
        lambda: stock.GeneralConv(6, 8, 3, attention=True, heads=2),
        lambda i: (i.x, i.edge_index, i.attr),
    ),
    "GeneralConv dot": (
        lambda: stock.GeneralConv(6, 8, 3, attention=True, attention_type="dot_product", heads=2),
        lambda i: (i.x, i.edge_index, i.attr),
    ),
    "HEATConv": (
        lambda: stock.HEATConv(6, 8, 2, 3, 4, 3, 4, heads=2),
        lambda i: (i.x, i.edge_index, i.node_type, i.edge_type, i.attr),
    ),
    "LGConv": (lambda: stock.LGConv(), lambda i: (i.x, i.edge_index, i.weight)),
    "PointGNNConv": (
        lambda: stock.PointGNNConv(mlp(6, 3), mlp(9, 8), mlp(8, 6)),
        lambda i: (i.x, i.pos, i.edge_index),
    ),
    "MixHopConv": (lambda: stock.MixHopConv(6, 8), lambda i: (i.x, i.edge_index, i.weight)),
    "HANConv": (lambda: stock.HANConv({"a": 6, "b": 6}, 8, TYPES, heads=2), lambda i: (i.nodes, i.relations)),
    "DirGNNConv": (lambda: stock.DirGNNConv(stock.LEConv(6, 8)), lambda i: (i.x, i.edge_index)),
    "AntiSymmetricConv": (
        lambda: stock.AntiSymmetricConv(6, stock.GINEConv(mlp(6, 6), edge_dim=3)),
        lambda i: (i.x, i.edge_index, i.attr),
    ),
    "HeteroConv": (
        lambda: stock.HeteroConv({t: stock.EdgeConv(mlp(12, 8)) for t in TYPES[1]}),
        lambda i: (i.nodes, i.relations),
    ),
    "GPSConv": (
        lambda: stock.GPSConv(8, stock.GINEConv(mlp(8, 8), edge_dim=3), heads=1, norm=None).eval(),
        lambda i: (i.wide, i.edge_index, torch.zeros(N, dtype=torch.long)),
        {"edge_attr": "attr"},
    ),
    "SimpleConv softmax": (
        lambda: stock.SimpleConv(SoftmaxAggregation(learn=True)),
        lambda i: (i.x, i.edge_index),
    ),
    "SimpleConv power mean": (
        lambda: stock.SimpleConv(PowerMeanAggregation(learn=True)),
        lambda i: (i.x, i.edge_index),
    ),
    "CFConv": (lambda: CFConv(6, 8, 5, mlp(3, 5), 10.0), lambda i: (i.x, i.edge_index, i.weight, i.attr)),
    "GATEConv": (lambda: GATEConv(8, 8, 3), lambda i: (i.wide, i.edge_index, i.attr)),
    "ViS_MP": (
        lambda: visnet.ViS_MP(2, 8, 5.0, None, False),
        lambda i: (i.wide, i.vectors, i.edge_index, i.weight, i.attr8, i.attr8),
    ),
    "AttentiveFP": (
        lambda: AttentiveFP(6, 8, 4, 3, 2, 2),
        lambda i: (i.x, i.edge_index, i.attr, torch.zeros(N, dtype=torch.long)),
    ),
    "LEConv reverse": (lambda: stock.LEConv(6, 8, flow="target_to_source"), lambda i: (i.x, i.edge_index)),
    "PNAConv reverse": (
        lambda: stock.PNAConv(6, 8, AGGREGATIONS, SCALERS, Inputs().degrees, flow="target_to_source"),
        lambda i: (i.x, i.edge_index),
    ),
}


def tensors(value) -> list[Tensor]:
    """All tensors in a nested value."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for part in value for t in tensors(part)] if isinstance(value, (list, tuple)) else []


def error(a: Tensor, b: Tensor) -> float:
    """The relative difference by norm."""
    if b.numel() == 0:
        return 0.0
    return float((a.detach() - b.detach()).norm() / b.detach().norm().clamp(min=1e-3))


def pair_of_layers(make, dtype=torch.float64):
    """The stock layer and its accelerated copy."""
    torch.manual_seed(1)
    layer = make().to(dtype)
    ours = copy.deepcopy(layer)
    edgeless.accelerate(ours)
    return layer, ours


def compare(layer, ours, args, kwargs=None, tolerance: float = 1e-10) -> float:
    """Asserts that outputs, gradients and buffers agree; returns the largest difference."""
    kwargs = kwargs or {}
    results = []
    for module in (layer, ours):
        torch.manual_seed(2)
        out = [t for t in tensors(module(*args, **kwargs)) if t.is_floating_point()]
        inputs = [t for t in tensors([list(args), list(kwargs.values())]) if t.requires_grad]
        inputs += [p for p in module.parameters() if p.requires_grad]
        outputs = [t for t in out if t.requires_grad]
        torch.manual_seed(3)
        weights = [torch.randn_like(t) for t in outputs]
        grads = torch.autograd.grad(outputs, inputs, weights, allow_unused=True) if inputs else []
        grads = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True)]
        buffers = [b.double() for b in module.buffers()]
        results.append([*out, *grads, *buffers])
    theirs, mine = results
    assert len(theirs) == len(mine)
    errors = [error(a, b) for a, b in zip(mine, theirs, strict=True)]
    assert all(a.shape == b.shape for a, b in zip(mine, theirs, strict=True))
    assert max(errors, default=0) < tolerance, errors
    return max(errors, default=0)
