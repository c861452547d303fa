"""DGL's layers whose messages are generated, with inputs, and the comparison with the stock layer."""

from __future__ import annotations

import copy

import dgl
import dgl.nn.pytorch as stock
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import edgeless

N, E, NUM_SRC, NUM_DST = 20, 70, 23, 11


class Inputs:
    """Random inputs in float64; the graph has repeated edges, loops and, but for ``full``, nodes without in-edges."""

    def __init__(self, seed: int = 0, idtype=torch.int64):
        g = torch.Generator().manual_seed(seed)

        def rows(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

        def ends(src, dst, count):
            found = [torch.randint(n - 1, (count,), generator=g) for n in (src, dst)]
            found[0][1], found[1][1] = found[0][0], found[1][0]
            found[0][2] = found[1][2] = 3
            return found

        self.graph = dgl.graph(tuple(ends(N, N, E)), num_nodes=N, idtype=idtype)
        src, dst = ends(N, N, E - N)
        every = torch.arange(N)
        self.full = dgl.graph((torch.cat([src, every]), torch.cat([dst, every])), num_nodes=N, idtype=idtype)
        src, dst = ends(NUM_SRC, NUM_DST, E)
        self.block = dgl.create_block((src, dst), num_src_nodes=NUM_SRC, num_dst_nodes=NUM_DST, idtype=idtype)
        dst = torch.cat([torch.arange(NUM_DST), dst[NUM_DST:]])
        self.full_block = dgl.create_block((src, dst), num_src_nodes=NUM_SRC, num_dst_nodes=NUM_DST, idtype=idtype)
        # Without loops and repeated edges, and with two or more in-edges, where a deviation has a gradient.
        dst = torch.cat([torch.arange(N)] * 3 + [torch.arange(10)])
        src = (dst + torch.tensor([1, 2, 5, 7]).repeat_interleave(N)[:E]) % N
        self.simple = dgl.graph((src, dst), num_nodes=N, idtype=idtype)
        last = dst == N - 1
        more = torch.arange(int(last.sum())) + 3
        src[last], dst[last] = (more + 9) % N, more
        self.lone = dgl.graph((src, dst), num_nodes=N, idtype=idtype)
        self.batch = dgl.batch([self.graph, self.full])
        self.x, self.x0, self.pos, self.eig = rows(N, 6), rows(N, 6), rows(N, 3), rows(N, 3)
        self.twice, self.attr_twice = rows(2 * N, 6), rows(2 * E, 3)
        self.attr, self.attr6 = rows(E, 3), rows(E, 6)
        self.weight = (torch.rand(E, generator=g, dtype=torch.float64) + 0.1).requires_grad_()
        self.distance = torch.rand(E, 1, generator=g, dtype=torch.float64).requires_grad_()
        self.atoms = torch.randint(1, 3, (N, 1), generator=g).double()
        self.src, self.dst = rows(NUM_SRC, 6), rows(NUM_DST, 6)
        self.types = torch.randint(3, (E,), generator=g)


def mlp(*widths, norm=False):
    layers = []
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(a, b), *([nn.BatchNorm1d(b)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


AGGREGATORS, SCALERS = ["mean", "max", "min", "sum", "std"], ["identity", "amplification", "attenuation"]
ATOMIC = [torch.tensor(v, dtype=torch.float64) for v in ([0.8, 0.9], [0.2, 0.4], [2.0, 3.0])]

# name -> (layer, function from the inputs to the arguments)
CASES = {
    "APPNPConv": (lambda: stock.APPNPConv(3, 0.1), lambda i: (i.graph, i.x)),
    "APPNPConv weights": (lambda: stock.APPNPConv(2, 0.1), lambda i: (i.full, i.x, i.weight)),
    "AtomicConv": (
        lambda: stock.AtomicConv(*ATOMIC, torch.tensor([1.0, 2.0], dtype=torch.float64)),
        lambda i: (i.graph, i.atoms, i.distance),
    ),
    "CFConv": (lambda: stock.CFConv(6, 3, 5, 8), lambda i: (i.graph, i.x, i.attr)),
    "CFConv block": (lambda: stock.CFConv(6, 3, 5, 8), lambda i: (i.block, (i.src, i.dst), i.attr)),
    "ChebConv": (lambda: stock.ChebConv(6, 8, 3), lambda i: (i.graph, i.x, [1.8])),
    "DGNConv": (
        lambda: stock.DGNConv(6, 8, ["dir1-av", "dir2-dx", "sum", "max"], SCALERS, 2.5),
        lambda i: (i.lone, i.x, None, i.eig),
    ),
    "DGNConv edges": (
        lambda: stock.DGNConv(6, 6, ["dir1-dx", "mean"], ["identity"], 2.5, edge_feat_size=3),
        lambda i: (i.simple, i.x, i.attr, i.eig),
    ),
    "EGATConv": (lambda: stock.EGATConv(6, 3, 8, 4, 2), lambda i: (i.full, i.x, i.attr)),
    "EGATConv weights": (
        lambda: stock.EGATConv(6, 3, 8, 4, 2),
        lambda i: (i.full, i.x, i.attr, i.weight, True),
    ),
    "EGATConv block": (lambda: stock.EGATConv(6, 3, 8, 4, 2), lambda i: (i.full_block, (i.src, i.dst), i.attr)),
    "EGNNConv": (lambda: stock.EGNNConv(6, 8, 5, 3), lambda i: (i.lone, i.x, i.pos, i.attr)),
    "EGNNConv no edges": (lambda: stock.EGNNConv(6, 8, 5), lambda i: (i.simple, i.x, i.pos)),
    "EdgeConv": (lambda: stock.EdgeConv(6, 8, allow_zero_in_degree=True), lambda i: (i.graph, i.x)),
    "EdgeConv full": (lambda: stock.EdgeConv(6, 8), lambda i: (i.full, i.x)),
    "EdgeConv block": (lambda: stock.EdgeConv(6, 8), lambda i: (i.full_block, (i.src, i.dst))),
    "EdgeConv norm": (lambda: stock.EdgeConv(6, 8, batch_norm=True), lambda i: (i.full, i.x)),
    "EdgeGATConv": (
        lambda: stock.EdgeGATConv(6, 3, 8, 2, allow_zero_in_degree=True),
        lambda i: (i.graph, i.x, i.attr),
    ),
    "EdgeGATConv attention": (
        lambda: stock.EdgeGATConv(6, 3, 8, 2, residual=True, activation=torch.tanh),
        lambda i: (i.full, i.x, i.attr, True),
    ),
    "EdgeGATConv block": (lambda: stock.EdgeGATConv(6, 3, 8, 2), lambda i: (i.full_block, i.src, i.attr)),
    "EdgeWeightNorm": (lambda: stock.EdgeWeightNorm("both"), lambda i: (i.full, i.weight)),
    "EdgeWeightNorm right": (lambda: stock.EdgeWeightNorm("right"), lambda i: (i.graph, i.weight)),
    "GCN2Conv": (
        lambda: stock.GCN2Conv(6, 1, project_initial_features=True, allow_zero_in_degree=True),
        lambda i: (i.graph, i.x, i.x0),
    ),
    "GCN2Conv weights": (lambda: stock.GCN2Conv(6, 2), lambda i: (i.full, i.x, i.x0, i.weight)),
    "GINEConv": (lambda: stock.GINEConv(mlp(6, 8), learn_eps=True), lambda i: (i.graph, i.x, i.attr6)),
    "GINEConv block": (lambda: stock.GINEConv(mlp(6, 8)), lambda i: (i.block, i.src, i.attr6)),
    "GINEConv batch": (
        lambda: stock.GINEConv(mlp(3, 8)),
        lambda i: (i.batch, i.twice[:, :3], i.attr_twice),
    ),
    "GMMConv": (
        lambda: stock.GMMConv(6, 8, 3, 2, "mean", allow_zero_in_degree=True),
        lambda i: (i.graph, i.x, i.attr),
    ),
    "GMMConv max": (lambda: stock.GMMConv(6, 8, 3, 2, "max"), lambda i: (i.full, i.x, i.attr)),
    "GatedGraphConv": (lambda: stock.GatedGraphConv(6, 8, 2, 1), lambda i: (i.graph, i.x)),
    "GatedGraphConv types": (lambda: stock.GatedGraphConv(6, 8, 2, 3), lambda i: (i.graph, i.x, i.types)),
    "NNConv": (lambda: stock.NNConv(6, 8, mlp(3, 4, 48), "mean"), lambda i: (i.graph, i.x, i.attr)),
    "NNConv sum": (lambda: stock.NNConv(6, 8, nn.Linear(3, 48), "sum"), lambda i: (i.block, (i.src, i.dst), i.attr)),
    "NNConv max": (lambda: stock.NNConv(6, 8, nn.Linear(3, 48), "max"), lambda i: (i.graph, i.x, i.attr)),
    "PNAConv": (
        lambda: stock.PNAConv(6, 8, AGGREGATORS, SCALERS, 2.5, edge_feat_size=3),
        lambda i: (i.lone, i.x, i.attr),
    ),
    "PNAConv towers": (
        lambda: stock.PNAConv(6, 6, ["std", "var", "moment3"], ["identity"], 2.5, num_towers=2),
        lambda i: (i.simple, i.x),
    ),
    "SGConv": (lambda: stock.SGConv(6, 8, 2, allow_zero_in_degree=True), lambda i: (i.graph, i.x)),
    "SGConv weights": (lambda: stock.SGConv(6, 8, 2), lambda i: (i.full, i.x, i.weight)),
    "TAGConv": (lambda: stock.TAGConv(6, 8, 2), lambda i: (i.graph, i.x)),
    "TAGConv weights": (lambda: stock.TAGConv(6, 8, 2), lambda i: (i.full, i.x, i.weight)),
    "TWIRLSConv": (
        lambda: stock.TWIRLSConv(6, 8, 8, prop_step=3, num_mlp_before=1, num_mlp_after=1),
        lambda i: (i.graph, i.x),
    ),
}
if hasattr(stock, "GatedGCNConv"):  # DGL 2
    CASES["GatedGCNConv"] = (lambda: stock.GatedGCNConv(6, 3, 8), lambda i: (i.simple, i.x, i.attr))


def pair_of_layers(name: str):
    """The stock layer of a case, in float64 and in training, and the same layer as edgeless' class."""
    torch.manual_seed(1)
    layer = CASES[name][0]().double()
    ours = copy.deepcopy(layer)
    edgeless.accelerate(ours)
    return layer, ours


def tensors_in(tree) -> list[Tensor]:
    return [a for a in pytree.tree_leaves(tree) if isinstance(a, Tensor)]


def error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = a.detach(), b.detach()
    return float((a - b).norm() / b.norm().clamp(min=1e-3))


def compare(layer, ours, given, tolerance: float = 1e-10) -> None:
    """Outputs, gradients of inputs and parameters, and buffers of two layers for the same inputs."""
    inputs = [t for t in tensors_in(given) if t.is_floating_point() and t.requires_grad]
    found = []
    for each in (ours, layer):
        torch.manual_seed(2)
        outputs = tensors_in(each(*given))
        assert all(type(out) is Tensor for out in outputs)
        wrt = [*inputs, *(p for p in each.parameters() if p.requires_grad)]
        weights = [torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out) for out in outputs]
        pairs = [(out, weight) for out, weight in zip(outputs, weights, strict=True) if out.requires_grad]
        grads = (
            torch.autograd.grad([o for o, _ in pairs], wrt, [w for _, w in pairs], allow_unused=True) if pairs else []
        )
        grads = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(wrt, grads, strict=True)]
        found.append((outputs, grads, list(each.buffers())))
    for what, a, b in zip(("output", "gradient", "buffer"), *found, strict=True):
        assert len(a) == len(b)
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            assert error(x.double(), y.double()) < tolerance, (what, place, error(x.double(), y.double()))
