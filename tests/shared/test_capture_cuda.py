"""edgeless.capture on a GPU: replays of CUDA graphs against eager calls, bit by bit."""

import copy
import importlib
import threading

import pytest
import torch
from torch.nn import functional as F

import edgeless
from edgeless import Graph

pytestmark = pytest.mark.cuda


def ends_of(num_nodes=200, count=900, seed=0):
    return torch.randint(num_nodes, (2, count), generator=torch.Generator().manual_seed(seed)).cuda()


def features(seed=1, num_nodes=200):
    return torch.randn(num_nodes, 16, generator=torch.Generator().manual_seed(seed)).cuda()


def layer_of(name, channels=16, **options):
    pytest.importorskip("torch_geometric")
    nn = importlib.import_module("edgeless.pyg.nn")
    torch.manual_seed(0)
    return getattr(nn, name)(channels, 8, **options).cuda()


class TwoLayers(torch.nn.Module):
    def __init__(self, name, dropout=0.0, **options):
        super().__init__()
        width = 8 * options.get("heads", 1)
        self.first, self.second = layer_of(name, 16, **options), layer_of(name, width)
        self.norm = torch.nn.BatchNorm1d(width).cuda()
        self.dropout = dropout

    def forward(self, x, edge_index):
        x = F.relu(self.norm(self.first(x, edge_index)), inplace=True)
        return self.second(F.dropout(x, self.dropout, self.training), edge_index)


def train(model, edge_index, steps=10, autocast=None):
    """Outputs and losses of every step; features that change from step to step."""
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", autocast or torch.bfloat16, autocast is not None):
            out = model(features(step), edge_index)
        loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        found += [out.detach(), loss.detach()]
    return found


def assert_equal(a, b):
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), i


LAYERS = [("GATv2Conv", {"heads": 4}), ("GATConv", {"heads": 4}), ("TransformerConv", {"heads": 4}), ("GCNConv", {})]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("make", [layer_of, TwoLayers])
@pytest.mark.parametrize("name,options", LAYERS)
def test_training_is_bitwise_that_of_eager(name, options, make, autocast):
    edge_index, model = ends_of(), make(name, **options)
    train(copy.deepcopy(model), edge_index, 2, autocast)  # what a graph learns in its first uses
    twin = copy.deepcopy(model)
    expected = train(twin, edge_index, autocast=autocast)
    handle = edgeless.capture(model).captured
    found = train(model, edge_index, autocast=autocast)
    assert handle.num_captured == 1 and handle.num_replays == 7, handle.report()
    assert_equal(found, expected)
    assert_equal(list(model.state_dict().values()), list(twin.state_dict().values()))
    handle.release()
    model.eval(), twin.eval()
    assert torch.equal(model(features(), edge_index), twin(features(), edge_index))


def test_other_calls_of_one_model():
    model, edges = layer_of("GATv2Conv", heads=2), [ends_of(), ends_of(seed=1)]
    twin, handle = copy.deepcopy(model), edgeless.capture(model, warmup=1, most=12).captured
    x = features()
    for _ in range(4):
        for edge_index in edges:
            for training in (True, False):
                model.train(training), twin.train(training)
                assert torch.equal(model(x, edge_index), twin(x, edge_index))
                with torch.no_grad():
                    assert torch.equal(model(x, edge_index), twin(x, edge_index))
                found, expected = (m(x, edge_index, return_attention_weights=True) for m in (model, twin))
                assert_equal([found[0], *found[1]], [expected[0], *expected[1]])
    assert handle.num_captured == 12 and handle.num_replays > 20, handle.report()


