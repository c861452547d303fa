# For type checkers: our layers, and beside them the names and the modules of dgl.nn. DGL ships no types; checkers that
# read its sources find them by the star import, others take such a name for anything.
from typing import Any

from dgl.nn.pytorch import *

from .agnnconv import AGNNConv as AGNNConv
from .dotgatconv import DotGatConv as DotGatConv
from .gatconv import GATConv as GATConv
from .gatv2conv import GATv2Conv as GATv2Conv
from .ginconv import GINConv as GINConv
from .graphconv import GraphConv as GraphConv
from .heterographconv import HeteroGraphConv as HeteroGraphConv
from .hgtconv import HGTConv as HGTConv
from .relgraphconv import RelGraphConv as RelGraphConv
from .sageconv import SAGEConv as SAGEConv
from .typedlinear import TypedLinear as TypedLinear

def __getattr__(name: str) -> Any: ...
