"""What is imported when, and the one sentence that a missing or broken DGL gets. Each case is a process of its own."""

from __future__ import annotations

import importlib
import inspect
import pickle

import dgl
import pytest
from import_cases import at_once, differences, last_line, results, stands_for, star, stock_modules, type_checked

import edgeless.dgl.nn as fused
import edgeless.dgl.ops as fused_ops
import edgeless.dgl.transforms as fused_transforms
from edgeless.choices.backends import LAYERS

# The names that DGL's example scripts import beside each other.
STATEMENTS = """
import dgl.nn as dglnn
import dgl.nn.pytorch as dglnn
import dgl.nn.pytorch.conv as conv
import dgl.ops as ops
import dgl.transforms as T
from dgl.nn import APPNPConv
from dgl.nn import AvgPooling, GraphConv, MaxPooling
from dgl.nn import ChebConv, EdgeConv
from dgl.nn import DeepWalk, MetaPath2Vec
from dgl.nn import DotGatConv, GATConv, GATv2Conv
from dgl.nn import EGATConv, EdgeGATConv
from dgl.nn import EdgeWeightNorm, GraphConv
from dgl.nn import GCN2Conv
from dgl.nn import GINConv, JumpingKnowledge, SumPooling
from dgl.nn import GNNExplainer, GraphConv, SubgraphX
from dgl.nn import GlobalAttentionPooling, Set2Set
from dgl.nn import GraphConv, HeteroGraphConv
from dgl.nn import GraphConv, NNConv
from dgl.nn import HGTConv, TypedLinear
from dgl.nn import HeteroEmbedding, HeteroGraphConv, HeteroLinear
from dgl.nn import LabelPropagation
from dgl.nn import NodeEmbedding, SAGEConv
from dgl.nn import RelGraphConv, WeightBasis
from dgl.nn import SortPooling, WeightAndSum
from dgl.nn import TransE, TransR
from dgl.nn import conv
from dgl.nn.functional import edge_softmax
from dgl.nn.pytorch import AGNNConv, TAGConv
from dgl.nn.pytorch import AtomicConv, CFConv
from dgl.nn.pytorch import EdgePredictor, GATConv
from dgl.nn.pytorch import GATConv, edge_softmax
from dgl.nn.pytorch import GINConv, GMMConv
from dgl.nn.pytorch import GraphConv, HeteroGraphConv, RelGraphConv, Sequential
from dgl.nn.pytorch import KNNGraph, SGConv
from dgl.nn.pytorch.conv import GINConv, SAGEConv
from dgl.nn.pytorch.conv.cfconv import CFConv, ShiftedSoftplus
from dgl.nn.pytorch.conv.gatconv import GATConv
from dgl.nn.pytorch.factory import KNNGraph
from dgl.nn.pytorch.glob import AvgPooling, MaxPooling, SumPooling
from dgl.nn.pytorch.hetero import HeteroGraphConv
from dgl.nn.pytorch.linear import TypedLinear
from dgl.nn.pytorch.softmax import edge_softmax
from dgl.nn.pytorch.sparse_emb import NodeEmbedding
from dgl.nn.pytorch.utils import Identity, JumpingKnowledge
from dgl.ops import copy_e_sum, edge_softmax, gsddmm, gspmm, u_mul_e_sum
from dgl.ops.edge_softmax import edge_softmax
from dgl.transforms import AddSelfLoop, BaseTransform, Compose
from dgl.transforms.functional import add_self_loop, remove_self_loop
""".strip().splitlines()

ROOTS = ("dgl.dataloading", "dgl.nn", "dgl.ops", "dgl.transforms")
OF_OURS = ("copy_u_max", "copy_u_mean", "copy_u_min", "copy_u_sum", "edge_softmax")
OF_OURS += ("gather_mm", "segment_mm", "u_dot_v", "u_mul_e_sum")
FUNCTIONS = tuple((getattr(dgl.ops, name), vars(fused_ops)[name]) for name in OF_OURS)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_swapped_imports_give_the_same_names(statement):
    stock, ours = results(statement)
    assert ours.keys() == stock.keys()
    for name, value in stock.items():
        if statement.startswith("import"):
            assert ours[name].__name__ in statement.split()[1].replace("dgl", "edgeless.dgl")
        else:
            assert stands_for(ours[name], value, FUNCTIONS), name


