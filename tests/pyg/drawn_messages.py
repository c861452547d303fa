"""Random message functions: expressions, aggregations, shapes and options are drawn together."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.utils import softmax

from edgeless.pyg.nn import MessagePassing

WIDTH, HEADS = 6, 2
UNARY = {
    "relu": torch.relu,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "square": lambda x: x * x,
    "exp": lambda x: torch.exp(x.clamp(max=2.0)),
    "silu": F.silu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "abs": torch.abs,
    "sqrt": lambda x: (x.abs() + 0.5).sqrt(),
    "inverse": lambda x: 1 / (x.abs() + 1),
    "log": lambda x: torch.log1p(x.abs()),
    "neg": torch.neg,
    "double": lambda x: 2 * x,
    "third": lambda x: x / 3,
    "shift": lambda x: x + 0.25,
    "softmax": lambda x: x.softmax(-1),
    "normed": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "detached": lambda x: x.detach(),
    "flipped": lambda x: x.flip(-1),
    "rolled": lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
    "heads": lambda x: (x.view(*x.shape[:-1], HEADS, -1) * torch.tensor([[1.0], [2.0]])).flatten(-2),
    "head sum": lambda x: x.view(*x.shape[:-1], HEADS, -1).sum(-1).repeat_interleave(WIDTH // HEADS, -1),
    "best": lambda x: x.amax(-1, keepdim=True).expand(x.shape),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "in place": lambda x: x.clone().mul_(0.5).add_(1),
    "over edges": lambda x: x - x.sum(0) / x.size(0),
    "first": lambda x: x - x[0],
    "running": lambda x: x.cumsum(0),
}
RARE = ("over edges", "first", "running")
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "max": torch.maximum,
    "ratio": lambda a, b: a / (b * b + 1),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "gate": lambda a, b: torch.sigmoid(a) * b,
    "dot": lambda a, b: (a * b).sum(-1, keepdim=True) * b,
    "outer": lambda a, b: torch.einsum("...a,...b->...ab", a[..., :2], b[..., :3]).flatten(-2),
}
AGGREGATIONS = ["sum", "sum", "mean", "max", "min", "std", "var", ["sum", "max"], ["mean", "std", "min"]]
AGGREGATIONS += ["softmax", "powermean", "mul", "max", "mean", "sum", "sum", "min", "std", "sum"]
LEAVES = ["x_i", "x_j", "x_j", "e", "w", "z_j", "z_i", "type", "vector"]


def expression(draw: random.Random, depth: int):
    """A random expression: a leaf's name, or (op, operands)."""
    if depth == 0 or draw.random() < 0.1:
        return draw.choice(LEAVES)
    kind = draw.random()
    if kind < 0.35:
        name = draw.choice(list(UNARY))
        while name in RARE and draw.random() < 0.85:
            name = draw.choice(list(UNARY))
        return "unary", name, expression(draw, depth - 1)
    if kind < 0.7:
        return "binary", draw.choice(list(BINARY)), expression(draw, depth - 1), expression(draw, depth - 1)
    if kind < 0.92:
        parts = [expression(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return ("linear", draw.randrange(3), draw.random() < 0.7, *parts)
    return "attention", draw.random() < 0.5, expression(draw, depth - 1), expression(draw, depth - 1)


class Drawn(MessagePassing):
    """A layer whose message is a drawn expression."""

    def __init__(self, seed: int):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.options = {"flow": draw.choice(["source_to_target"] * 3 + ["target_to_source"])}
        aggr = draw.choice(AGGREGATIONS)
        kwargs = {"aggr_kwargs": {"learn": True}} if aggr in ("softmax", "powermean") else {}
        super().__init__(aggr=aggr, **kwargs, **self.options)
        self.tree, self.ending = expression(draw, draw.randint(1, 4)), draw.choice(["", "", "bias", "residual"])
        self.linears = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH * (k + 1), WIDTH, bias=draw.random() < 0.7) for k in range(3))
            for _ in range(3)
        )
        self.vector, self.table = nn.Parameter(torch.rand(WIDTH)), nn.Embedding(4, WIDTH)
        self.bipartite = self.flow == "source_to_target" and draw.random() < 0.3  # PyG fails at a reversed pair
        self.double()

    def forward(self, x, z, edge_index, e, w, kind):
        return self.propagate(edge_index, x=x, z=z, e=e, w=w, kind=kind)

    def message(self, x_i, x_j, z_i, z_j, e, w, kind, index, size_i):
        values = {"x_i": x_i, "x_j": x_j, "z_i": z_i, "z_j": z_j, "e": e, "vector": self.vector.expand_as(x_j)}

        def value(tree):
            if tree == "w":
                return w.view(-1, 1) * self.vector
            if tree == "type":
                return self.table(kind)
            if isinstance(tree, str):
                return values[tree]
            op, *rest = tree
            if op == "unary":
                return UNARY[rest[0]](value(rest[1]))
            if op == "binary":
                return BINARY[rest[0]](value(rest[1]), value(rest[2]))
            if op == "linear":
                which, act, *parts = rest
                out = self.linears[which][len(parts) - 1](torch.cat([value(p) for p in parts], -1))
                return torch.relu(out) if act else out
            by_channel, score, of = rest
            score = value(score)
            score = score if by_channel else score.sum(-1, keepdim=True)
            return softmax(score, index, num_nodes=size_i) * value(of)

        return value(self.tree)

    def update(self, inputs):
        if self.ending == "bias":
            return inputs + self.vector.repeat(inputs.size(-1) // WIDTH)
        return inputs * 2 if self.ending == "residual" else inputs


def inputs(layer: Drawn, seed: int) -> tuple:
    """Random arguments of a layer; the graph has loops, repeated edges and nodes without edges."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = (draw.randint(3, 30), draw.randint(3, 30)) if layer.bipartite else (draw.randint(3, 30),) * 2
    edges = draw.choice([1, 5, 40, 150])
    while edges in counts:
        edges += 1
    edge_index = torch.stack([torch.randint(max(n - 1, 1), (edges,), generator=g) for n in counts])
    edge_index[:, edges // 2 :: 7] = edge_index[:, :1].clone()
    if draw.random() < 0.2:
        edge_index = edge_index.int()

    def rows(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_(draw.random() < 0.8)

    def nodes():
        return tuple(rows(n, WIDTH) for n in counts) if layer.bipartite else rows(counts[0], WIDTH)

    return nodes(), nodes(), edge_index, rows(edges, WIDTH), rows(edges), torch.randint(4, (edges,), generator=g)
