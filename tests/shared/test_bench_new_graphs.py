"""The benchmark of small graphs: peers compute the same thing, on graphs that are new in every step."""

import json

import pytest
import torch

import edgeless
from edgeless.__main__ import main
from edgeless.tools.bench import graphs, new_graphs
from edgeless.tools.bench.suites import SUITES
from edgeless.tools.bench.work import Case
from edgeless.tools.cli.devices import UsageError, installed

pytestmark = pytest.mark.usefixtures("short_turns")

LAYERS = SUITES["molecules"]["new_graphs"]
CPU = torch.device("cpu")


def case_of(layer):
    return Case("new graphs", layer, "fp32", features=16, heads=2, channels=8)


def built(layer, peer, name="molecules-8"):
    reason = new_graphs.why_not(case_of(layer), peer, CPU)
    if reason is not None:
        pytest.skip(reason)
    return new_graphs.build(case_of(layer), peer, graphs.load(name, None, CPU))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_both_sides_compute_alike(layer, framework):
    mine, stock = built(layer, f"edgeless-{framework}"), built(layer, framework)
    found = []
    for peer in (mine, stock):
        out = peer.forward(peer.renewed())
        peer.forward_backward(peer.renewed())
        found.append((out, peer.x.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.linalg.vector_norm(ours - theirs) <= 1e-4 * torch.linalg.vector_norm(theirs)
    assert found[0][1].any()


@pytest.mark.parametrize("layer", ["sage-mean", "gat", "rgcn", "hgt"])
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_every_step_has_a_graph_that_the_cache_has_not_seen(layer, framework):
    peer = built(layer, f"edgeless-{framework}")
    edgeless.clear_cache()
    found = []
    for _ in range(4):
        peer.forward_backward(peer.renewed())
        found.append((edgeless.cache_info().misses, edgeless.cache_info().hits))
    misses, hits = found[0]  # graphs of the first layer; the others find them
    assert misses > 0 and hits >= new_graphs.DEPTH - 1
    assert found == [(misses * count, hits * count) for count in range(1, 5)]


@pytest.mark.parametrize("name,count", graphs.MOLECULES.items())
def test_a_batch_of_molecules_is_what_its_name_says(name, count):
    graph = graphs.load(name, None, CPU)
    (src, dst), (least, most) = graph.edge_index, graphs.MOLECULE_NODES
    assert count * least <= graph.num_nodes < count * most
    assert graph.edge_index.unique().numel() == graph.num_nodes
    handle = edgeless.Graph.from_edge_index(graph.edge_index, is_symmetric=True)  # which it checks
    nodes = torch.arange(graph.num_nodes)
    for _ in range(most):  # the least id that a path leads to: one for every molecule
        nodes = nodes.scatter_reduce(0, dst, nodes[src], "amin")
    assert nodes.unique().numel() == count
    assert handle.max_in_degree <= 4
    ends = list(zip(src.tolist(), dst.tolist(), strict=True))
    bond = dict(zip(ends, graph.relations.edge_type.tolist(), strict=True))
    assert all(bond[b, a] == kind for (a, b), kind in bond.items())


def test_a_peer_that_cannot_run_has_its_reason():
    graph = graphs.load("molecules-1", None, CPU)
    steps = new_graphs.measure(graph, case_of("rgat"), ["dgl", "edgeless-dgl"], ["forward"], 1)
    reason = "the framework has no such layer" if installed("dgl") else steps[0].failed
    assert [step.failed for step in steps] == [reason, reason]
    with pytest.raises(UsageError, match="for --new-graphs there are pyg, edgeless-pyg, dgl, edgeless-dgl"):
        new_graphs.peers_of(["plain"])


def test_the_command_measures_and_writes_what_it_prints(tmp_path, capsys):
    framework = next((name for name in ("pyg", "dgl") if installed(name)), None)
    if framework is None:
        pytest.skip("needs a framework")
    file, threads = tmp_path / "steps.json", torch.get_num_threads()
    command = ["bench", "--suite", "molecules", "--graph", "molecules-1", "--new-graphs", "sage-max", "--device", "cpu"]
    peers = ["--peers", framework, f"edgeless-{framework}"]
    try:
        assert main([*command, *peers, "--rounds", "1", "--json", str(file)]) == 0
        assert torch.get_num_threads() == 1  # as the suite says
    finally:
        torch.set_num_threads(threads)
    assert "new in every step; 3 layers of sage-max, 64 -> 4 x 16" in capsys.readouterr().out
    rows = json.loads(file.read_text())["results"]
    assert [(row["peer"], row["mode"]) for row in rows] == [
        (peer, mode) for mode in ("forward", "forward_backward") for peer in peers[1:]
    ]
    for row in rows:
        assert row["failed"] is None
        assert row["median_ms"] > 0
        assert row["threads"] == 1