@pytest.mark.parametrize("root", ROOTS)
def test_every_name_of_every_module(root):
    found = {name: differences(name, FUNCTIONS) for name in stock_modules(root)}
    assert len(found) >= 4 and not {name: wrong for name, wrong in found.items() if wrong}


def test_every_layer_is_ours_wherever_dgl_has_it():
    layers = {stock: ours for stock, ours in LAYERS.items() if ours.__module__.startswith("edgeless.dgl.")}
    assert sum(not hasattr(ours, "_runs_generated") for ours in layers.values()) == 11 and len(layers) >= 30
    for stock, ours in layers.items():
        assert getattr(importlib.import_module(f"edgeless.{stock.__module__}"), stock.__name__) is ours


@pytest.mark.parametrize("module", ["nn", "nn.pytorch", "nn.pytorch.conv", "nn.pytorch.glob", "ops", "transforms"])
def test_star_imports(module):
    ours, stock = star(f"edgeless.dgl.{module}"), star(f"dgl.{module}")
    assert stock.keys() <= ours.keys()
    assert all(stands_for(ours[name], value, FUNCTIONS) for name, value in stock.items())


def test_what_dgl_lacks_is_an_error_that_names_the_module():
    message = "module 'edgeless.dgl.nn' has no attribute 'GATv3Conv', and neither has 'dgl.nn'"
    with pytest.raises(AttributeError, match=message):
        fused.GATv3Conv  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'GATv3Conv' from 'edgeless.dgl.nn.pytorch'"):
        from edgeless.dgl.nn.pytorch import GATv3Conv  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="No module named 'edgeless.dgl.nn.pytorch.convs'"):
        import edgeless.dgl.nn.pytorch.convs  # noqa: F401


def test_dgl_is_not_loaded_twice():
    line = last_line(
        """
        import sys
        from edgeless.dgl import graphbolt
        graphbolt.stub()
        import edgeless.dgl.nn.conv, edgeless.dgl.nn.pytorch.conv.gatconv, edgeless.dgl.ops.spmm
        import dgl
        print([name for name, m in sys.modules.items() if name.startswith("edgeless.dgl.")
               and "/dgl/nn" in (getattr(m, "__file__", None) or "")
               and "edgeless" not in m.__file__ and "dgl_plugin" not in m.__file__],
              edgeless.dgl.nn.conv.GATConv is edgeless.dgl.nn.GATConv, "dgl.nn.conv" in sys.modules)
        """
    )
    assert line == "[] True False"


def test_modules_are_what_tools_expect():
    pytorch = importlib.import_module("edgeless.dgl.nn.pytorch")
    assert inspect.ismodule(pytorch) and pytorch is fused.pytorch
    assert pickle.loads(pickle.dumps(pytorch)) is pytorch
    assert pickle.loads(pickle.dumps(fused.SumPooling)) is dgl.nn.SumPooling
    assert inspect.getmodule(pytorch.SumPooling).__name__ == "dgl.nn.pytorch.glob"
    assert {"GATConv", "SumPooling", "conv"} <= set(dir(pytorch))


def test_modules_can_be_reloaded():
    before = fused.GATConv, fused.SumPooling, fused_ops.gspmm, fused.pytorch.GATConv
    for module in (fused.pytorch, fused_transforms):
        assert importlib.reload(module) is module
    assert before == (fused.GATConv, fused.SumPooling, fused_ops.gspmm, fused.pytorch.GATConv)


def test_threads_may_import_at_once():
    statements = [
        "from edgeless.dgl.nn import GATConv, SumPooling",
        "from edgeless.dgl.nn.pytorch import GATConv",
        "from edgeless.dgl.nn.pytorch.conv.gatconv import GATConv",
        "import edgeless.dgl.nn.conv as conv; GATConv = conv.GATConv",
        "import edgeless; edgeless.dgl.ops.gspmm; GATConv = edgeless.dgl.nn.GATConv",
        "import edgeless.dgl.transforms as T; T.Compose; from edgeless.dgl.nn import GATConv",
    ]
    first = "from edgeless.dgl import graphbolt; graphbolt.stub(); import dgl"
    assert at_once(first, statements, "GATConv") == "edgeless.dgl.nn.gatconv"


