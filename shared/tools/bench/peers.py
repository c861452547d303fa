"""The peers that are compared: for layers the frameworks' and ours, for bare aggregation their primitives and ours."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Optional, Union

import torch
from torch import Tensor

import edgeless
from edgeless.choices.engines import waits_for_gpu
from edgeless.plan.recording import record
from edgeless.tools.cli.devices import UsageError
from edgeless.tools.cli.layers import EVERY_LAYER, make_input, make_layer

from .graphs import BenchGraph
from .ops import OPS, graph_of
from .work import DTYPES, CapturedWork, Case, EngineWork, GraphedWork, Work

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
    "edgeless-pyg-captured": ("pyg", "edgeless", "captured"),
}
LAYER_DEFAULT = ("pyg", "pyg-compiled", "dgl", "edgeless-pyg", "edgeless-dgl")
# The sparse matrix that these peers give to a layer in place of edge_index, for layers that multiply by one.
SPARSE_PEERS = ("pyg-csr", "pyg-sparsetensor")
# edgeless with an engine of its own, measured by itself.
ENGINE_PEERS = {f"edgeless-{engine}": engine for engine in ("auto", "rowsplit", "cusparse", "cusparse-alg2", "wsb")}
_TWO_ENGINES = ("edgeless-auto", "edgeless-rowsplit", "edgeless-wsb")  # for ops that cuSPARSE does not support
OP_PEERS = ("plain", "plain-compiled", "dgl", "torch-csr", "edgeless", *ENGINE_PEERS)


class Refused(Exception):
    """Raised with the reason why a peer does not compute a case."""


def wanted_of(option: str, wanted: Optional[Sequence[str]], known: Sequence[str]) -> list[str]:
    """The wanted peers among those that an option of the bench knows, or all of them if none are named.

    Raises:
        UsageError: the option knows none of the wanted peers.
    """
    chosen = [peer for peer in wanted or known if peer in known]
    if not chosen:
        raise UsageError(f"--peers {' '.join(wanted)}: for {option} there are {', '.join(known)}")
    return chosen


def ours(peer: str) -> bool:
    """Returns whether a peer is edgeless."""
    return peer.startswith("edgeless")


def known(case: Case) -> tuple[str, ...]:
    """Every peer that computes a case."""
    if case.kind == "layer":
        layer = EVERY_LAYER[case.name]
        peers = [p for p in LAYER_PEERS if p not in SPARSE_PEERS or layer.multiplies]
        return tuple(peer for peer in peers if getattr(layer, LAYER_PEERS[peer][0]) is not None)
    engines = ENGINE_PEERS if case.op.startswith("spmm") else _TWO_ENGINES
    mine = ("plain", "plain-compiled", "edgeless", *engines)
    return tuple(peer for peer in OP_PEERS if peer in (*mine, *OPS[case.op].others))


def default(case: Case) -> tuple[str, ...]:
    """The peers that are compared when none are named."""
    if case.kind == "layer":
        typed = EVERY_LAYER[case.name].types is not None  # compiling a loop over relations takes minutes
        return tuple(
            peer
            for peer in known(case)
            if peer in (*LAYER_DEFAULT, *SPARSE_PEERS) and not (typed and peer == "pyg-compiled")
        )
    return tuple(peer for peer in known(case) if peer != "plain-compiled" and peer not in ENGINE_PEERS)


def framework_of(case: Case, peer: str) -> Optional[str]:
    """The framework that a peer needs, "pyg" or "dgl", or None."""
    if case.kind == "layer":
        return LAYER_PEERS[peer][0]
    return "dgl" if peer == "dgl" else None


def edge_bytes(case: Case, peer: str, graph: BenchGraph) -> int:
    """The approximate bytes that a peer with edge tensors needs with all gradients, 0 for others; used only as a guard.

    PyG keeps about six tensors of [E, H, C] alive at the peak of GATv2, and the plain reference as many. RGAT keeps
    three of [E, F, H * C]; RGCN keeps [R, F, H * C] for every relation with the backward, and HGT has keys, values and
    their gradients for every relation and node of the type of its sources.
    """
    if peer not in ("pyg", "plain"):
        return 0
    width, itemsize = case.heads * case.channels, DTYPES[case.dtype].itemsize
    if case.kind != "layer" or EVERY_LAYER[case.name].types is None:
        return 7 * graph.num_edges * width * 4
    relations = graph.relations
    if case.name == "rgat":
        return 3 * graph.num_edges * case.features * width * itemsize
    if case.name == "rgcn":
        return relations.num_types**2 // 2 * case.features * width * itemsize
    sizes = relations.sizes
    return 5 * sum(sizes[src] for src, _ in relations.ends) * width * itemsize


def build(case: Case, peer: str, graph: BenchGraph) -> Work:
    """Sets up one peer on fresh random inputs, the same for every peer of a case.

    edgeless runs under ``backend("fused")``: a case that it does not support is an error, so that no upstream layer is
    timed.

    Raises:
        Refused: the peer is an engine that does not compute the case.
    """
    torch.manual_seed(0)
    return _layer(case, peer, graph) if case.kind == "layer" else _op(case, peer, graph)


def _layer(case: Case, peer: str, graph: BenchGraph) -> Work:
    framework, side, how = LAYER_PEERS[peer]
    device, known = graph.edge_index.device, EVERY_LAYER[case.name]
    sizes = (case.features, case.heads, case.channels)
    layer = make_layer(case.name, framework, side, *sizes, dropout=case.dropout, relations=graph.relations).to(device)
    x = torch.randn(graph.num_nodes, case.features, device=device)
    typed, dtype, autocast = known.types is not None, DTYPES[case.dtype], None
    if typed or dtype == torch.float64:
        layer, x = layer.to(dtype), x.to(dtype)
    elif dtype != torch.float32:
        autocast = dtype
    if known.group is not None:  # its inputs are another layer's results, which are 16-bit under autocast
        x = x.to(dtype)
    if peer in SPARSE_PEERS:
        handle = _sparse(peer, graph, x.dtype)
    else:
        handle = make_input(case.name, framework, graph.edge_index, graph.num_nodes, graph.relations)
    if how == "compiled":
        torch._dynamo.reset()  # after too many compilations of a class torch would run the next layer eagerly
    call = torch.compile(layer, dynamic=False) if how == "compiled" else layer
    features = [part.clone().requires_grad_() for part in handle.parts(x)] if typed else [x.requires_grad_()]
    arguments = (*features, handle) if framework == "pyg" else (handle, *features)
    if known.edge_features is not None:
        columns = known.edge_features or case.heads * case.channels
        edge_attr = _edge_features(graph.name, graph.num_edges, columns, dtype, device).detach().requires_grad_()
        features, arguments = [*features, edge_attr], (*arguments, edge_attr)
    if known.group is not None and side == "edgeless" and (why := _why_stock(layer, features[1:], x, autocast)):
        raise Refused(why)

    def compute() -> Union[Tensor, list[Tensor]]:
        return handle.call(call, features) if typed else call(*arguments)

    rows = handle.rows if typed else [graph.num_nodes]
    given = (_fused(compute) if side == "edgeless" else compute, [*features, *layer.parameters()], autocast, rows)
    if how == "captured":
        return CapturedWork(*given, handle=edgeless.capture(layer).captured)
    return GraphedWork(*given) if how == "graphed" else Work(*given)


@functools.lru_cache(maxsize=1)
def _edge_features(graph: str, edges: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Edge features that the peers of a case share, since a copy for each would leave less memory."""
    return torch.randn(edges, columns, device=device).to(dtype)


