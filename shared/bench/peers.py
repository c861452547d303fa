"""Who is compared: for layers the frameworks' own and ours, for bare aggregation their primitives and ours."""

from __future__ import annotations

import math
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

import edgeless
import edgeless.functional
import edgeless.reference
from edgeless.demo.models import layer_class, make_graph

from .graphs import BenchGraph
from .work import DTYPES, Case, GraphedWork, Work

# Name -> (framework, side, how it runs)
LAYER_PEERS = {
    "pyg": ("pyg", "stock", "eager"),
    "pyg-compiled": ("pyg", "stock", "compiled"),
    "dgl": ("dgl", "stock", "eager"),
    "edgeless-pyg": ("pyg", "edgeless", "eager"),
    "edgeless-dgl": ("dgl", "edgeless", "eager"),
    "edgeless-pyg-compiled": ("pyg", "edgeless", "compiled"),
    "edgeless-pyg-graphed": ("pyg", "edgeless", "graphed"),
}
LAYER_DEFAULT = ("pyg", "pyg-compiled", "dgl", "edgeless-pyg", "edgeless-dgl")
OP_PEERS = ("plain", "plain-compiled", "dgl", "edgeless")
OP_DEFAULT = ("plain", "dgl", "edgeless")


def ours(peer: str) -> bool:
    """Whether a peer is edgeless."""
    return peer.startswith("edgeless")


def framework_of(case: Case, peer: str) -> Optional[str]:
    """The framework that a peer needs, "pyg" or "dgl", or None."""
    if case.kind == "layer":
        return LAYER_PEERS[peer][0]
    return "dgl" if peer == "dgl" else None


def edge_bytes(case: Case, peer: str, num_edges: int) -> int:
    """About what a peer that writes edge tensors needs with all gradients; 0 for the others. For a guard, not a figure.

    PyG keeps about six tensors of [E, H, C] alive at the peak of GATv2, and the plain reference as many.
    """
    if peer not in ("pyg", "plain"):
        return 0
    return 7 * num_edges * case.heads * case.channels * 4


def build(case: Case, peer: str, graph: BenchGraph) -> Work:
    """Sets up one peer on fresh random inputs, the same for every peer of a case.

    edgeless runs under ``backend("fused")``: a case that it does not cover is an error, never a stock layer's time.
    """
    torch.manual_seed(0)
    return _layer(case, peer, graph) if case.kind == "layer" else _op(case, peer, graph)


def _layer(case: Case, peer: str, graph: BenchGraph) -> Work:
    framework, side, how = LAYER_PEERS[peer]
    device = graph.edge_index.device
    cls = layer_class(framework, side, case.name)
    sizes = {"heads": case.heads} if framework == "pyg" else {"num_heads": case.heads}
    layer = cls(case.features, case.channels, **sizes).to(device)
    x = torch.randn(graph.num_nodes, case.features, device=device, requires_grad=True)
    handle = make_graph(framework, case.name, graph.edge_index, graph.num_nodes)
    call = torch.compile(layer, dynamic=False) if how == "compiled" else layer
    arguments = (x, handle) if framework == "pyg" else (handle, x)

    def compute() -> Tensor:
        return call(*arguments)

    autocast = DTYPES[case.dtype] if case.dtype in ("bf16", "fp16") else None
    if case.dtype == "fp64":
        layer.double()
        x.data = x.data.double()
    kind = GraphedWork if how == "graphed" else Work
    return kind(_fused(compute) if side == "edgeless" else compute, [x, *layer.parameters()], autocast)


def _fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Tensor) -> Tensor:
        with edgeless.backend("fused"):
            return function(*args)

    return run


def _op(case: Case, peer: str, graph: BenchGraph) -> Work:
    op = case.name.split("_")[0]
    device, dtype = graph.edge_index.device, DTYPES[case.dtype]
    n, heads, channels = graph.num_nodes, case.heads, case.channels

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    shapes = {
        "gatv2": [(n, heads, channels), (n, heads, channels), (heads, channels)],  # x_l, x_r, att
        "gat": [(n, heads, channels), (n, heads), (n, heads)],  # x, a_l, a_r
        "gt": [(n, heads, channels)] * 3,  # q, k, v
    }
    inputs = [rows(*shape) for shape in shapes[op]]
    if peer == "dgl":
        handle = make_graph("dgl", "transformer", graph.edge_index, n)
        return Work(lambda: DGL_OPS[op](handle, *inputs), inputs)
    handle = edgeless.Graph.from_edge_index(graph.edge_index, n, n, is_symmetric=graph.symmetric, validate=False)
    module = edgeless.functional if peer == "edgeless" else edgeless.reference
    function = getattr(module, {"gatv2": "gatv2_attention", "gat": "gat_attention", "gt": "dot_attention"}[op])
    if peer == "edgeless":
        _ = handle.csr, handle.csc  # part of the graph, as in the peers' formats
        function = _fused(function)
    elif peer == "plain-compiled":
        function = torch.compile(function, dynamic=False)
    return Work(lambda: function(handle, *inputs), inputs)


def _dgl_gatv2(graph, x_l: Tensor, x_r: Tensor, att: Tensor) -> Tensor:
    import dgl

    logits = (F.leaky_relu(dgl.ops.u_add_v(graph, x_l, x_r), 0.2) * att).sum(-1, keepdim=True)
    return dgl.ops.u_mul_e_sum(graph, x_l, dgl.ops.edge_softmax(graph, logits))


def _dgl_gat(graph, x: Tensor, a_l: Tensor, a_r: Tensor) -> Tensor:
    import dgl

    logits = F.leaky_relu(dgl.ops.u_add_v(graph, a_l, a_r), 0.2).unsqueeze(-1)
    return dgl.ops.u_mul_e_sum(graph, x, dgl.ops.edge_softmax(graph, logits))


def _dgl_dot(graph, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import dgl

    logits = dgl.ops.u_dot_v(graph, k, q) / math.sqrt(q.shape[-1])
    return dgl.ops.u_mul_e_sum(graph, v, dgl.ops.edge_softmax(graph, logits))


DGL_OPS = {"gatv2": _dgl_gatv2, "gat": _dgl_gat, "gt": _dgl_dot}
