"""``python -m edgeless plan`` and ``edgeless.explain(..., plan=True)``."""

import pytest
import torch

import edgeless
from edgeless.__main__ import main
from edgeless.plan import Device
from edgeless.tools.bench import graphs
from edgeless.tools.bench.command import SUITES
from edgeless.tools.bench.shapes import DIMS, HEADS


def test_every_cell_of_a_suite_is_printed(capsys):
    assert main(["plan", "--suite", "h200"]) == 0
    printed = capsys.readouterr().out
    for graph in ("tolokers", "arxiv", "city-roads-L", "twitch", "hm", "pokec"):
        for op in ("gatv2_H2_D64", "gatv2_H8_D128", "gt_H4_D128"):
            assert f"{op} bf16, {graph} (" in printed and f"{op} fp32, {graph} (" in printed
    assert printed.count("by source") == 36 and "tensor cores" in printed and "ms at the roof" in printed


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_of_the_bench_is_answered(name, capsys):
    """Every cell of its ops, or why there are none, without a graph that is unknown here."""
    suite = SUITES[name]
    ops = suite.get("op", ())
    if suite.get("shapes"):
        ops = [f"{score}_H{heads}_D{dim}" for score in ("gatv2", "gat", "gt") for heads in HEADS for dim in DIMS]
    dtypes = ("fp32", "bf16") if suite.get("shapes") else suite.get("dtype", ("fp32",))
    if not ops:
        assert main(["plan", "--suite", name]) == 2
        told = f"--suite {name} times whole layers or models. What runs for one depends on its options and its graph"
        assert told in capsys.readouterr().err
        return
    assert main(["plan", "--suite", name]) == 0
    cells = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    device = Device.of(torch.device("cpu")).name if name == "threads" else "H200"
    expected = [f"{op} {dtype}, {graph} (" for graph in suite["graph"] for op in ops for dtype in dtypes]
    assert [cell[: len(begin)] for cell, begin in zip(cells, expected, strict=True)] == expected
    assert all(cell.endswith(f" edges), {device}") for cell in cells)


def test_a_suite_for_another_device_or_with_ops_of_ones_own(capsys):
    assert main(["plan", "--suite", "threads", "--device", "a100"]) == 0
    printed = capsys.readouterr().out
    assert "star (65,537 nodes, 1,000,000 edges), A100" in printed and "tolokers (11,758 nodes" in printed
    assert main(["plan", "spmm_none_F8", "--suite", "relations"]) == 0
    assert "spmm_none_F8 fp32, aifb (7,262 nodes, 48,810 edges), H200" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["star", "toy", "tiny", "artnet", "artnet:community", "city-roads-M:community", "aifb", "mnist"]
)
def test_sizes_are_those_of_the_graph_that_the_bench_makes(name):
    made = graphs.load(name, None, torch.device("cpu"))
    assert graphs.sizes(name) == (made.num_nodes, made.num_edges)


@pytest.mark.parametrize("name", ["tolokers", "nowhere", "aifb:community", "star:community", "artnet:shuffled"])
def test_no_sizes_of_what_is_not_made_here(name):
    assert graphs.sizes(name) is None


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
