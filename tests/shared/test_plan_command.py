"""``python -m edgeless plan`` and ``edgeless.explain(..., plan=True)``."""

import pytest
import torch

import edgeless
from edgeless.__main__ import main


def test_every_cell_of_a_suite_is_printed(capsys):
    assert main(["plan", "--suite", "h200"]) == 0
    printed = capsys.readouterr().out
    for graph in ("tolokers", "arxiv", "city-roads-L", "twitch", "hm", "pokec"):
        for op in ("gatv2_H2_D64", "gatv2_H8_D128", "gt_H4_D128"):
            assert f"{op} bf16, {graph} (" in printed and f"{op} fp32, {graph} (" in printed
    assert printed.count("by source") == 36 and "tensor cores" in printed and "ms at the roof" in printed


@pytest.mark.parametrize("device", ["h200", "a100", "cpu"])
def test_sums_and_minima_on_every_device(device, capsys):
    assert main(["plan", "min_F512", "spmm_both_F64", "--graph", "pokec", "--dtype", "bf16", "--device", device]) == 0
    printed = capsys.readouterr().out
    assert "neighbor_reduce, gradient" in printed and "spmm, forward" in printed
    assert ("slices of" in printed) == (device != "cpu")


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([], "plan needs an op"),
        (["gatv2"], "an aggregation is called"),
        (["gatv2_H8_D128", "--graph", "nowhere"], "--graph must be one of"),
        (["gatv2_H8_D128", "--nodes", "5"], "--nodes and --edges go together"),
        (["gatv2_H8_D128", "--nodes", "-5", "--edges", "3"], "must not be negative"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_sentence(arguments, message, capsys):
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_explain_prints_the_plan_of_a_layer(framework):
    if framework == "pyg":
        pytest.importorskip("torch_geometric")
        from edgeless.pyg.nn import GATv2Conv, SAGEConv

        layer, other, graph = GATv2Conv(8, 4, heads=2), SAGEConv(8, 4, aggr="max"), torch.randint(30, (2, 90))
        inputs = (torch.randn(30, 8, requires_grad=True), graph)
    else:
        dgl = pytest.importorskip("dgl")
        from edgeless.dgl.nn import GATv2Conv, SAGEConv

        layer, other = GATv2Conv(8, 4, num_heads=2), SAGEConv(8, 4, "pool")
        graph = dgl.add_self_loop(dgl.graph(tuple(torch.randint(30, (2, 90))), num_nodes=30))
        inputs = (graph, torch.randn(30, 8))
    found = edgeless.explain(layer, *inputs, plan=True)
    attention = [step.step for step in found.plan if step.op == "attention (gatv2)"]
    assert found and attention == ["forward", "by destination", "by source"]
    assert "attention (gatv2), forward: rowsplit" in str(found)
    assert all(p.grad is None for p in layer.parameters())
    assert "neighbor_reduce, gradient" in str(edgeless.explain(other, *inputs, plan=True))
    with torch.no_grad():
        assert "by source" not in str(edgeless.explain(layer, *inputs, plan=True))
    assert not edgeless.explain(layer, *inputs).plan
