"""Every fused layer of PyG on the parts of a graph, in two and three processes, against one process."""

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as stock
from carrier_cases import carried
from part_cases import FEATURES, edges, node_data, spawn, write_partitions
from pyg_part_cases import all_layers, features_that_stay

import edgeless
import edgeless.distributed as ed
import edgeless.pyg.nn as nn
from edgeless.distributed import training

pytest.importorskip("safetensors")
pytest.importorskip("pymetis")


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.slow
@pytest.mark.parametrize("world", (2, 3))
def test_parts_give_what_the_whole_graph_gives(tmp_path, world):
    write_partitions(tmp_path, world)
    assert not spawn(all_layers, world, tmp_path)


@pytest.mark.cuda
@pytest.mark.skipif(not (dist.is_available() and dist.is_nccl_available()), reason="needs NCCL")
@pytest.mark.parametrize("carrier", ("all_to_all", "symmetric"))
def test_parts_on_two_gpus_give_what_the_whole_graph_gives(tmp_path, carrier):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    write_partitions(tmp_path, 2)
    assert not spawn(carried, 2, tmp_path, carrier, all_layers, backend="nccl")


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.slow
@pytest.mark.parametrize(("world", "carrier"), ((2, "late"), (3, "all_to_all")))
def test_foreign_features_are_kept_or_fetched_again(tmp_path, world, carrier):
    write_partitions(tmp_path, world)
    assert not spawn(carried, world, tmp_path, carrier, features_that_stay)


@pytest.mark.cuda
@pytest.mark.skipif(not (dist.is_available() and dist.is_nccl_available()), reason="needs NCCL")
@pytest.mark.parametrize("carrier", ("all_to_all", "symmetric"))
def test_foreign_features_are_kept_or_fetched_again_on_two_gpus(tmp_path, carrier):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    write_partitions(tmp_path, 2)
    assert not spawn(carried, 2, tmp_path, carrier, features_that_stay, backend="nccl")


@pytest.fixture
def alone(tmp_path):
    """The parts of two, loaded by one process."""
    write_partitions(tmp_path, 2)
    return ed.load(tmp_path / "random")


def refused(layer, x, dg, *words, types=()):
    """Asserts that ``explain`` says these words, and that the call raises them whatever the backend."""
    said = edgeless.explain(layer, x, dg, *types)
    assert not said
    for name in ("auto", "fused"):
        with edgeless.backend(name), pytest.raises(edgeless.NotFusedError) as caught:
            layer(x, dg, *types)
        for word in words:
            assert word in str(said) and word in str(caught.value)


def test_layers_refuse_in_words(alone):
    x = alone.ndata["x"].float()
    for cls in (nn.GATv2Conv, nn.GATConv, nn.TransformerConv, nn.GCNConv, nn.SAGEConv, nn.GraphConv):
        assert edgeless.explain(cls(FEATURES, 3), x, alone)
        refused(cls(FEATURES, 3, flow="target_to_source"), x, alone, "flow is 'target_to_source'")
        refused(cls(FEATURES, 3, aggr="median"), x, alone, "aggr_module is MedianAggregation")
    refused(nn.SAGEConv(FEATURES, 3), (x, x.clone()), alone, "x is a pair")
    types = [torch.zeros(alone.edge_ids.numel(), dtype=torch.int64)]
    for cls in (nn.RGCNConv, nn.FastRGCNConv):
        assert edgeless.explain(cls(FEATURES, 3, 2), x, alone, *types)
        refused(cls(FEATURES, 3, 2), (x, x), alone, "with nodes of one kind", types=types)
        refused(cls(FEATURES, 3, 2), None, alone, "with nodes of one kind", types=types)
    assert edgeless.explain(nn.RGATConv(FEATURES, 3, 2, dropout=0.5), x, alone, *types)
    cached = nn.GCNConv(FEATURES, 3, cached=True)
    cached(x, edges("loops"))
    refused(cached, x, alone, "normalisation of another graph")
    with edgeless.backend("reference"), pytest.raises(edgeless.NotFusedError, match="reference.*in force"):
        nn.SAGEConv(FEATURES, 3)(x, alone)


def test_models_say_what_cannot_run_on_parts():
    class Model(torch.nn.Module):
        def __init__(self, **layers):
            super().__init__()
            for name, layer in layers.items():
                self.add_module(name, layer)

    good = Model(conv=nn.SAGEConv(3, 3), norm=stock.BatchNorm(3), row=stock.LayerNorm(3, mode="node"))
    assert ed.refusals(good) == []
    assert type(ed.convert_batchnorm(good).norm.module) is training.BatchNorm1d
    bad = Model(conv=stock.SAGEConv(3, 3), norm=stock.GraphNorm(3), layer=stock.LayerNorm(3), pool=stock.TopKPooling(3))
    said = "; ".join(ed.refusals(bad))
    for words in (
        "conv is a SAGEConv, which edgeless has no fused layer for",
        "norm is a GraphNorm, which normalises over all nodes",
        "layer is a LayerNorm, which normalises over all nodes",
        "pool is a TopKPooling, which pools over all nodes",
    ):
        assert words in said
    with pytest.raises(ValueError, match="convert_batchnorm: conv is a SAGEConv"):
        ed.convert_batchnorm(bad)


def test_a_checkpoint_loads_into_the_stock_layers(alone):
    ours, theirs = nn.GATv2Conv(FEATURES, 3, heads=2), stock.GATv2Conv(FEATURES, 3, heads=2)
    theirs.load_state_dict(ours.state_dict())
    out = ed.gather(ours(alone.ndata["x"].float(), alone), alone)
    torch.testing.assert_close(out, theirs(node_data()["x"].float(), edges("loops")))


def test_a_compiled_model_runs_on_parts(alone):
    layer, x = nn.SAGEConv(FEATURES, 3), alone.ndata["x"].float()
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x, alone), layer(x, alone))
