"""``dgl.nn`` with layers that run on edgeless' kernels in place of DGL's.

Every other name is DGL's own object, here and in submodules such as ``edgeless.dgl.nn.pytorch``.
"""

from edgeless.backends import register_family, register_layer
from edgeless.stand_in import stand_in

from .. import ops as _ops  # noqa: F401  registers the replaced functions of dgl.ops, which dgl.nn exports too
from .._framework import stock, stock_hetero, stock_linear
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
register_family("dgl", lambda module: type(module).__module__.startswith("dgl.nn.pytorch.conv."))
stand_in(__name__, "dgl.nn")
