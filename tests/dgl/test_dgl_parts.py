"""Every fused layer of DGL on the parts of a graph, in two and three processes, against one process."""

import dgl.nn as stock
import pytest
import torch
import torch.distributed as dist
from dgl_part_cases import all_layers
from part_cases import FEATURES, spawn, write_partitions

import edgeless
import edgeless.dgl.nn as nn
import edgeless.distributed as ed
from edgeless.dgl import ops

pytest.importorskip("safetensors")
pytest.importorskip("pymetis")


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.slow
@pytest.mark.parametrize("world", (2, 3))
def test_parts_give_what_the_whole_graph_gives(tmp_path, world):
    write_partitions(tmp_path, world)
    assert not spawn(all_layers, world, tmp_path)


def test_layers_refuse_in_words(tmp_path):
    write_partitions(tmp_path, 2)
    dg = ed.load(tmp_path / "random")
    x = dg.ndata["x"].float()
    for layer, feat, words in (
        (nn.SAGEConv(FEATURES, 3, "lstm"), x, "aggregator_type is lstm"),
        (nn.GATConv(FEATURES, 3, 2), x, "nodes without in-edges"),
        (nn.SAGEConv(FEATURES, 3, "mean"), (x, x), "feat is a pair"),
    ):
        assert words in str(edgeless.explain(layer, dg, feat))
        with pytest.raises(edgeless.NotFusedError, match=words):
            layer(dg, feat)
    ids = torch.zeros(dg.num_edges, dtype=torch.int64)
    for layer, given in (
        (nn.RelGraphConv(FEATURES, 3, 2), (x, ids)),
        (nn.HGTConv(FEATURES, 3, 1, 2, 2), (x, torch.zeros(len(x), dtype=torch.int64), ids)),
    ):
        assert edgeless.explain(layer, dg, *given)
        with pytest.raises(edgeless.NotFusedError, match="etypes is not an int64 or int32 Tensor of shape"):
            layer(dg, *given[:-1], ids[1:])
    logits = torch.randn(dg.num_edges, 2, dtype=torch.bfloat16)
    assert ops.edge_softmax(dg, logits).shape == logits.shape
    with pytest.raises(edgeless.NotFusedError, match="in-edges of its nodes"):
        ops.edge_softmax(dg, logits, norm_by="src")
    with edgeless.backend("reference"):
        with pytest.raises(edgeless.NotFusedError, match="reference"):
            ops.copy_u_sum(dg, x)
        with pytest.raises(edgeless.NotFusedError, match="reference.*in force"):
            nn.SAGEConv(FEATURES, 3, "mean")(dg, x)


def test_models_say_what_cannot_run_on_parts():
    model = torch.nn.Sequential(nn.SAGEConv(3, 3, "mean"), stock.SAGEConv(3, 3, "mean"), stock.AvgPooling())
    said = ed.refusals(model)
    assert len(said) == 2
    assert "1 is a SAGEConv, which edgeless has no fused layer for" in said[0]
    assert "2 is a AvgPooling, which pools over all nodes" in said[1]