def test_attention_weights_that_no_loss_uses():
    model, edge_index = layer_of("GATv2Conv", heads=2), ends_of()
    twin, handle, results = copy.deepcopy(model), edgeless.capture(model, warmup=1).captured, []
    for m in (twin, model):
        for used in range(4):
            m.zero_grad()
            out, (_, alpha) = m(features(used), edge_index, return_attention_weights=True)
            (out.sum() if used % 2 else alpha.square().sum() + out.square().sum()).backward()
            results.append([None if p.grad is None else p.grad.clone() for p in m.parameters()])
            del out, alpha
    for expected, found in zip(results[:4], results[4:], strict=True):
        for a, b in zip(expected, found, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert handle.num_replays == 3, handle.report()


def test_a_graph_that_was_written_to_is_another():
    model, edge_index = layer_of("GCNConv"), ends_of()
    twin, handle = copy.deepcopy(model), edgeless.capture(model, warmup=1).captured
    for _ in range(3):
        model(features(), edge_index)
    assert handle.num_replays == 2, handle.report()
    edge_index[0, :400] = 7
    for step in range(4):
        x = features(step)
        assert torch.equal(model(x, edge_index), twin(x, edge_index.clone()))
    assert handle.num_captured == 1 and handle.num_replays == 5, handle.report()  # the stale one is gone


def test_a_model_that_changes_is_captured_anew():
    model, edge_index = layer_of("GATv2Conv"), ends_of()
    handle, x = edgeless.capture(model, warmup=1).captured, features()
    changes = (
        lambda m: None,
        lambda m: setattr(m, "negative_slope", 0.5),
        lambda m: setattr(m.bias, "data", torch.ones_like(m.bias)),
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
        lambda m: m.lin_l.weight.requires_grad_(False),
        lambda m: m.double().float(),
    )
    for change in changes:
        change(model)
        for _ in range(3):
            assert torch.equal(model(x, edge_index), type(model).forward(model, x, edge_index))
    assert handle.num_replays >= 2 * len(changes), handle.report()


def test_a_cleared_cache_leaves_what_a_replay_reads():
    model, edge_index = layer_of("GATv2Conv"), ends_of()
    twin = copy.deepcopy(model)
    handle = edgeless.capture(model, warmup=1).captured
    with torch.no_grad():
        for _ in range(3):
            expected = model(features(), edge_index)
        edgeless.clear_cache()
        torch.cuda.empty_cache()
        torch.full((1 << 22,), -1, device="cuda")  # what was freed is written to
        assert torch.equal(model(features(), edge_index), expected)
    assert_equal(*(train(m, edge_index, 6) for m in (model, twin)))
    assert handle.num_replays >= 6, handle.report()


def test_dropout_draws_anew_and_not_in_eval():
    edge_index, x = ends_of(), features()
    model = TwoLayers("GATv2Conv", dropout=0.5)
    model.first.dropout = 0.5
    handle = edgeless.capture(model, warmup=1).captured
    outs = [model(x, edge_index).detach() for _ in range(4)]
    assert handle.num_replays == 3, handle.report()
    assert all(not torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])
    repeated = []
    for _ in range(2):
        torch.manual_seed(3)
        repeated.append(model(x, edge_index).detach())
    assert torch.equal(*repeated)  # replays follow the generator of the user
    model.eval()
    first, *others = (model(x, edge_index).detach() for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


def test_a_model_that_waits_harms_no_other_capture():
    model, edge_index, x = layer_of("GATv2Conv", dropout=0.5), ends_of(), features()
    handle, waits = edgeless.capture(model, warmup=1).captured, Waits()
    for _ in range(3):
        model(x, edge_index)
    failed = edgeless.capture(waits, warmup=1).captured
    for _ in range(3):
        waits(x)
    assert "the model waits for the GPU" in failed.report()
    assert torch.cuda.get_sync_debug_mode() == 0
    replays = handle.num_replays
    a, b = (model(x, edge_index).detach() for _ in range(2))
    assert handle.num_replays == replays + 2 and not torch.equal(a, b)
    assert not torch.equal(F.dropout(x), F.dropout(x))


def test_what_a_user_holds_does_not_change_and_gradients_accumulate():
    model, edge_index = layer_of("GATv2Conv", heads=2), ends_of()
    twin, handle = copy.deepcopy(model), edgeless.capture(model, warmup=1).captured
    held = []
    for layer in (twin, model):
        layer.zero_grad()
        mine = []
        for step in range(5):  # without zero_grad
            x = features(step).requires_grad_()
            out = layer(x, edge_index)
            out.square().sum().backward()
            mine += [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        held.append(mine)
    assert handle.num_replays == 4, handle.report()
    assert_equal(*held)


@pytest.mark.parametrize("name,options", LAYERS)
def test_retained_backward_passes(name, options):
    """The backward of attention may write over what the forward saved; that of a replay may come again."""
    model, edge_index = layer_of(name, **options), ends_of()
    twin, handle = copy.deepcopy(model), edgeless.capture(model, warmup=1).captured
    train(model, edge_index, 3), train(twin, edge_index, 3)
    for layer in (model, twin):
        layer.zero_grad()
        out = layer(features(), edge_index).square().sum()
        out.backward(retain_graph=True)
        layer(features(5), edge_index).sum().backward()
        out.backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert "the backward of the call before is still to come" in handle.report()


def test_two_forwards_before_a_backward():
    model, edge_index = layer_of("GATv2Conv"), ends_of()
    twin, handle = copy.deepcopy(model), edgeless.capture(model, warmup=1).captured
    train(model, edge_index, 3), train(twin, edge_index, 3)
    results = []
    for layer in (model, twin):
        first, second = layer(features(1), edge_index), layer(features(2), edge_index)
        results.append(torch.autograd.grad((first * second).sum(), list(layer.parameters())))
    assert_equal(*results)
    assert "the backward of the call before is still to come" in handle.report()
    del first, second
    out = model(features(), edge_index)
    replays = handle.num_replays
    del out  # its backward will not come
    model(features(), edge_index).sum().backward()
    assert handle.num_replays == replays + 1


def test_parameters_written_to_before_a_backward_and_second_derivatives_are_errors():
    model, edge_index = layer_of("GATv2Conv"), ends_of()
    edgeless.capture(model, warmup=1)
    train(model, edge_index, 3)
    out = model(features(), edge_index)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="a parameter was modified in place"):
        out.sum().backward()
    del out
    out = model(features(), edge_index)  # a replay; what runs as it is may be differentiated twice
    with pytest.raises(RuntimeError):
        (grad,) = torch.autograd.grad(out.square().sum(), list(model.parameters())[:1], create_graph=True)
        grad.sum().backward()


def test_graphs_in_buffers():
    pytest.importorskip("torch_geometric")
    nn = importlib.import_module("edgeless.pyg.nn")

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.GCNConv(16, 8)
            self.register_buffer("edge_index", ends_of().cpu())

        def forward(self, x):
            return self.conv(x, self.edge_index)

    model = Own().cuda()
    handle = edgeless.capture(model, warmup=1).captured
    for _ in range(2):
        for step in range(3):
            x = features(step)
            assert torch.equal(model(x), type(model).forward(model, x))
        model.edge_index[0, :400] = 7
    assert handle.num_replays >= 4, handle.report()


def test_threads_and_streams_share_no_memory():
    model, edge_index, wrong = layer_of("GATv2Conv"), ends_of(), []
    twin, handle = copy.deepcopy(model), edgeless.capture(model, warmup=1).captured
    given = [features(seed) for seed in range(16)]
    with torch.no_grad():
        expected = [twin(x, edge_index) for x in given]

    def work(which):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                for x, want in list(zip(given, expected, strict=True))[which::2]:
                    if not torch.equal(model(x, edge_index), want):
                        wrong.append(which)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and handle.num_replays > 100, handle.report()


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 8).cuda()

    def forward(self, graph, x):
        return edgeless.functional.spmm(graph, self.linear(x), norm="both")


