"""``python -m edgeless plan`` and ``edgeless.explain(..., plan=True)``."""

import pytest
import torch

import edgeless
from edgeless.__main__ import main
from edgeless.plan.steps import Device
from edgeless.tools.bench import graphs
from edgeless.tools.bench.command import SUITES
from edgeless.tools.bench.shapes import DIMS, HEADS
from edgeless.tools.cli.plan_command import PLANNED_SUITES


def test_every_cell_of_a_suite_is_printed(capsys):
    assert main(["plan", "--suite", "h200"]) == 0
    printed = capsys.readouterr().out
    for graph in ("tolokers", "arxiv", "city-roads-L", "twitch", "hm", "pokec"):
        for op in ("gatv2_H2_D64", "gatv2_H8_D128", "gt_H4_D128"):
            assert f"{op} bf16, {graph} (" in printed and f"{op} fp32, {graph} (" in printed
    assert printed.count("by source") == 36 and "tensor cores" in printed and "ms at the roof" in printed


def test_suites_of_layers_are_not_listed(capsys):
    """What is listed is answered: other suites time layers and models."""
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    listed = capsys.readouterr().out.partition("--suite {")[2].partition("}")[0].split(",")
    assert [name.strip() for name in listed] == PLANNED_SUITES
    assert "h200" in PLANNED_SUITES and "h200-layers" not in PLANNED_SUITES and set(PLANNED_SUITES) < set(SUITES)


@pytest.mark.parametrize("name", PLANNED_SUITES)
def test_every_suite_of_ops_is_answered(name, capsys):
    """Every cell of its ops, without a graph that is unknown here."""
    suite = SUITES[name]
    ops = suite.get("op", ())
    if suite.get("shapes"):
        ops = [f"{score}_H{heads}_D{dim}" for score in ("gatv2", "gat", "gt") for heads in HEADS for dim in DIMS]
    dtypes = ("fp32", "bf16") if suite.get("shapes") else suite.get("dtype", ("fp32",))
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
    assert main(["plan", "spmm_none_F8", "--suite", "threads", "--device", "h200"]) == 0
    assert "spmm_none_F8 fp32, tolokers (11,758 nodes" in capsys.readouterr().out


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


def kernels_of(printed):
    """The files and the kernels that a plan names, without their arguments."""
    lines = [line.strip() for line in printed.splitlines() if line.strip().startswith("(core_cuda/")]
    return [line[1:].partition("<")[0] for line in lines]


def test_a_layer_over_relations_names_its_kernels_and_their_files(capsys):
    """A stranger finds the kernel of RGCN in one command."""
    assert main(["plan", "--layer", "rgcn", "--graph", "fb15k", "--dtype", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("rgcn fp32, fb15k (15,000 nodes, 620,000 edges), H200\n")
    assert kernels_of(printed)[:2] == [
        "core_cuda/relational/cuda/short_segments.cuh: relational::short_products_kernel",
        "core_cuda/relational/cuda/row_sums.cuh: relational::row_sums_kernel",
    ]
    assert "relational_sum, of features" in printed and "short_gradients_kernel" in printed


@pytest.mark.parametrize("layer,first,backward", [
    ("rgat", "pair_attention/cuda/forward.cuh: pair_forward_kernel", "pair_by_src_kernel"),
    ("hgt", "attention/cuda/mma_forward.cuh: mma_forward_kernel", "by_src_kernel<DotScore, "),
])  # fmt: skip
def test_attention_over_relations_is_planned_with_and_without_a_backward(layer, first, backward, capsys):
    assert main(["plan", "--layer", layer, "--graph", "toy", "--dtype", "bf16"]) == 0
    both = capsys.readouterr().out
    assert f"core_cuda/{first}" in kernels_of(both) and backward in both
    steps = [line.partition(": ")[0].strip() for line in both.splitlines()[1:] if not line.strip().startswith("(")]
    assert all(steps.count(step) == 1 for step in steps if not step.startswith("typed_"))
    assert main(["plan", "--layer", layer, "--graph", "toy", "--dtype", "bf16", "--inference"]) == 0
    forward = capsys.readouterr().out
    assert f"core_cuda/{first}" in kernels_of(forward) and backward not in forward


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--layer", "rgcn", "--graph", "arxiv"], "--layer needs a graph with relations"),
        (["--layer", "rgcn", "--nodes", "5", "--edges", "9"], "--nodes has no meaning beside it"),
        (["--layer", "rgcn", "--graph", "toy", "--device", "cpu"], "--layer is for GPUs"),
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