@pytest.mark.slow
def test_type_checkers_know_the_names(tmp_path):
    said, types = type_checked(
        tmp_path,
        """
        import edgeless
        import edgeless.dgl.nn.pytorch as dglnn
        from edgeless.dgl.nn import GATConv, SumPooling
        from edgeless.dgl.nn.pytorch.conv import GINConv
        from edgeless.dgl.ops import copy_u_sum, gspmm
        from edgeless.dgl.transforms import Compose, Reorder
        reveal_type(GATConv)
        reveal_type(SumPooling)
        reveal_type(copy_u_sum)
        reveal_type(edgeless.dgl.transforms.Reorder)
        """,
    )
    assert said == "" and len(types) == 4
    assert "edgeless.dgl.nn.gatconv.GATConv" in types[0] and "def (g: " in types[2] and "Reorder" in types[3]


def test_frameworks_are_imported_only_when_asked_for():
    line = last_line(
        """
        import sys
        import edgeless
        before = sorted({"dgl", "torch_geometric"} & set(sys.modules))
        from edgeless.dgl import graphbolt
        graphbolt.stub()
        import edgeless.dgl.nn
        print(before, sorted({"dgl", "torch_geometric"} & set(sys.modules)))
        """
    )
    assert line == "[] ['dgl']"


def test_missing_dgl_gets_one_sentence():
    line = last_line(
        """
        import sys
        sys.modules["dgl"] = None
        import edgeless.dgl.nn
        """
    )
    assert line == "ImportError: edgeless.dgl needs DGL, which is not installed: run `pip install 'edgeless[dgl]'`."


def test_a_folder_named_dgl_is_not_dgl(tmp_path):
    """Such as the one that these tests are in."""
    (tmp_path / "dgl").mkdir()
    line = last_line(
        f"""
        import importlib.util
        from importlib.machinery import PathFinder
        importlib.util.find_spec = lambda name, *a: PathFinder.find_spec(name, [{str(tmp_path)!r}])
        import edgeless.dgl
        """
    )
    assert "which is not installed" in line


@pytest.mark.parametrize(
    "error, remedy",
    [
        ('ImportError("No module named pkg_resources")', "run `pip install 'edgeless[dgl]'`"),
        ('FileNotFoundError("Cannot find graphbolt library")', "edgeless.dgl.graphbolt.stub() before the first import"),
    ],
)
def test_a_dgl_that_cannot_be_imported_gets_its_cause_and_the_remedy(error, remedy, tmp_path):
    (tmp_path / "dgl").mkdir()
    (tmp_path / "dgl" / "__init__.py").write_text(f"raise {error}")
    line = last_line(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import edgeless.dgl.nn")
    cause = error.split('"')[1]
    assert line.startswith(f"ImportError: edgeless.dgl needs DGL, whose import fails here ({cause}): ")
    assert remedy in line


def test_graphbolt_is_emptied_only_where_it_cannot_be_loaded(tmp_path):
    """With a library for another torch, with one for this torch, and without any."""
    code = f"""
        import sys, torch
        from pathlib import Path
        import importlib.util
        root = Path({str(tmp_path)!r})
        package = root / "dgl"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("")
        sys.path.insert(0, str(root))
        from edgeless.dgl import graphbolt
        found = [graphbolt.stub()]
        (package / "graphbolt").mkdir()
        library = package / "graphbolt" / "libgraphbolt_pytorch_0.1.so"
        library.write_text("")
        found.append(graphbolt.stub())
        found.append(sys.modules.pop("dgl.graphbolt").__name__)
        library.rename(library.with_name("libgraphbolt_pytorch_" + torch.__version__.split("+")[0] + ".so"))
        found.append(graphbolt.stub())
        import dgl
        found.append(graphbolt.stub())
        print(found)
    """
    assert last_line(code) == "[False, True, 'dgl.graphbolt', False, False]"


def test_dgl_is_not_changed_by_the_import():
    """The stock layers are what they were: nothing is patched."""
    import edgeless.dgl.nn as fused

    assert dgl.nn.GATConv is not fused.GATConv
    assert dgl.nn.GATConv.__module__.startswith("dgl.")


def test_names_of_the_package():
    import edgeless.dgl

    assert {"nn", "to_graph"} <= set(dir(edgeless.dgl))
    assert edgeless.dgl.nn.GATConv.__module__ == "edgeless.dgl.nn.gatconv"
    with pytest.raises(AttributeError, match="module 'edgeless.dgl' has no attribute 'GATConv'"):
        edgeless.dgl.GATConv  # noqa: B018