def test_graph_handles():
    graph, model = Graph.from_edge_index(ends_of(), 200, 200), Own()
    twin, handle = copy.deepcopy(model), edgeless.capture(model, warmup=1).captured
    for step in range(4):
        assert torch.equal(*(m(graph, features(step)).detach() for m in (model, twin)))
    assert handle.num_replays == 3, handle.report()


def test_dgl_graphs():
    dgl = pytest.importorskip("dgl")
    pytest.importorskip("dgl")
    nn = importlib.import_module("edgeless.dgl.nn")
    own = dgl.graph(tuple(ends_of()), num_nodes=200)
    model = nn.GATv2Conv(16, 8, 2, allow_zero_in_degree=True).cuda()
    twin, handle = copy.deepcopy(model), edgeless.capture(model, warmup=1).captured
    for step in range(6):
        assert torch.equal(model(own, features(step)), twin(own, features(step)))
    assert handle.num_replays >= 3, handle.report()
    own.add_edges(torch.tensor([3]).cuda(), torch.tensor([5]).cuda())
    for step in range(3):
        assert torch.equal(model(own, features(step)), twin(own, features(step)))


class Waits(torch.nn.Module):
    def forward(self, x):
        return x * float(x.sum())


class Words(torch.nn.Module):
    def forward(self, x):
        return x + 1, "words"


def test_what_cannot_be_captured_runs_as_it_is():
    for model, why in ((Words(), "an output is no plain tensor on a GPU"), (Waits(), "the model waits for the GPU")):
        handle, plain = edgeless.capture(model, warmup=1).captured, type(model)()
        for step in range(4):
            found, expected = model(features(step)), plain(features(step))
            assert torch.equal(*(out[0] if isinstance(out, tuple) else out for out in (found, expected)))
        assert why in handle.report() and handle.num_replays == 0
    model = layer_of("GCNConv")
    handle = edgeless.capture(model, warmup=1).captured
    assert len(train(model, ends_of(), 4)) == 8 and handle.num_replays == 3  # the GPU is well


def test_within_the_capture_of_a_user():
    model, edge_index, x = layer_of("GATv2Conv"), ends_of(), features()
    handle = edgeless.capture(model, warmup=1).captured
    with torch.no_grad():
        expected = [model(x, edge_index) for _ in range(3)][-1]
        replays, graph = handle.num_replays, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x, edge_index)
        graph.replay()
    assert torch.equal(out, expected)
    assert handle.num_replays == replays and "another capture is going on" in handle.report()


def test_sampled_graphs_are_given_up():
    model = layer_of("GATv2Conv")
    twin, handle = copy.deepcopy(model), edgeless.capture(model, warmup=1).captured
    for step in range(40):
        edge_index = ends_of(seed=step)
        assert torch.equal(model(features(), edge_index), twin(features(), edge_index))
    assert handle.num_captured == 0 and "gave up" in handle.report()
