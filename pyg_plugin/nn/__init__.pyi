# For type checkers: our layers, and beside them the names and the modules of torch_geometric.nn. PyG ships no types;
# checkers that read its sources find them by the star imports, others take such a name for anything.
from typing import Any

from torch_geometric.nn import *
from torch_geometric.nn.aggr import *
from torch_geometric.nn.conv import *
from torch_geometric.nn.dense import *
from torch_geometric.nn.functional import *
from torch_geometric.nn.glob import *
from torch_geometric.nn.kge import *
from torch_geometric.nn.models import *
from torch_geometric.nn.norm import *
from torch_geometric.nn.pool import *
from torch_geometric.nn.unpool import *

from ..generated import MessagePassing as MessagePassing
from . import aggr as aggr
from .aggr import MaxAggregation as MaxAggregation
from .aggr import MinAggregation as MinAggregation
from .agnn_conv import AGNNConv as AGNNConv
from .gat_conv import GATConv as GATConv
from .gatv2_conv import GATv2Conv as GATv2Conv
from .gcn_conv import GCNConv as GCNConv
from .gin_conv import GINConv as GINConv
from .gps_conv import GPSConv as GPSConv
from .graph_conv import GraphConv as GraphConv
from .hetero_conv import HeteroConv as HeteroConv
from .hetero_linear import HeteroDictLinear as HeteroDictLinear
from .hetero_linear import HeteroLinear as HeteroLinear
from .hgt_conv import HGTConv as HGTConv
from .rgat_conv import RGATConv as RGATConv
from .rgcn_conv import FastRGCNConv as FastRGCNConv
from .rgcn_conv import RGCNConv as RGCNConv
from .sage_conv import SAGEConv as SAGEConv
from .transformer_conv import TransformerConv as TransformerConv

def __getattr__(name: str) -> Any: ...
