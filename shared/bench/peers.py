"""Who is compared: for layers the frameworks' own and ours, for bare aggregation their primitives and ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

import edgeless
from edgeless.cli.layers import LAYERS, make_graph, make_layer

from .graphs import BenchGraph
from .ops import OPS, graph_of
from .work import DTYPES, Case, GraphedWork, Work

# Name -> (framework, side, how it runs)
LAYER_PEERS = {
    "pyg": ("pyg", "stock", "eager"),
    "pyg-compiled": ("pyg", "stock", "compiled"),
    "pyg-csr": ("pyg", "stock", "eager"),
    "pyg-sparsetensor": ("pyg", "stock", "eager"),
    "dgl": ("dgl", "stock", "eager"),
    "edgeless-pyg": ("pyg", "edgeless", "eager"),
    "edgeless-dgl": ("dgl", "edgeless", "eager"),
    "edgeless-pyg-compiled": ("pyg", "edgeless", "compiled"),
    "edgeless-pyg-graphed": ("pyg", "edgeless", "graphed"),
}
LAYER_DEFAULT = ("pyg", "pyg-compiled", "dgl", "edgeless-pyg", "edgeless-dgl")
# What these give to a layer in place of edge_index; only layers that multiply by it have them.
SPARSE_PEERS = ("pyg-csr", "pyg-sparsetensor")
OP_PEERS = ("plain", "plain-compiled", "dgl", "torch-csr", "edgeless")


def ours(peer: str) -> bool:
    """Whether a peer is edgeless."""
    return peer.startswith("edgeless")


def known(case: Case) -> tuple[str, ...]:
    """Every peer that computes a case."""
    if case.kind == "layer":
        return tuple(p for p in LAYER_PEERS if p not in SPARSE_PEERS or LAYERS[case.name].multiplies)
    return tuple(peer for peer in OP_PEERS if peer in ("plain", "plain-compiled", "edgeless", *OPS[case.op].others))


def default(case: Case) -> tuple[str, ...]:
    """The peers that are compared when none are named."""
    if case.kind == "layer":
        return (*LAYER_DEFAULT, *(SPARSE_PEERS if LAYERS[case.name].multiplies else ()))
    return tuple(peer for peer in known(case) if peer != "plain-compiled")


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
    layer = make_layer(case.name, framework, side, case.features, case.heads, case.channels).to(device)
    x = torch.randn(graph.num_nodes, case.features, device=device, requires_grad=True)
    if peer in SPARSE_PEERS:
        handle = _sparse(peer, graph, DTYPES[case.dtype] if case.dtype == "fp64" else torch.float32)
    else:
        handle = make_graph(framework, graph.edge_index, graph.num_nodes, LAYERS[case.name].self_loops)
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


def has_torch_sparse() -> bool:
    """Whether there are SparseTensors."""
    return importlib.util.find_spec("torch_sparse") is not None


def _sparse(peer: str, graph: BenchGraph, dtype: torch.dtype):
    """The adjacency that PyG multiplies by, destinations as rows, multi-edges kept."""
    sizes = (graph.num_nodes, graph.num_nodes)
    if peer == "pyg-csr":
        indptr, indices, _ = (t.long() for t in graph_of(graph).csr)
        return torch.sparse_csr_tensor(indptr, indices, torch.ones_like(indices, dtype=dtype), sizes)
    from torch_sparse import SparseTensor

    src, dst = graph.edge_index
    adj_t = SparseTensor(row=dst, col=src, sparse_sizes=sizes)
    return adj_t.fill_cache_()  # the transpose of the backward, as PyG's ToSparseTensor leaves it


def _fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Tensor) -> Tensor:
        with edgeless.backend("fused"):
            return function(*args)

    return run


def _op(case: Case, peer: str, graph: BenchGraph) -> Work:
    op, dtype = OPS[case.op], DTYPES[case.dtype]
    inputs = [
        torch.randn(*shape, device=graph.edge_index.device).to(dtype).requires_grad_()
        for shape in op.shapes(graph.num_nodes, case.heads, case.channels)
    ]
    if peer in op.others:
        prepare, function = op.others[peer]
        handle = prepare(graph, dtype)
    else:
        handle = graph_of(graph)
        function = _fused(op.edgeless) if peer == "edgeless" else op.plain
        if peer == "plain-compiled":
            function = torch.compile(function, dynamic=False)
    return Work(lambda: function(handle, *inputs), inputs)
