"""A comparison is worth nothing unless all peers compute the same thing."""

import contextlib
import gc
import json

import pytest
import torch

from edgeless.__main__ import main
from edgeless.tools import timing
from edgeless.tools.bench import graphs, measure, memory
from edgeless.tools.bench.options import DROPPING
from edgeless.tools.bench.peers import LAYER_PEERS, SPARSE_PEERS, Refused, build, has_torch_sparse, known
from edgeless.tools.bench.work import Case, Work, op_case
from edgeless.tools.cli.devices import UsageError, installed
from edgeless.tools.cli.layers import GENERATED, LAYERS
from edgeless.tools.cli.memory import Peak

TOY = graphs.load("toy", None, torch.device("cpu"))


def norm_error(a, b):
    """Relative, but for the gradient of a key's bias, which is zero up to rounding: softmax does not see a shift."""
    return ((a.double() - b.double()).norm() / max(b.double().norm(), 0.1)).item()


def computed(case, peer, graph=TOY):
    """Output and gradients of one peer, under the gradient 1, 2, 3, ... of the output."""
    work = build(case, peer, graph)
    out = torch.cat(work.outputs())
    weight = torch.arange(1, out.numel() + 1, dtype=out.dtype).reshape(out.shape) / out.numel()
    grads = torch.autograd.grad((out * weight).sum(), work.inputs, allow_unused=True)
    return [out, *grads]


@pytest.mark.parametrize(
    "op", ["gatv2_H2_D8", "gat_H2_D8", "gt_H2_D8", "spmm_none_F8", "spmm_both_F8", "min_F8", "max_F8"]
)
@pytest.mark.parametrize("peer", ["edgeless", "dgl", "torch-csr"])
def test_aggregation_peers_agree(op, peer):
    if peer == "dgl" and not installed("dgl"):
        pytest.skip("needs DGL")
    case = op_case(op, "fp64")
    if peer not in known(case):
        pytest.skip(f"{peer} has no {op}")
    for mine, plain in zip(computed(case, peer), computed(case, "plain"), strict=True):
        assert norm_error(mine, plain) < 1e-10


@pytest.mark.parametrize("op", ["gatv2_H2_D8", "gat_H2_D8", "gt_H2_D8"])
@pytest.mark.parametrize("peer", ["edgeless", "plain", "dgl"])
def test_every_peer_drops_attention(op, peer):
    if peer == "dgl" and not installed("dgl"):
        pytest.skip("needs DGL")
    nothing, half, all_ = (build(op_case(op, "fp64", dropout), peer, TOY).outputs()[0] for dropout in (1.0, 0.5, 0.0))
    assert not nothing.any() and half.any() and not torch.equal(half, all_)


@pytest.mark.parametrize("layer", DROPPING)
@pytest.mark.parametrize("peer", ["pyg", "edgeless-pyg", "dgl", "edgeless-dgl"])
def test_every_layer_drops_attention(layer, peer):
    if not installed(peer.removeprefix("edgeless-")):
        pytest.skip(f"needs {peer}")
    if peer not in known(Case("layer", layer, "fp64")):
        pytest.skip(f"{peer} has no {layer}")
    graph = TOY if LAYERS[layer].types is None else graphs.load("aifb", None, torch.device("cpu"))
    half, all_ = (
        build(Case("layer", layer, "fp32", features=4, heads=1, channels=4, dropout=p), peer, graph).outputs()[0]
        for p in (0.5, 0.0)
    )
    assert not torch.equal(half, all_)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_layers_agree_with_the_stock_ones(layer, framework):
    if not installed(framework):
        pytest.skip(f"needs {framework}")
    if getattr(LAYERS[layer], framework) is None:
        pytest.skip(f"{framework} has no such layer")
    case = Case("layer", layer, "fp64", features=16, heads=2, channels=8)
    for mine, stock in zip(computed(case, f"edgeless-{framework}"), computed(case, framework), strict=True):
        assert (mine is None) == (stock is None)
        if mine is not None:
            assert norm_error(mine, stock) < 1e-10