def _why_stock(layer: torch.nn.Module, edge_attr: list[Tensor], x: Tensor, autocast: Optional[torch.dtype]) -> str:
    """The reason why a generated layer would run the upstream code, found on a small graph; empty if it would not."""
    ends = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [1, 2, 3, 0, 2, 3, 0]], device=x.device)
    inputs = [t[:n].detach().requires_grad_() for t, n in ((x, 4), *((e, 7) for e in edge_attr))]
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        said = edgeless.explain(layer, inputs[0], ends, *inputs[1:])
    return "" if said else str(said)


def has_torch_sparse() -> bool:
    """Returns whether torch_sparse, and so SparseTensor, is installed."""
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


def _fused(function: Callable) -> Callable:
    def run(*args: Tensor, **options: float):
        with edgeless.backend("fused"):
            return function(*args, **options)

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
        function = _fused(op.edgeless) if ours(peer) else op.plain
        if peer == "plain-compiled":
            function = torch.compile(function, dynamic=False)
    options = {"dropout": case.dropout} if case.dropout else {}
    work = Work(lambda: function(handle, *inputs, **options), inputs, rows=[graph.num_nodes])
    if peer not in ENGINE_PEERS:
        return work
    work = EngineWork(work.compute, inputs, rows=work.rows, engine=ENGINE_PEERS[peer])
    with edgeless.engine(work.engine):
        steps = record(work.compute, inputs)
    if refused := [step.refused for step in steps if step.refused]:
        raise Refused(refused[0])
    work.waits = any(waits_for_gpu(step.engine, dtype) for step in steps)
    return work


def engine_of(work: Work) -> str:
    """The engine that runs the forward of a bare aggregation of edgeless."""
    with edgeless.engine(work.engine) if isinstance(work, EngineWork) else contextlib.nullcontext():
        return ", ".join(dict.fromkeys(step.engine for step in record(work.compute, work.inputs)))
