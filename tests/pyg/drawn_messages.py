"""Random message functions: expressions, aggregations, shapes, dtypes and options are drawn together."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import aggr
from torch_geometric.utils import degree, scatter, softmax

from edgeless.functional.dropout import seed_tensor
from edgeless.programs.front.modes import Modes
from edgeless.pyg.nn import MessagePassing

WIDTH, HEADS, BATCH = 6, 2, 2
UNARY = {
    "relu": torch.relu,
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "square": lambda x: x * x,
    "exp": lambda x: torch.exp(x.clamp(max=2.0)),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "mish": F.mish,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "log sigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "erf": torch.erf,
    "sine": torch.sin,
    "cosine": torch.cos,
    "arc": torch.atan,
    "less one": lambda x: torch.expm1(x.clamp(max=2.0)),
    "cube": lambda x: x**3,
    "power": lambda x: (x.abs() + 0.5) ** 1.5,
    "inverse root": lambda x: (x * x + 1).rsqrt(),
    "abs": torch.abs,
    "sqrt": lambda x: (x.abs() + 0.5).sqrt(),
    "inverse": lambda x: 1 / (x.abs() + 1),
    "log": lambda x: torch.log1p(x.abs()),
    "neg": torch.neg,
    "double": lambda x: 2 * x,
    "third": lambda x: x / 3,
    "shift": lambda x: x + 0.25,
    "from one": lambda x: 1 - x,
    "clamped": lambda x: x.clamp(-0.5, 1.5),
    "rounded": lambda x: x.round() + x,
    "floored": lambda x: (3 * x).floor() / 3,
    "signs": lambda x: x.sign() * (x + 1),
    "masked": lambda x: x * (x > 0).to(x.dtype),
    "filled": lambda x: x.masked_fill(x < -0.5, 0.25),
    "chosen": lambda x: torch.where(x > 0.5, x, torch.zeros_like(x)),
    "finite": torch.nan_to_num,
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(-1),
    "log of a sum": lambda x: x - x.logsumexp(-1, keepdim=True),
    "normed": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1),
    "unit": lambda x: F.normalize(x + 0.01, dim=-1),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "spread": lambda x: x / (x.var(-1, keepdim=True) + 1),
    "deviation": lambda x: x / (x.std(-1, unbiased=False, keepdim=True) + 1),
    "detached": lambda x: x.detach(),
    "stopped": lambda x: x * x.detach().tanh(),
    "flipped": lambda x: x.flip(-1),
    "rolled": lambda x: torch.cat([x[..., 1:], x[..., :1]], -1),
    "prefix": lambda x: x.cumsum(-1),
    "padded": lambda x: F.pad(x[..., 1:], (0, 1)),
    "chunks": lambda x: torch.cat([x.chunk(3, -1)[1], x.chunk(3, -1)[0] * x.chunk(3, -1)[2], x.chunk(3, -1)[2]], -1),
    "parts": lambda x: torch.cat(x.split([2, 4], -1)[::-1], -1),
    "unbound": lambda x: torch.stack(x.unbind(-1)[::-1], -1),
    "transposed": lambda x: x.unflatten(-1, (2, 3)).transpose(-1, -2).flatten(-2),
    "gated halves": lambda x: F.glu(torch.cat([x, x.flip(-1)], -1), -1),
    "heads": lambda x: (x.unflatten(-1, (HEADS, -1)) * torch.tensor([[1.0], [2.0]])).flatten(-2).to(x.dtype),
    "head sum": lambda x: x.unflatten(-1, (HEADS, -1)).sum(-1).repeat_interleave(WIDTH // HEADS, -1),
    "repeated": lambda x: x[..., :2].repeat(*[1] * (x.dim() - 1), 3),
    "best": lambda x: x.amax(-1, keepdim=True).expand(x.shape),
    "best with its place": lambda x: x.max(-1, keepdim=True)[0] * x,
    "product": lambda x: x.tanh().prod(-1, keepdim=True) + x,
    "two best": lambda x: x.topk(2, -1)[0].repeat_interleave(3, -1),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "in place": lambda x: x.clone().mul_(0.5).add_(1),
    "in place relu": lambda x: (x * 1.5).relu_(),
    "a column written": lambda x: written(x),
    "its own columns added": lambda x: added(x),
    "over edges": lambda x: x - x.sum(0) / x.size(0),
    "first": lambda x: x - x[0],
    "running": lambda x: x.cumsum(0),
    "a mask written": lambda x: by_mask(x),
}
# Of (layer, x, index, number of nodes).
OF_THE_LAYER = {
    "dropout": lambda s, x, i, n: F.dropout(x, 0.3, s.training),
    "batch norm": lambda s, x, i, n: s.norm(x) if x.dim() == 2 else x,
    "norm module": lambda s, x, i, n: s.layer_norm(x),
    "prelu": lambda s, x, i, n: s.prelu(x),
    "buffer": lambda s, x, i, n: x * s.factor + s.plain,
    "columns": lambda s, x, i, n: x.index_select(-1, s.order),
    "matrix": lambda s, x, i, n: (x.unflatten(-1, (HEADS, -1)) @ s.matrix).flatten(-2),
    "matrices": lambda s, x, i, n: torch.einsum("...hc,hcd->...hd", x.unflatten(-1, (HEADS, -1)), s.matrices).flatten(
        -2
    ),
    "mlp": lambda s, x, i, n: s.mlp(x),
    "twice": lambda s, x, i, n: s.linears[0][0](torch.relu(s.linears[0][0](x))),
    "less the mean": lambda s, x, i, n: x - scatter(x, i, 0, n, "mean").index_select(0, i),
    "less the best": lambda s, x, i, n: x - scatter(x, i, 0, n, "max")[i],
    "by degree": lambda s, x, i, n: x / degree(i, n, x.dtype).clamp(min=1)[i].view(-1, *[1] * (x.dim() - 1)),
    "softmax of each": lambda s, x, i, n: softmax(x, i, num_nodes=n),
    "scaled": lambda s, x, i, n: x * s.scale,
}
# For the stock layer: torch's own kernel on CUDA has 1 / 6 as a float, so that its float64 results are off by 3e-8.
EXACT = {"hardswish": lambda x: x * F.relu6(x + 3) / 6 if x.is_cuda and x.dtype == torch.float64 else F.hardswish(x)}
RARE = ("over edges", "first", "running", "a mask written", "product", "two best")
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "ratio": lambda a, b: a / (b * b + 1),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "gate": lambda a, b: torch.sigmoid(a) * b,
    "dot": lambda a, b: (a * b).sum(-1, keepdim=True) * b,
    "outer": lambda a, b: torch.einsum("...a,...b->...ab", a[..., :2], b[..., :3]).flatten(-2),
    "distance": lambda a, b: b * ((a - b) ** 2).sum(-1, keepdim=True).add(0.1).sqrt(),
    "alike": lambda a, b: F.cosine_similarity(a + 0.01, b, dim=-1).unsqueeze(-1) * a,
    "cross": lambda a, b: torch.cat([torch.linalg.cross(a[..., :3], b[..., 3:]), a[..., 3:]], -1),
    "product of heads": lambda a, b: (
        a.unflatten(-1, (2, 3)) @ b.unflatten(-1, (2, 3)).transpose(-1, -2) @ b.unflatten(-1, (2, 3))
    ).flatten(-2),
    "best of both": lambda a, b: torch.stack([a, b], -1).amax(-1),
    "mixed": lambda a, b: (torch.stack([a, b], -2).softmax(-2) * torch.stack([b, a], -2)).sum(-2),
    "stacked": lambda a, b: torch.stack([a, b]).sum(0) + torch.stack([a, b])[1],
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "with a factor": lambda a, b: torch.add(a, b, alpha=0.5),
    "added product": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "compared": lambda a, b: a + (a > b).to(a.dtype) * b,
    "in place": lambda a, b: a.clone().add_(b).mul_(b),
    "minus from": lambda a, b: torch.rsub(a, b),
    "angle": lambda a, b: torch.atan2(a, b.abs() + 0.5),
}
# Where a rounding may decide, gradients of short floats are not compared.
STEPS = {
    *("relu", "leaky", "relu6", "hardtanh", "hardswish", "rounded", "floored", "signs", "masked", "filled", "chosen"),
    *("best", "best with its place", "two best", "in place relu", "max", "min", "where", "best of both", "compared"),
    *("less the best", "abs", "clamped", "exp", "less one", "elu", "selu", "prelu", "a mask written", "mlp", "twice"),
    *("sqrt", "power", "inverse", "log", "angle", "softsign"),
}
AGGREGATIONS = ["sum", "sum", "mean", "max", "min", "std", "var", ["sum", "max"], ["mean", "std", "min"]]
AGGREGATIONS += ["softmax", "powermean", "mul", "max", "mean", "sum", "sum", "min", "std", "sum"]
MADE = {  # as functions of nothing
    "softmax by channel": lambda: aggr.SoftmaxAggregation(1.0, learn=True, channels=WIDTH),
    "softmax without gradient": lambda: aggr.SoftmaxAggregation(0.5, semi_grad=True),
    "power mean by channel": lambda: aggr.PowerMeanAggregation(2.0, learn=True, channels=WIDTH),
    "biased": lambda: aggr.StdAggregation(semi_grad=True),
    "several added": lambda: aggr.MultiAggregation(["mean", "max", "std"], mode="sum"),
    "several joined": lambda: aggr.MultiAggregation(["sum", aggr.SoftmaxAggregation(learn=True)], mode="mean"),
    "several attended": lambda: aggr.MultiAggregation(
        ["sum", "max"], mode="attn", mode_kwargs={"in_channels": WIDTH, "out_channels": WIDTH, "num_heads": 2}
    ),
    "scaled by degree": lambda: aggr.DegreeScalerAggregation(
        ["mean", "max"], ["identity", "amplification", "attenuation", "linear"], torch.tensor([1, 3, 4, 2])
    ),
    "attention": lambda: aggr.AttentionalAggregation(nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)),
}
LEAVES = ["x_i", "x_j", "x_j", "e", "w", "z_j", "z_i", "type", "vector"]
FORMS = ["message"] * 8 + ["edge update", "edge update", "two parts", "own aggregate", "own aggregate", "with nodes"]
DTYPES = [torch.float64] * 16 + [torch.float32] * 2 + [torch.bfloat16, torch.float16]


def written(x):
    x = x.clone()
    x[..., 0] = x[..., 1] * 2
    return x


def added(x):
    x = x * 1
    x[..., 1:3] += x[..., 3:5]
    return x


def by_mask(x):
    x = x.clone()
    x[x < 0] = 0
    return x


def expression(draw: random.Random, depth: int):
    """A random expression: a leaf's name, or (op, operands)."""
    if depth == 0 or draw.random() < 0.1:
        return draw.choice(LEAVES)
    kind = draw.random()
    if kind < 0.35:
        name = draw.choice([*UNARY, *OF_THE_LAYER])
        while name in RARE and draw.random() < 0.85:
            name = draw.choice([*UNARY, *OF_THE_LAYER])
        return "unary", name, expression(draw, depth - 1)
    if kind < 0.7:
        return "binary", draw.choice(list(BINARY)), expression(draw, depth - 1), expression(draw, depth - 1)
    if kind < 0.92:
        parts = [expression(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return ("linear", draw.randrange(3), draw.random() < 0.7, *parts)
    return "attention", draw.random() < 0.5, expression(draw, depth - 1), expression(draw, depth - 1)


def names_in(tree) -> set[str]:
    """All names in an expression."""
    return {tree} if isinstance(tree, str) else set().union(*map(names_in, tree)) if isinstance(tree, tuple) else set()


class Drawn(MessagePassing):
    """A layer whose message is a drawn expression."""

    def __init__(self, seed: int):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        flow = draw.choice(["source_to_target"] * 3 + ["target_to_source"])
        name = draw.choice(AGGREGATIONS) if draw.random() < 0.75 else draw.choice(list(MADE))
        self.form, self.batched = draw.choice(FORMS), draw.random() < 0.12
        name = draw.choice(["sum", "mean", "max", "std", "softmax"]) if self.batched else name
        made = MADE[name]() if isinstance(name, str) and name in MADE else name
        # Of a power of 1, the mean of messages that are clamped is the bound of the next clamp, or not, by a rounding.
        options = {"softmax": {"learn": True}, "powermean": {"learn": True, "p": 1.5}}
        kwargs = {"aggr_kwargs": options[name]} if name in ("softmax", "powermean") else {}
        super().__init__(aggr=made, flow=flow, node_dim=0 if self.batched else -2, **kwargs)
        self.name, self.dtype = name, draw.choice(DTYPES)
        self.tree, self.ending = expression(draw, draw.randint(1, 4)), draw.choice(["", "", "bias", "residual"])
        self.other = expression(draw, draw.randint(1, 2))
        if self.form == "own aggregate":
            self.own = draw.choice(["sum", "mean", "min", "max", "softmax", "moments"])
        self.linears = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH * (k + 1), WIDTH, bias=draw.random() < 0.7) for k in range(3))
            for _ in range(3)
        )
        self.vector, self.table = nn.Parameter(torch.rand(WIDTH)), nn.Embedding(4, WIDTH)
        self.norm, self.layer_norm, self.prelu = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH), nn.PReLU()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH, bias=False))
        self.matrix, self.matrices = nn.Parameter(torch.rand(3, 3)), nn.Parameter(torch.rand(HEADS, 3, 3))
        self.scale, self.plain = draw.choice([0.5, 2, 1.5]), torch.rand(WIDTH)
        self.register_buffer("factor", torch.rand(WIDTH))
        self.register_buffer("order", torch.tensor([5, 0, 3, 3, 1, 2]))
        self.bipartite = flow == "source_to_target" and draw.random() < 0.3  # PyG fails at a reversed pair
        self.wants = [draw.random() < 0.8 for _ in range(4)]  # gradients of x, z, e, w
        if draw.random() < 0.3:
            for parameter in self.parameters():
                parameter.requires_grad_(draw.random() < 0.5)
        self.replayed = False  # it is the stock layer, whose dropouts are those that a program draws
        self.train(draw.random() < 0.8)
        self.to(self.dtype)
        self.plain = self.plain.to(self.dtype)

    @property
    def names(self) -> set[str]:
        """The names of all leaves and ops."""
        return names_in(self.tree) | (names_in(self.other) if self.form != "message" else set())

    def forward(self, x, z, edge_index, e, w, kind):
        given = {"x": x, "z": z, "e": e, "w": w, "kind": kind}
        alpha = None
        if self.form == "edge update":
            alpha = self.step(self.edge_updater, self.other, edge_index, **given)
        out = self.step(self.propagate, self.tree, edge_index, alpha=alpha, **given)
        return (out, alpha) if self.ending == "residual" and alpha is not None else out

    def step(self, method, tree, edge_index, **given):
        """A propagate() or edge_updater(), in which dropouts are those of a program where that is wanted."""
        trees = names_in(tree) | (names_in(self.other) if self.form == "two parts" else set())
        if not (self.replayed and self.training and "dropout" in trees):
            return method(edge_index, **given)
        seed, ids = seed_tensor(None, edge_index.device), torch.arange(edge_index.size(1), device=edge_index.device)
        with Modes(None, ids, seed, Sized(edge_index.size(1)), tracing=False):
            return method(edge_index, **given)

    def message(self, x_i, x_j, z_i, z_j, e, w, kind, alpha, index, size_i):
        given = self.leaves(x_i, x_j, z_i, z_j, e, w, kind)
        out = self.value(self.tree, given, index, size_i)
        if alpha is not None:
            out = out * alpha
        if self.form == "two parts":
            return out, self.value(self.other, given, index, size_i)
        return out

    def edge_update(self, x_i, x_j, z_i, z_j, e, w, kind, index, size_i):
        return self.value(self.other, self.leaves(x_i, x_j, z_i, z_j, e, w, kind), index, size_i)

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        if self.form == "two parts":
            first, second = (
                scatter(part, index, 0, dim_size, how) for part, how in zip(inputs, ("sum", "mean"), strict=True)
            )
            return torch.cat([first, first * second], -1)
        if self.form != "own aggregate":
            return super().aggregate(inputs, index, ptr=ptr, dim_size=dim_size)
        if self.own == "softmax":
            score = softmax(inputs.sum(-1, keepdim=True), index, num_nodes=dim_size)
            return scatter(score * inputs, index, 0, dim_size, "sum")
        if self.own == "moments":
            mean = scatter(inputs, index, 0, dim_size, "mean")
            return mean, scatter((inputs - mean.index_select(0, index)) ** 2, index, 0, dim_size, "sum")
        return scatter(inputs, index, 0, dim_size, self.own)

    def update(self, inputs, x):
        if isinstance(inputs, tuple):
            return inputs
        if self.form == "with nodes":
            x = x[1] if isinstance(x, (tuple, list)) else x
            return inputs + x.repeat(*[1] * (x.dim() - 1), inputs.size(-1) // WIDTH)
        if self.ending == "bias":
            return inputs + self.vector.repeat(inputs.size(-1) // WIDTH)
        return inputs * 2 if self.ending == "residual" else inputs

    def leaves(self, x_i, x_j, z_i, z_j, e, w, kind) -> dict:
        ones = [1] * (e.dim() - 1)
        values = {"x_i": x_i, "x_j": x_j, "z_i": z_i, "z_j": z_j, "e": e, "vector": self.vector.expand_as(x_j)}
        values["w"] = w.view(-1, *ones) * self.vector.expand(e.shape[1:])
        values["type"] = self.table(kind).view(-1, *ones[1:], WIDTH).expand_as(e)
        return values

    def value(self, tree, given: dict, index, size):
        if isinstance(tree, str):
            return given[tree]
        op, *rest = tree
        if op == "unary":
            x = self.value(rest[1], given, index, size)
            if rest[0] in OF_THE_LAYER:
                return OF_THE_LAYER[rest[0]](self, x, index, size)
            return (EXACT if self.replayed and rest[0] in EXACT else UNARY)[rest[0]](x)
        if op == "binary":
            return BINARY[rest[0]](*(self.value(part, given, index, size) for part in rest[1:]))
        if op == "linear":
            which, act, *parts = rest
            rows = torch.cat([self.value(part, given, index, size) for part in parts], -1)
            out = self.linears[which][len(parts) - 1](rows)
            return torch.relu(out) if act else out
        by_channel, score, of = rest
        score = self.value(score, given, index, size)
        score = score if by_channel else score.sum(-1, keepdim=True)
        return softmax(score, index, num_nodes=size) * self.value(of, given, index, size)


class Sized:
    """The number of edges where dropout looks for it."""

    def __init__(self, edges: int):
        self.edges = edges


def inputs(layer: Drawn, seed: int) -> tuple:
    """Random arguments of a layer; the graph has loops, repeated edges and nodes without edges."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = (draw.randint(3, 30), draw.randint(3, 30)) if layer.bipartite else (draw.randint(3, 30),) * 2
    edges = draw.choice([1, 5, 40, 40, 150, 150]) if draw.random() < 0.97 else 0
    while edges in counts:
        edges += 1
    edge_index = torch.stack([torch.randint(max(n - 1, 1), (edges,), generator=g) for n in counts])
    edge_index[:, edges // 2 :: 7] = edge_index[:, :1].clone()
    if draw.random() < 0.2:
        edge_index = edge_index.int()
    wants = layer.wants if draw.random() < 0.9 else [draw.random() < 0.5 for _ in range(4)]
    between = (BATCH,) if layer.batched else ()

    def rows(want, *shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(layer.dtype).requires_grad_(want)

    def nodes(want):
        several = tuple(rows(want, n, *between, WIDTH) for n in counts)
        return several if layer.bipartite else several[0]

    return (
        *(nodes(want) for want in wants[:2]),
        edge_index,
        rows(wants[2], edges, *between, WIDTH),
        rows(wants[3], edges),
        torch.randint(4, (edges,), generator=g),
    )
