"""``torch_geometric.nn`` with layers that run on edgeless' kernels in place of PyG's.

Every other name is PyG's own object, here and in submodules such as ``edgeless.pyg.nn.conv``. Each of our layers
subclasses its upstream layer: constructor, state_dict, seeded initialisation, repr and results are the upstream ones.
Calls that the kernels do not support run the upstream forward; ``edgeless.explain(layer, *inputs)`` says why.
"""

from torch_geometric.nn import conv as _conv
from torch_geometric.nn.conv import MessagePassing as _StockMessagePassing

from edgeless.choices.backends import register_family, register_layer
from edgeless.layers.stand_in import stand_in

from ..generated.classes import MessagePassing, class_to_swap, generated_class
from ..joined import join
from . import aggr
from .aggr import MaxAggregation, MinAggregation
from .agnn_conv import AGNNConv
from .gat_conv import GATConv
from .gatv2_conv import GATv2Conv
from .gcn_conv import GCNConv
from .gin_conv import GINConv
from .gps_conv import GPSConv
from .graph_conv import GraphConv
from .hetero_conv import HeteroConv
from .hetero_linear import HeteroDictLinear, HeteroLinear
from .hgt_conv import HGTConv
from .rgat_conv import RGATConv
from .rgcn_conv import FastRGCNConv, RGCNConv
from .sage_conv import SAGEConv
from .transformer_conv import TransformerConv

__all__ = [
    "AGNNConv",
    "FastRGCNConv",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GPSConv",
    "GraphConv",
    "HGTConv",
    "HeteroConv",
    "HeteroDictLinear",
    "HeteroLinear",
    "MaxAggregation",
    "MessagePassing",
    "MinAggregation",
    "RGATConv",
    "RGCNConv",
    "SAGEConv",
    "TransformerConv",
    "aggr",
]

_LAYERS = [
    AGNNConv,
    FastRGCNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GPSConv,
    GraphConv,
    HGTConv,
    HeteroConv,
    HeteroDictLinear,
    HeteroLinear,
    MaxAggregation,
    MinAggregation,
    RGATConv,
    RGCNConv,
    SAGEConv,
    TransformerConv,
]

# PyG's layers without kernels of their own, whose messages are generated.
_GENERATED = [
    *("APPNP", "ARMAConv", "CGConv", "ChebConv", "ClusterGCNConv", "DNAConv", "DynamicEdgeConv", "EGConv", "EdgeConv"),
    *("FAConv", "FeaStConv", "FiLMConv", "GCN2Conv", "GENConv", "GINEConv", "GMMConv", "GatedGraphConv", "GeneralConv"),
    *("GravNetConv", "HANConv", "HEATConv", "HypergraphConv", "LEConv", "LGConv", "MFConv", "MixHopConv", "NNConv"),
    *("PANConv", "PDNConv", "PNAConv", "PPFConv", "PointGNNConv", "PointNetConv", "PointTransformerConv"),
    *("ResGatedGraphConv", "SGConv", "SSGConv", "SignedConv", "SimpleConv", "SuperGATConv", "TAGConv"),
    "WLConvContinuous",
]

for _layer in _LAYERS:
    register_layer(_layer.stock, _layer)
for _name in _GENERATED:
    if (_stock := getattr(_conv, _name, None)) is not None:  # not every version of PyG has them all
        globals()[_name] = generated_class(_stock, __name__)
        register_layer(_stock, globals()[_name])
        __all__.append(_name)
register_layer(_StockMessagePassing, MessagePassing)
register_family("torch_geometric", lambda module: isinstance(module, _StockMessagePassing), class_to_swap, join)
stand_in(__name__, "torch_geometric.nn")
