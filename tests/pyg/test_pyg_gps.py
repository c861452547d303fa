"""GPSConv against the stock layer, on padded batches and elsewhere, and what captured steps of padded batches ask."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import step_cases
import torch_geometric.nn as stock
from step_cases import taped_step
from test_pyg_loader import GRAPHS, bench_step, close
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.data import Batch
from torch_geometric.utils import to_dense_batch

import edgeless
import edgeless.pyg.nn as ours
from edgeless import padding
from edgeless.capture import watching
from edgeless.capture.model_recording import Watch
from edgeless.layers import calls
from edgeless.padding import convert_batchnorm, real_rows
from edgeless.padding.dense_rows import DenseRows
from edgeless.pyg.loader import PaddedLoader
from edgeless.tools.bench.training import molecules as bench_molecules

OPTIONS = {
    "batch norm": {},
    "no norm": {"norm": None},
    "graph norm": {"norm": "graph_norm"},
    "layer norm": {"norm": "layer_norm", "norm_kwargs": {"mode": "graph"}},
    "two heads and gelu": {"heads": 2, "act": "gelu"},
}


def layer_of(package, conv=True, **options):
    inner = package.GINEConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), edge_dim=4) if conv else None
    return package.GPSConv(8, inner, **options).double()


def called(layer, batch):
    more = {} if layer.conv is None else {"edge_attr": batch.edge_attr}
    return layer(batch.x, batch.edge_index, batch.batch, **more)


def waiting_calls(run):
    """The ops of a call that wait for a GPU, if the call were on one."""
    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.__name__.partition(".")[0]
            masks = name in ("index", "index_put", "index_put_") and any(
                isinstance(t, torch.Tensor) and t.dtype is torch.bool for t in tree_leaves(args[1])
            )
            if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"):
                found.append(name)
            return func(*args, **(kwargs or {}))

    with Watch():
        result = run()
    return result, found


# Dense rows ----------------------------------------------------------------------------------------------------------


def test_dense_rows_are_those_of_to_dense_batch():
    counts = torch.tensor([3, 0, 1, 5, 0])
    batch, x = torch.arange(5).repeat_interleave(counts), torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    rows = DenseRows(batch, torch.cat((counts.new_zeros(1), counts.cumsum(0))), 6)
    dense, mask = to_dense_batch(x, batch, max_num_nodes=6, batch_size=5)
    assert torch.equal(rows.to_dense(x), dense) and torch.equal(rows.from_dense(dense), x)
    assert torch.equal(~rows.padded, mask | (torch.arange(6) == 0))
    assert torch.autograd.gradcheck(rows.to_dense, x) and torch.autograd.gradgradcheck(rows.to_dense, x)
    wide = dense.detach().requires_grad_()
    assert torch.autograd.gradcheck(rows.from_dense, wide) and torch.autograd.gradgradcheck(rows.from_dense, wide)


# The layer -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["of the CPU", "of a GPU"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("conv", [True, False], ids=["with a layer", "without"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_real_rows_are_those_of_the_stock_layer(options, conv, training, device, monkeypatch):
    if device == "of a GPU":
        monkeypatch.setattr(padding, "_most_nodes", lambda ptr, at_most: at_most + 3)
        monkeypatch.setattr(padding.BatchNorm1d, "_of_rows", padding.BatchNorm1d._of_mask)
    torch.manual_seed(0)
    theirs = layer_of(stock, conv, **options).train(training)
    mine = convert_batchnorm(copy.deepcopy(theirs))
    edgeless.accelerate(mine)
    assert type(mine) is ours.GPSConv and list(mine.state_dict()) == list(theirs.state_dict())
    for start, batch in zip((0, 16, 32, 48), PaddedLoader(GRAPHS, 16), strict=True):  # the last has missing graphs
        plain = Batch.from_data_list(GRAPHS[start : start + 16])
        plain.x.requires_grad_(), batch.x.requires_grad_()
        mine.zero_grad(), theirs.zero_grad()
        expected = called(theirs, plain)
        expected.pow(3).sum().backward()
        with real_rows(batch):
            found = called(mine, batch)
        found[batch.node_mask].pow(3).sum().backward()
        assert close(found[batch.node_mask], expected) and found.isfinite().all()
        assert close(batch.x.grad[batch.node_mask], plain.x.grad)
        for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            if other.grad is None:  # of norm1, without an inner layer
                assert one.grad is None
                continue
            assert float((one.grad - other.grad).norm()) <= 1e-10 * float(other.grad.norm()) + 1e-11, name
    for one, other in zip(mine.buffers(), theirs.buffers(), strict=True):
        assert close(one.double(), other.double())
    with torch.no_grad(), real_rows(batch):
        _, found = waiting_calls(lambda: called(mine.eval(), batch))
    assert device == "of the CPU" or found == []


def test_numbers_of_padding_do_not_reach_real_rows():
    torch.manual_seed(0)
    layer = layer_of(ours, False, norm=None)
    batch = next(iter(PaddedLoader(GRAPHS, 16)))
    with real_rows(batch):
        before = called(layer, batch)
        batch.x[~batch.node_mask] = 1e6
        after = called(layer, batch)
    assert torch.equal(before[batch.node_mask], after[batch.node_mask])


def test_elsewhere_the_forward_is_upstreams():
    torch.manual_seed(0)
    batch = next(iter(PaddedLoader(GRAPHS, 16)))
    theirs = layer_of(stock)
    mine = layer_of(ours)
    mine.load_state_dict(theirs.state_dict())
    expected = called(theirs, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.GPSConv, "_of_known_sizes", None)
        assert close(called(mine, batch), expected)
        other = copy.copy(batch)
        other.batch = batch.batch.clone()
        with real_rows(batch):  # of another tensor nothing is known
            assert close(called(mine, other), expected)
        with real_rows(batch), edgeless.backend("reference"):
            assert close(called(mine, batch), expected)
        with real_rows(nodes=batch.node_mask):
            assert close(called(mine, batch), expected)
        torch.manual_seed(0)
        performer = layer_of(ours, attn_type="performer")
        with real_rows(batch):
            called(performer, batch)
        plain = Batch.from_data_list(GRAPHS[:3])
        assert close(called(mine, plain), called(theirs, plain))
        alone = GRAPHS[0]
        assert close(
            mine(alone.x, alone.edge_index, None, edge_attr=alone.edge_attr),
            mine(alone.x, alone.edge_index, torch.zeros(alone.num_nodes, dtype=torch.int64), edge_attr=alone.edge_attr),
        )


def test_dropout_draws_for_the_same_calls():
    """Of the rows [N, F] there are the stock layer's draws; those of attention have the shape of the dense batch."""
    batch = next(iter(PaddedLoader(GRAPHS, 16)))
    torch.manual_seed(0)
    theirs = layer_of(stock, dropout=0.5)
    mine = layer_of(ours, dropout=0.5)
    mine.load_state_dict(theirs.state_dict())
    torch.manual_seed(1)
    expected = called(theirs, batch)
    torch.manual_seed(1)
    with real_rows(batch):
        assert close(called(mine, batch), expected)


