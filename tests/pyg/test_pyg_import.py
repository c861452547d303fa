"""What is imported from torch_geometric can be imported from edgeless.pyg, beside the layers and around them."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import sys

import pytest
import torch
import torch_geometric.nn
from import_cases import at_once, differences, last_line, results, stands_for, star, stock_modules, type_checked
from torch import Tensor

import edgeless
import edgeless.pyg.nn as fused
from edgeless.choices.backends import LAYERS

# The names that PyG's example scripts import beside each other.
STATEMENTS = """
import torch_geometric.nn as gnn
import torch_geometric.nn.conv as conv
import torch_geometric.transforms as T
from torch_geometric.nn import AGNNConv
from torch_geometric.nn import ARGVA, GCNConv
from torch_geometric.nn import ARMAConv
from torch_geometric.nn import BatchNorm, ClusterGCNConv
from torch_geometric.nn import BatchNorm, MixHopConv
from torch_geometric.nn import BatchNorm, PNAConv, global_add_pool
from torch_geometric.nn import ComplEx, DistMult, RotatE, TransE
from torch_geometric.nn import CorrectAndSmooth, MLP
from torch_geometric.nn import DNAConv
from torch_geometric.nn import DataParallel, GCNConv, global_mean_pool
from torch_geometric.nn import DeepGCNLayer, GATConv, MemPooling
from torch_geometric.nn import DeepGCNLayer, GENConv
from torch_geometric.nn import DeepGraphInfomax, GCNConv
from torch_geometric.nn import DeepGraphInfomax, SAGEConv
from torch_geometric.nn import DenseGraphConv, DMoNPooling, GCNConv
from torch_geometric.nn import DenseGraphConv, GCNConv, dense_mincut_pool
from torch_geometric.nn import DenseSAGEConv, dense_diff_pool
from torch_geometric.nn import DimeNet, DimeNetPlusPlus
from torch_geometric.nn import DirGNNConv, GATConv, SAGEConv
from torch_geometric.nn import EGConv, global_mean_pool
from torch_geometric.nn import EquilibriumAggregation, MedianAggregation
from torch_geometric.nn import FastRGCNConv, RGCNConv
from torch_geometric.nn import FiLMConv
from torch_geometric.nn import GAE, RGCNConv
from torch_geometric.nn import GAE, VGAE, GCNConv
from torch_geometric.nn import GAT, GCN, GIN, PNA, EdgeCNN, GraphSAGE
from torch_geometric.nn import GATConv, GCNConv, HeteroConv, Linear, SAGEConv
from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_max_pool
from torch_geometric.nn import GATConv, Linear, to_hetero
from torch_geometric.nn import GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.nn import GCN2Conv
from torch_geometric.nn import GCNConv, GraphMultisetTransformer
from torch_geometric.nn import GCNConv, SortAggregation
from torch_geometric.nn import GCNConv, global_mean_pool
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.nn import GINConv, MLP, global_add_pool
from torch_geometric.nn import GINConv, SAGPooling, global_max_pool
from torch_geometric.nn import GINConv, TopKPooling, global_add_pool
from torch_geometric.nn import GINEConv, GPSConv, global_add_pool
from torch_geometric.nn import GraphConv, TopKPooling, global_max_pool
from torch_geometric.nn import GraphUNet
from torch_geometric.nn import GroupAddRev, SAGEConv
from torch_geometric.nn import HANConv
from torch_geometric.nn import HGTConv, Linear
from torch_geometric.nn import JumpingKnowledge, SAGEConv, global_mean_pool
from torch_geometric.nn import LCMAggregation
from torch_geometric.nn import LINKX
from torch_geometric.nn import LabelPropagation
from torch_geometric.nn import LightGCN
from torch_geometric.nn import MLP, DynamicEdgeConv, global_max_pool
from torch_geometric.nn import MLP, PointNetConv, fps, global_max_pool, radius
from torch_geometric.nn import MLP, PointTransformerConv, fps, global_mean_pool, knn, knn_graph
from torch_geometric.nn import MLP, knn_interpolate
from torch_geometric.nn import MaskLabel, TransformerConv
from torch_geometric.nn import MetaPath2Vec
from torch_geometric.nn import NNConv, Set2Set
from torch_geometric.nn import NNConv, global_mean_pool, graclus, max_pool, max_pool_x
from torch_geometric.nn import Node2Vec
from torch_geometric.nn import RECT_L
from torch_geometric.nn import RGATConv
from torch_geometric.nn import SAGEConv, to_hetero, to_hetero_with_bases
from torch_geometric.nn import SGConv
from torch_geometric.nn import SchNet
from torch_geometric.nn import Sequential, GCNConv, summary
from torch_geometric.nn import SignedGCN
from torch_geometric.nn import SplineConv, max_pool, max_pool_x, voxel_grid
from torch_geometric.nn import SuperGATConv
from torch_geometric.nn import TAGConv
from torch_geometric.nn import TGNMemory, TransformerConv
from torch_geometric.nn import WLConv
from torch_geometric.nn import GraphNorm, LayerNorm, PairNorm
from torch_geometric.nn import aggr
from torch_geometric.nn.aggr import AttentionalAggregation, MaxAggregation
from torch_geometric.nn.attention import PerformerAttention
from torch_geometric.nn.conv import GATConv, MessagePassing
from torch_geometric.nn.conv.gat_conv import GATConv
from torch_geometric.nn.conv.gcn_conv import GCNConv, gcn_norm
from torch_geometric.nn.dense.linear import HeteroLinear, Linear
from torch_geometric.nn.inits import glorot, zeros
from torch_geometric.nn.models import AttentiveFP
from torch_geometric.nn.models import GAT, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN, GCN
from torch_geometric.nn.models.re_net import RENet
from torch_geometric.nn.models.tgn import IdentityMessage, LastAggregator, LastNeighborLoader
from torch_geometric.nn.norm import BatchNorm
from torch_geometric.nn.pool import knn_graph
from torch_geometric.nn.pool.decimation import decimation_indices
from torch_geometric.nn.pool.knn import KNNIndex
from torch_geometric.nn.resolver import activation_resolver
from torch_geometric.nn.unpool import knn_interpolate
from torch_geometric.transforms import BaseTransform, Compose, NormalizeFeatures
""".strip().splitlines()

ROOTS = ("torch_geometric.loader", "torch_geometric.nn", "torch_geometric.transforms")


@pytest.mark.parametrize("statement", STATEMENTS)
def test_swapped_imports_give_the_same_names(statement):
    stock, ours = results(statement)
    assert ours.keys() == stock.keys()
    for name, value in stock.items():
        if statement.startswith("import"):
            assert ours[name].__name__ == value.__name__.replace("torch_geometric", "edgeless.pyg")
        else:
            assert stands_for(ours[name], value), name


@pytest.mark.parametrize("root", ROOTS)
def test_every_name_of_every_module(root):
    found = {name: differences(name) for name in stock_modules(root)}
    assert len(found) > (10 if root.endswith("loader") else 30)
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_every_layer_is_ours_wherever_pyg_has_it():
    layers = {stock: ours for stock, ours in LAYERS.items() if ours.__module__.startswith("edgeless.pyg.")}
    assert sum(not hasattr(ours, "_runs_generated") for ours in layers.values()) == 18
    assert len(layers) >= 18 + 30
    for stock, ours in layers.items():
        module = importlib.import_module(stock.__module__.replace("torch_geometric", "edgeless.pyg"))
        assert getattr(module, stock.__name__) is ours


@pytest.mark.parametrize("module", ["loader", "nn", "nn.aggr", "nn.conv", "nn.models", "nn.pool", "transforms"])
def test_star_imports(module):
    ours, stock = star(f"edgeless.pyg.{module}"), star(f"torch_geometric.{module}")
    assert stock.keys() <= ours.keys()
    assert all(stands_for(ours[name], value) for name, value in stock.items())
    own = vars(sys.modules[f"edgeless.pyg.{module}"]).get("__all__", [])
    assert ours.keys() - stock.keys() <= set(own)


def test_what_pyg_lacks_is_an_error_that_names_the_module():
    message = "module 'edgeless.pyg.nn' has no attribute 'GATv3Conv', and neither has 'torch_geometric.nn'"
    with pytest.raises(AttributeError, match=message):
        fused.GATv3Conv  # noqa: B018
    assert not hasattr(fused, "GATv3Conv") and not hasattr(fused.models, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name 'GATv3Conv' from 'edgeless.pyg.nn.conv'"):
        from edgeless.pyg.nn.conv import GATv3Conv  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="No module named 'edgeless.pyg.nn.convs'"):
        import edgeless.pyg.nn.convs
    with pytest.raises(ModuleNotFoundError, match="No module named 'edgeless.pyg.nn.torch'"):
        import edgeless.pyg.nn.torch  # noqa: F401


def test_a_function_is_not_hidden_by_the_module_that_it_came_from():
    from edgeless.pyg.nn.pool.knn import KNNIndex  # noqa: F401
    from edgeless.pyg.nn.summary import summary

    assert fused.summary is summary is torch_geometric.nn.summary
    assert fused.pool.knn is torch_geometric.nn.pool.knn


def test_pyg_is_not_loaded_twice():
    line = last_line(
        """
        import sys
        import edgeless.pyg.nn.conv.gat_conv, edgeless.pyg.nn.aggr.basic, edgeless.pyg.nn.models.basic_gnn
        import torch_geometric.nn as stock
        print([m.__name__ for name, m in sys.modules.items() if name.startswith("edgeless.pyg.nn.")
               and "torch_geometric" in (getattr(m, "__file__", None) or "")],
              edgeless.pyg.nn.aggr.basic.SumAggregation is stock.SumAggregation)
        """
    )
    assert line == "[] True"


def test_modules_are_what_tools_expect():
    models = importlib.import_module("edgeless.pyg.nn.models")
    assert inspect.ismodule(models) and models is fused.models and models.__path__ == []
    assert inspect.getmodule(models.GAT) is inspect.getmodule(torch_geometric.nn.GAT)
    assert inspect.getmodule(fused.GATConv).__name__ == "edgeless.pyg.nn.gat_conv"
    assert pickle.loads(pickle.dumps(models)) is models and copy.deepcopy(models) is models
    assert pickle.loads(pickle.dumps(fused.global_mean_pool)) is torch_geometric.nn.global_mean_pool
    assert dict(inspect.getmembers(fused))["GATConv"] is fused.GATConv
    assert importlib.util.find_spec("edgeless.pyg.nn.models.basic_gnn").name == "edgeless.pyg.nn.models.basic_gnn"
    assert importlib.util.find_spec("edgeless.pyg.nn.models.nothing") is None


def test_modules_can_be_reloaded():
    line = last_line(
        """
        import importlib
        import edgeless.pyg.nn as nn, edgeless.pyg.nn.aggr, edgeless.pyg.nn.models, edgeless.pyg.transforms
        before = nn.GATConv, nn.models.GAT, nn.global_mean_pool, sorted(nn.__all__)
        for module in (nn.models, nn, edgeless.pyg.transforms, edgeless.pyg, edgeless):
            assert importlib.reload(module) is module
        print(before == (nn.GATConv, nn.models.GAT, nn.global_mean_pool, sorted(nn.__all__)), edgeless.pyg.nn is nn)
        """
    )
    assert line == "True True"


def test_threads_may_import_at_once():
    statements = [
        "from edgeless.pyg.nn import GATConv, global_mean_pool",
        "from edgeless.pyg.nn.conv import GATConv",
        "from edgeless.pyg.nn.conv.gat_conv import GATConv",
        "from edgeless.pyg.nn.models.basic_gnn import GATConv",
        "from edgeless.pyg import nn; GATConv = nn.GATConv",
        "import edgeless; edgeless.pyg.transforms.Compose; GATConv = edgeless.pyg.nn.GATConv",
    ]
    assert at_once("import edgeless, torch_geometric", statements, "GATConv") == "edgeless.pyg.nn.gat_conv"


def test_stock_models_keep_their_layers_until_they_are_accelerated():
    model = fused.GAT(8, 16, 2, 4)
    assert type(model) is torch_geometric.nn.GAT
    assert type(model.convs[0]) is torch_geometric.nn.GATConv
    edgeless.accelerate(model)
    assert type(model.convs[0]) is fused.GATConv


class Net(torch.nn.Module):
    """A stock pooling behind one of our layers, by way of the module."""

    def __init__(self):
        super().__init__()
        self.conv = fused.GCNConv(4, 8)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return fused.global_mean_pool(self.conv(x, edge_index), batch)


@pytest.mark.parametrize("compiled", ["script", "compile"])
def test_compilers_find_stock_functions_through_the_module(compiled, fresh_dynamo):
    net = Net()
    inputs = (torch.randn(5, 4), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), torch.tensor([0, 0, 1, 1, 1]))
    ran = torch.jit.script(net) if compiled == "script" else torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(ran(*inputs), net(*inputs))


@pytest.mark.slow
def test_type_checkers_know_the_names(tmp_path):
    said, types = type_checked(
        tmp_path,
        """
        import edgeless
        from edgeless.pyg.nn import GCNConv, Linear, global_mean_pool
        from edgeless.pyg.nn.aggr import MaxAggregation, SumAggregation
        from edgeless.pyg.nn.conv.gcn_conv import gcn_norm
        from edgeless.pyg.nn.models import GAT
        from edgeless.pyg.transforms import Compose, Reorder
        reveal_type(GCNConv)
        reveal_type(global_mean_pool)
        reveal_type(edgeless.pyg.nn.GATConv)
        reveal_type(MaxAggregation)
        reveal_type(SumAggregation)
        reveal_type(Compose)
        reveal_type(Reorder)
        """,
    )
    assert "error" not in said and len(types) == 7
    ours = {0: "nn.gcn_conv.GCNConv", 2: "nn.gat_conv.GATConv", 3: "nn.aggr.MaxAggregation", 6: "transforms.Reorder"}
    assert all(f"edgeless.pyg.{name}" in types[i] for i, name in ours.items())