@pytest.mark.parametrize("layer", GENERATED)
def test_generated_layers_agree_with_the_stock_ones(layer, monkeypatch):
    if not installed("pyg"):
        pytest.skip("needs pyg")
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    case = Case("layer", layer, "fp64", features=8, heads=1, channels=8)
    mine, stock = (computed(case, peer) for peer in ("edgeless-pyg", "pyg"))
    edges = 10_000 in {len(grad) for grad in mine[1:] if grad is not None}
    assert edges == (GENERATED[layer].edge_features is not None)  # their features have gradients too
    for a, b in zip(mine, stock, strict=True):
        assert norm_error(a, b) < 1e-10
    monkeypatch.setenv("EDGELESS_GENERATE", "off")
    with pytest.raises(Refused, match="because EDGELESS_GENERATE is off"):  # never a stock layer's time
        build(case, "edgeless-pyg", TOY)


def test_generated_layers_have_inputs_of_16_bits_and_no_heads(monkeypatch):
    if not installed("pyg"):
        pytest.skip("needs pyg")
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    work = build(Case("layer", "gine-16", "bf16", features=8, heads=1, channels=8), "edgeless-pyg", TOY)
    assert [t.dtype for t in work.inputs[:2]] == [torch.bfloat16] * 2
    assert {t.dtype for t in work.inputs[2:]} == {torch.float32}
    work.forward_backward()


@pytest.mark.parametrize("layer", [name for name, layer in LAYERS.items() if layer.multiplies])
@pytest.mark.parametrize("peer", SPARSE_PEERS)
def test_sparse_peers_compute_what_the_stock_layers_do(layer, peer):
    if not installed("pyg"):
        pytest.skip("needs pyg")
    if peer == "pyg-sparsetensor" and not has_torch_sparse():
        pytest.skip("needs torch_sparse")
    case = Case("layer", layer, "fp64", features=16, heads=2, channels=8)
    src, dst = TOY.edge_index
    loopless = TOY._replace(edge_index=TOY.edge_index[:, src != dst])  # GCNConv weighs a matrix' loops twice
    for mine, stock in zip(computed(case, peer, loopless), computed(case, "pyg", loopless), strict=True):
        assert norm_error(mine, stock) < 1e-10


def test_only_layers_that_multiply_have_sparse_peers():
    assert set(SPARSE_PEERS) <= set(known(Case("layer", "graphconv", "fp32")))
    assert not set(SPARSE_PEERS) & set(known(Case("layer", "gatv2", "fp32")))


def test_autocast_is_on_for_16_bit_layers():
    if not installed("pyg"):
        pytest.skip("needs pyg")
    work = build(Case("layer", "transformer", "bf16", features=16, heads=2, channels=8), "pyg", TOY)
    seen = []
    compute = work.compute
    work.compute = lambda: (seen.append(torch.is_autocast_enabled("cpu")), compute())[1]
    work.forward_backward()
    assert seen == [True]


def test_every_layer_peer_names_a_framework_and_a_way_to_run():
    assert {framework for framework, _, _ in LAYER_PEERS.values()} == {"pyg", "dgl"}
    assert {how for _, _, how in LAYER_PEERS.values()} == {"eager", "compiled", "graphed", "captured"}


def test_a_captured_peer_that_does_not_replay_is_not_timed():
    if not installed("pyg"):
        pytest.skip("needs pyg")
    work = build(Case("layer", "gatv2", "fp32", features=16, heads=2, channels=8), "edgeless-pyg-captured", TOY)
    with pytest.raises(UsageError, match="(?s)--peers edgeless-pyg-captured: .*a tensor is not on the current GPU"):
        work.forward_backward()