def test_accelerate_and_explain():
    model = nn.ModuleList([layer_of(stock), layer_of(stock, False)])
    report = edgeless.accelerate(model)
    assert [new for _, _, new in report.swapped] == [ours.GPSConv, ours.GINEConv, ours.GPSConv] and not report.kept
    again = edgeless.accelerate(model)
    assert not again.swapped and not again.kept
    assert repr(model[0]).startswith("edgeless.GPSConv(8") and "edgeless.GINEConv" in repr(model[0])


# Captured steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gine", "gatv2", "pna", "gps"])
def test_steps_on_padded_batches_are_captured_and_ask_nothing(name, monkeypatch):
    """The bench's models, on tapes in the place of CUDA graphs; norms compute as on a GPU. Layers run by kernels or as
    PyG's: the interpreter of programs reads the graph's numbers on the CPU.
    """
    monkeypatch.setenv("EDGELESS_GENERATE", "auto")
    monkeypatch.setattr(padding.BatchNorm1d, "_of_rows", padding.BatchNorm1d._of_mask)
    monkeypatch.setattr(padding, "_most_nodes", lambda ptr, at_most: at_most)
    graphs = bench_molecules("zinc", 200)
    loader = PaddedLoader(graphs, 16, shuffle=True, drop_last=True, waste=0.5, device="cpu")
    torch.manual_seed(0)
    batches = list(loader)
    assert len({batch.num_nodes for batch in batches}) == len({batch.num_graphs for batch in batches}) == 1
    runs = []
    for captures in (False, True):
        net, optimizer, step = bench_step(name)
        handle = taped_step(step, net, optimizer) if captures else step
        runs.append((torch.stack([handle(batch) for batch in batches]), net, handle))
    (losses, net, step), (again, other, handle) = runs
    assert torch.equal(losses, again) and step_cases.same(list(net.parameters()), list(other.parameters()))
    assert handle.num_captured == 1 and handle.num_replays >= len(batches) - 4, handle.report()
    assert waiting_calls(lambda: step(batches[0]))[1] == []


def test_generated_layers_run_as_ever_while_a_capture_watches(monkeypatch):
    """Else another code than the recorded one would be watched."""
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    layer, graph = ours.GINEConv(nn.Sequential(nn.Linear(8, 8)).double(), edge_dim=4).double(), GRAPHS[0]
    arguments = graph.x, graph.edge_index, graph.edge_attr
    layer(*arguments)  # the program is made
    for mode, how in ((Watch("cpu", set()), "generated"), (FlopCounterMode(display=False), "stock")):
        edgeless.report(reset=True)
        with mode:
            layer(*arguments)
        found = edgeless.report(reset=True).layers["edgeless.pyg.nn.GINEConv"]
        assert bool(found.generated) == (how == "generated") and bool(found.stock) == (how == "stock")


def test_kernels_without_an_op_report_what_they_read():
    read, made = torch.ones(2), []
    with Watch("cpu", set()) as watch:
        made.append(read + 1)
        watching.reads([read, *made])
    assert [t.data_ptr() for t in watch.read.values()] == [read.data_ptr()]


def test_warnings_of_edgeless_are_no_effects_of_a_step(monkeypatch, caplog):
    """A layer that falls back for the first time while its step is watched says so, with the time."""
    monkeypatch.setattr(calls, "_warned", {})
    layer = ours.GINEConv(nn.Sequential(nn.Linear(8, 8)).double(), edge_dim=4).double()
    graph, count = GRAPHS[0], iter(range(100))

    def step(x):
        if next(count):
            calls.ran_stock(ours.GINEConv, layer, ("a new reason",))
        return x + 1

    handle = taped_step(step)
    for _ in range(4):
        handle(graph.x.clone())
    assert handle.num_captured == 1, handle.report()
    assert "a new reason" in caplog.text
