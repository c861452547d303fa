"""``dgl.nn`` with layers that run on edgeless' kernels in place of DGL's.

Layers without kernels of their own have their messages generated where a program can compute them, and run as DGL's
elsewhere. Every other name is DGL's own object, here and in submodules such as ``edgeless.dgl.nn.pytorch``.
"""

from edgeless.choices.backends import register_family, register_layer
from edgeless.layers.stand_in import stand_in

from .. import ops as _ops  # noqa: F401  registers the replaced functions of dgl.ops, which dgl.nn exports too
from .._framework import stock, stock_hetero, stock_linear
from ..generated.classes import class_to_swap, generated_class, passes_messages
from .agnnconv import AGNNConv
from .dotgatconv import DotGatConv
from .gatconv import GATConv
from .gatv2conv import GATv2Conv
from .ginconv import GINConv
from .graphconv import GraphConv
from .heterographconv import HeteroGraphConv
from .hgtconv import HGTConv
from .relgraphconv import RelGraphConv
from .sageconv import SAGEConv
from .typedlinear import TypedLinear

__all__ = [
    "AGNNConv",
    "DotGatConv",
    "GATConv",
    "GATv2Conv",
    "GINConv",
    "GraphConv",
    "HGTConv",
    "HeteroGraphConv",
    "RelGraphConv",
    "SAGEConv",
    "TypedLinear",
]

register_layer(stock.AGNNConv, AGNNConv)
register_layer(stock.DotGatConv, DotGatConv)
register_layer(stock.GATConv, GATConv)
register_layer(stock.GATv2Conv, GATv2Conv)
register_layer(stock.GINConv, GINConv)
register_layer(stock.GraphConv, GraphConv)
register_layer(stock.HGTConv, HGTConv)
register_layer(stock_hetero.HeteroGraphConv, HeteroGraphConv)
register_layer(stock.RelGraphConv, RelGraphConv)
register_layer(stock.SAGEConv, SAGEConv)
register_layer(stock_linear.TypedLinear, TypedLinear)

# DGL's layers without kernels of their own, whose messages are generated.
_GENERATED = [
    *("APPNPConv", "AtomicConv", "CFConv", "ChebConv", "DGNConv", "EGATConv", "EGNNConv", "EdgeConv", "EdgeGATConv"),
    *("EdgeWeightNorm", "GCN2Conv", "GINEConv", "GMMConv", "GatedGCNConv", "GatedGraphConv", "NNConv", "PNAConv"),
    *("SGConv", "TAGConv", "TWIRLSConv"),
]
for _name in _GENERATED:
    if (_stock := getattr(stock, _name, None)) is not None:  # not every version of DGL has them all
        globals()[_name] = generated_class(_stock, __name__)
        register_layer(_stock, globals()[_name])
        __all__.append(_name)


def _is_layer(module) -> bool:
    return type(module).__module__.startswith("dgl.nn.pytorch.conv.") or passes_messages(type(module))


register_family("dgl", _is_layer, class_to_swap)
stand_in(__name__, "dgl.nn")