@pytest.mark.parametrize("name", ["rgcn", "rgat", "hgt"])
def test_layers_agree_on_a_twin_with_types_of_nodes(name):
    if not installed("pyg"):
        pytest.skip("needs pyg")
    graph = graphs.load("aifb", None, torch.device("cpu"))
    case = Case("layer", name, "fp64", features=4, heads=1, channels=4)
    for mine, stock in zip(computed(case, "edgeless-pyg", graph), computed(case, "pyg", graph), strict=True):
        assert (mine is None) == (stock is None)
        if mine is not None:
            assert norm_error(mine, stock) < 1e-10


@pytest.mark.parametrize(("graph", "share"), [("aifb", 0.60), ("mutag", 0.61)])
def test_twins_repeat_sources_and_relations_as_the_graphs_do(graph, share):
    twin = graphs.load(graph, None, torch.device("cpu"))
    pairs = torch.unique(twin.relations.edge_type * twin.num_nodes + twin.edge_index[0])
    assert len(pairs) / twin.num_edges == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("peaks", [[], ["--no-memory"]])
def test_a_layer_that_takes_too_long_or_too_much_is_left_out_and_the_reason_told(
    peaks, monkeypatch, capsys, tmp_path, short_turns
):
    if not installed("pyg"):
        pytest.skip("needs pyg")
    monkeypatch.setattr(measure, "available_memory", lambda: 10_000)
    file = tmp_path / "bench.json"
    options = ["--layer", "rgat", "--graph", "toy", "--peers", "pyg", "edgeless-pyg", "--device", "cpu"]
    assert main(["bench", *options, *peaks, "--rounds", "1", "--limit", "0.2", "--json", str(file)]) == 0
    reasons = {row["peer"]: row["failed"] for row in json.loads(file.read_text())["results"]}
    assert reasons["pyg"].startswith("left out: needs about ")
    assert reasons["edgeless-pyg"] == "left out: ran longer than 0.2 s"


def test_a_run_that_takes_long_is_not_repeated_for_warm_caches(monkeypatch):
    monkeypatch.setattr(timing, "LONG_SECONDS", 0.0)
    runs = []
    found = timing.Timer(torch.device("cpu"), rounds=3, runs=1, warmup=5).compare({"peer": lambda: runs.append(1)})
    assert len(runs) == 1 + 3
    assert len(found["peer"].runs) == 3


@pytest.mark.parametrize("replayed", [(), ("forward",), ("forward", "forward_backward")])
def test_a_replayed_mode_has_no_peak(replayed, monkeypatch):
    """Its memory was taken when it was captured: one that took none at all would seem to be the leanest."""
    monkeypatch.setattr(Work, "is_replayed", lambda _, mode: mode in replayed)
    # Of the first call, the forward, and the forward and backward; 10 bytes are kept after the first call.
    peaks = iter([Peak(1000, 50), Peak(1010, 7), Peak(1010, 9)])
    monkeypatch.setattr(memory, "peak_memory", lambda device: contextlib.nullcontext(next(peaks)))
    found = memory.measure(op_case("spmm_none_F64", "fp32"), "edgeless", TOY)
    measured = {"forward": 7 + 10, "forward_backward": 9 + 10}
    modes = {mode: None if mode in replayed else of for mode, of in measured.items()}
    assert found == {**modes, "kept": 10, "first_call": 50}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["rowsplit", "cusparse"])
def test_short_runs_on_an_engine_are_replayed(engine, dtype):
    work = build(op_case("spmm_none_F64", dtype), f"edgeless-{engine}", graphs.load("toy", None, torch.device("cuda")))
    left_behind = [work.outputs()]  # on the default stream, for which autograd would wait within the capture
    left_behind.append(left_behind)
    gc.disable()
    try:
        del left_behind
        for mode in ("forward", "forward_backward"):
            work.mode(mode)()
    finally:
        gc.enable()
    can_be_captured = (engine, dtype) != ("cusparse", "fp32")
    assert work.is_replayed("forward") is work.is_replayed("forward_backward") is can_be_captured
