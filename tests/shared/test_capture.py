"""edgeless.capture: what makes calls equal, and that replays give what the model gives.

On the CPU, with tapes in the place of CUDA graphs; test_capture_cuda.py has the same on a GPU, and
test_capture_refusals.py what is not captured.
"""

import copy
import gc
import importlib
import pickle
import weakref

import pytest
import torch
from tape import ENDS, Layer, X, captured, eager, taped
from torch import nn

import edgeless
from edgeless.capture.keys import flatten, unflatten


def test_equal_calls_are_captured_after_the_warm_up():
    model, results = Layer(), []
    expected = model(X, ENDS)
    handle = taped(model, warmup=2)
    for kept in (0, 0, 1, 1, 1):
        results.append(model(X.clone(), ENDS).detach())
        assert handle.num_captured == kept
    assert all(torch.equal(result, expected) for result in results)
    assert handle.num_replays == 3 and handle.report() == "1 captured, 3 replayed"
    assert isinstance(model, Layer) and list(model.state_dict()) == ["shift", "linear.weight", "linear.bias"]
    handle.release()
    assert "forward" not in model.__dict__ and handle.num_captured == 0
    assert torch.equal(model(X, ENDS), expected)


@pytest.mark.parametrize("module, name", [("_extension", "provided"), ("graph.max_degrees", "arrived")])
@pytest.mark.parametrize("changes, runs", [(0, 3), (2, 3), (3, 4), (5, 6), (1000, 11)])
def test_the_warm_up_goes_on_until_a_run_launches_what_the_run_before_did(monkeypatch, module, name, changes, runs):
    """A kernel cannot be loaded in a recording, and what is known of a graph decides which kernels run."""
    counter = importlib.import_module(f"edgeless.{module}")
    monkeypatch.setattr(counter, name, 0)
    calls = []

    class Loads(nn.Module):
        def forward(self, x):
            calls.append(1)
            if 1 < len(calls) <= 1 + changes:  # the first is the user's own
                setattr(counter, name, getattr(counter, name) + 1)
            return x * 2

    model = Loads()
    handle = taped(model)
    model(X)
    assert torch.equal(model(X), X * 2)
    assert handle.num_captured == 1 and len(calls) == 1 + runs + 1


def test_training_is_bitwise_that_of_eager():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    twin, handle = copy.deepcopy(model), taped(model, warmup=3)
    found = []
    for m in (model, twin):
        optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
        for step in range(10):
            optimizer.zero_grad()
            out = m(X * (step + 1))
            out.square().sum().backward()
            optimizer.step()
        found.append([out, *m.state_dict().values()])
    assert handle.num_replays == 7, handle.report()
    assert all(map(torch.equal, *found))


def set_data(tensor, data):
    tensor.data = data


CHANGES = {
    "an attribute": lambda m: setattr(m, "scale", 3.0),
    "an attribute of a module within": lambda m: setattr(m.dropout, "p", 0.1),
    "training of a module within": lambda m: m.dropout.eval(),
    "a module": lambda m: setattr(m, "linear", nn.Linear(4, 4)),
    "a new module": lambda m: setattr(m, "other", nn.Linear(4, 4)),
    "a parameter": lambda m: setattr(m.linear, "bias", nn.Parameter(torch.ones(4))),
    "a parameter's data": lambda m: set_data(m.linear.bias, torch.ones(4)),
    "a parameter transposed": lambda m: set_data(m.linear.weight, m.linear.weight.data.t()),
    "a parameter loaded": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
    "a frozen parameter": lambda m: m.linear.bias.requires_grad_(False),
    "another dtype and back": lambda m: m.to(torch.float64).to(torch.float32),
    "a buffer": lambda m: setattr(m, "shift", torch.ones(4)),
    "a class": lambda m: setattr(m.dropout, "__class__", nn.Identity),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_changes_is_captured_anew(change):
    model, handle = captured()
    change(model)
    for replays in (1, 1, 2, 3):
        assert torch.equal(model(X, ENDS), eager(model, X, ENDS))
        model.zero_grad()
        assert handle.num_replays in (replays, replays + 1)
    assert handle.num_captured in (1, 2) and handle.num_replays > 1


def test_what_is_written_in_place_is_read():
    model, handle = captured()
    with torch.no_grad():
        model.linear.weight.mul_(2)
        model.shift.add_(1)
    assert torch.equal(model(X, ENDS), eager(model, X, ENDS)) and handle.num_replays == 2


def test_a_graph_in_a_buffer_is_not_stale():
    class Own(Layer):
        def __init__(self):
            super().__init__()
            self.register_buffer("ends", ENDS.clone())

        def forward(self, x, ends):
            graph = edgeless.cache.graph_from_edge_index(self.ends, 6, 6)
            return edgeless.functional.spmm(graph, self.linear(x))

    model, handle = captured(Own())
    model.ends[0, 0] = 4
    for _ in range(3):
        assert torch.equal(model(X, ENDS), eager(model, X, ENDS))
    assert handle.num_captured == 1 and handle.num_replays == 3


ARGUMENTS = {
    "shape": lambda: (torch.ones(2, 4), ENDS),
    "strides": lambda: (X.t().contiguous().t(), ENDS),
    "requires_grad": lambda: (X.clone().requires_grad_(), ENDS),
    "another edge_index": lambda: (X, ENDS.clone()),
    "another tensor in the same place": lambda: (X, ENDS.data),
    "a view": lambda: (X, ENDS[:, 1:]),
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_what_makes_a_call_another(arguments):
    model, handle = captured()
    given = arguments()
    assert torch.equal(model(*given), eager(model, *given))
    assert handle.num_replays == 1
    model(X, ends=ENDS)
    model.eval()(X, ENDS)
    assert handle.num_replays == 1
    model.train()(X, ENDS)
    assert handle.num_replays == 2


def test_edge_index_written_to_is_another():
    model, ends = Layer(), ENDS.clone()
    handle = taped(model)
    for _ in range(3):
        model(X, ends)
    ends[0, 0] = 3
    for _ in range(4):
        assert torch.equal(model(X, ends), eager(model, X, ends))
    assert handle.num_captured == 1 and handle.num_replays == 5  # the stale one is gone


def test_new_tensors_that_look_alike_are_never_captured(monkeypatch):
    # A tensor may get the id, the memory and the version of one that is gone.
    def same_key(args, kwargs, device):
        return b"", (), [*args]

    monkeypatch.setattr(importlib.import_module("edgeless.capture.model"), "call_key", same_key)
    model = Layer()
    handle = taped(model, most=4)
    for _ in range(12):
        model(X, torch.full((2, 3), 1))
    assert handle.num_captured == 0


def test_keys_of_plain_arguments():
    """Equal values of other types are other calls; what is not plain has no key, and Python looks at it."""

    def key(*args, **kwargs):
        found = edgeless._C.call_key(args, kwargs, -1)
        return found and found[:2]

    values = [True, 1, 1.0, "1", None, (1,), [1], {"a": 1}, {"b": 1}, (1, 1), ((1,), 1), X, X.double(), ENDS, X.t()]
    keys = [key(value) for value in values]
    assert None not in keys and len(set(keys)) == len(values) and keys == [key(value) for value in values]
    assert key(X, a=1) != key(X, b=1) != key(X, 1) and key(X, X) != key((X, X))
    assert key(X.clone()) == key(X) and key(ENDS.clone()) != key(ENDS)  # a tensor of floats is copied in, another kept
    eighths = X.to(torch.float8_e5m2)
    assert key(eighths.clone()) != key(eighths)  # kept as well

    class Own(torch.Tensor):
        pass

    strange = [object(), {1: 2}, X.to_sparse(), X.as_subclass(Own), torch.Size, 1j]
    assert [key(value) for value in strange] == [None] * len(strange)


@pytest.mark.parametrize(
    "setting",
    [torch.no_grad, torch.inference_mode, lambda: edgeless.backend("reference"), lambda: edgeless.engine("cusparse")],
)
def test_settings_make_a_call_another(setting):
    model, handle = captured()
    with setting():
        for _ in range(3):
            assert torch.equal(model(X, ENDS), eager(model, X, ENDS))
    assert handle.num_captured == 2 and handle.num_replays == 3, handle.report()
    assert model(X, ENDS).requires_grad and handle.num_replays == 4


def test_freezing_in_turns_keeps_two():
    model = Layer()
    handle = taped(model)
    for step in range(12):
        model.requires_grad_(step % 2 == 0)
        out = model(X, ENDS)
        assert out.requires_grad == (step % 2 == 0) and torch.equal(out, eager(model, X, ENDS))
    assert handle.num_captured == 2 and handle.num_replays >= 8, handle.report()


def test_the_most_that_are_kept():
    model = Layer()
    handle = taped(model, most=2)
    for size in (1, 2, 3, 1):
        for _ in range(2):
            model(torch.ones(size, 4), ENDS)
    assert handle.num_captured == 2 and handle.num_replays == 4
    assert "1 not captured: there are 2 captures, the most that are kept" in handle.report()


def test_calls_that_do_not_repeat_are_given_up():
    model = Layer()
    handle = taped(model, most=3, warmup=3)
    for size in range(1, 60):
        model(torch.ones(size, 4), ENDS)
    assert handle.report() == "gave up after 12 calls in a row without a replay, 0 replayed"
    assert "forward" not in model.__dict__


# Gradients -----------------------------------------------------------------------------------------------------------


def test_what_a_user_holds_does_not_change_and_gradients_accumulate():
    model, handle = captured()
    twin = copy.deepcopy(model)
    held = []
    for m in (model, twin):
        m.zero_grad()
        for step in range(4):
            x = (X + step).requires_grad_()
            out = m(x, ENDS)
            out.square().sum().backward()
            held.append((m is model, [out, x.grad, *(p.grad.clone() for p in m.parameters())]))
    mine, expected = ([t for own, ts in held if own is which for t in ts] for which in (True, False))
    assert handle.num_replays == 1 + 3 and all(map(torch.equal, mine, expected))


def test_gradients_that_a_user_holds_do_not_change():
    model, handle = captured()
    held = [torch.autograd.grad(model(X + step, ENDS).square().sum(), list(model.parameters())) for step in range(3)]
    for step, grads in enumerate(held):
        expected = torch.autograd.grad(eager(model, X + step, ENDS).square().sum(), list(model.parameters()))
        assert all(map(torch.equal, grads, expected))
    assert handle.num_replays == 4


def test_retained_backward_passes():
    model, handle = captured()
    twin = copy.deepcopy(model)
    for m in (model, twin):
        m.zero_grad()
        out = m(X, ENDS).square().sum()
        out.backward(retain_graph=True)
        m(X + 1, ENDS).sum().backward()  # in between, and without touching what the first one needs
        out.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert handle.num_replays == 2 and "the backward of the call before is still to come" in handle.report()


def test_two_forwards_before_a_backward():
    model, handle = captured()
    twin = copy.deepcopy(model)
    results = []
    for m in (model, twin):
        first, second = m(X, ENDS), m(X + 1, ENDS)
        results.append(torch.autograd.grad((first * second).sum(), list(m.parameters())))
    assert all(map(torch.equal, *results)) and handle.num_replays == 2
    out = model(X, ENDS)
    del out, first, second  # a backward that will not come
    model(X, ENDS).sum().backward()
    assert handle.num_replays >= 4


class Two(Layer):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 4)

    def forward(self, x, ends):
        return {"a": self.linear(x), "b": [self.other(x), ends + 1]}


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_outputs_that_no_loss_uses(used):
    model, handle = captured(Two())
    twin, found = copy.deepcopy(model), []
    for m in (model, twin):
        m.zero_grad()
        out = m(X, ENDS)
        outs = [out["a"], out["b"][0]]
        assert torch.equal(out["b"][1], ENDS + 1)
        sum(outs[i].sum() for i in used).backward()
        found.append([p.grad for p in m.parameters()])
    assert handle.num_replays == 2
    for mine, expected in zip(*found, strict=True):
        assert (mine is None) == (expected is None) and (mine is None or torch.equal(mine, expected))


def test_second_derivatives_and_writes_to_parameters_are_errors():
    model, _ = captured()
    (grad,) = torch.autograd.grad(model(X, ENDS).square().sum(), [model.linear.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    out = model(X, ENDS)
    with torch.no_grad():
        model.linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="a parameter was modified in place"):
        out.sum().backward()


def test_dropout_draws_anew_and_the_warm_up_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.BatchNorm1d(64))
    twin = copy.deepcopy(model)
    handle, outs = taped(model), []
    for m in (model, twin):
        torch.manual_seed(5)
        outs.append([m(X).detach() for _ in range(4)])
    assert handle.num_replays == 3
    assert all(not torch.equal(a, b) for i, a in enumerate(outs[0]) for b in outs[0][:i])
    assert all(map(torch.equal, *outs))  # a tape draws as the op does
    assert model[2].num_batches_tracked == 4 and torch.equal(model[2].running_mean, twin[2].running_mean)


# The handle ----------------------------------------------------------------------------------------------------------


def test_arguments_are_nested_as_before():
    leaves = []
    given = ((X, None), {"a": [1, ENDS], "b": (2.5,)})
    tree = flatten(given, leaves)
    assert leaves == [X, None, 1, ENDS, 2.5] and hash(tree) is not None
    assert unflatten(tree, iter(leaves)) == given


def test_frames_of_a_dgl_graph():
    dgl = pytest.importorskip("dgl")

    class FromFrames(Layer):
        def forward(self, graph, x):
            return self.linear(graph.ndata["h"]) + x

    graph, model = dgl.graph(([0, 1], [1, 2])), FromFrames()
    graph.ndata["h"] = torch.ones(3, 4)
    handle, x = taped(model), torch.zeros(3, 4)
    for _ in range(3):
        assert torch.equal(model(graph, x), eager(model, graph, x))
    assert handle.num_replays == 2
    graph.ndata["h"] = torch.zeros(3, 4)
    assert torch.equal(model(graph, x), eager(model, graph, x))
    assert handle.num_replays == 2
    graph.ndata["h"].add_(1)
    for _ in range(2):
        assert torch.equal(model(graph, x), eager(model, graph, x))
    assert handle.num_replays > 2


def test_copies_are_not_captured():
    model, _ = captured()
    expected = eager(model, X, ENDS)
    for make in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        other = make(model)
        with torch.no_grad():
            other.linear.weight.zero_()
        assert other.captured is None and repr(other) == repr(Layer())
        assert torch.equal(other(X, ENDS), eager(other, X, ENDS))
        handle = edgeless.capture(other).captured
        handle.release()
        assert torch.equal(model(X, ENDS), expected)


def test_nothing_keeps_a_model_that_is_gone():
    model, handle = captured()
    gone, recording = weakref.ref(model), weakref.ref(handle._kept[next(iter(handle._kept))][0])
    gc.disable()
    try:
        del model, handle
        assert gone() is None and recording() is None
    finally:
        gc.enable()


def test_bad_arguments():
    with pytest.raises(TypeError, match="capture: model must be a torch.nn.Module, got int"):
        edgeless.capture(3)
    for options in ({"warmup": 0}, {"most": "a"}):
        with pytest.raises(ValueError, match=f"capture: {next(iter(options))} must be an int of at least 1"):
            edgeless.capture(Layer(), **options)
    model = Layer()
    edgeless.capture(model)
    with pytest.raises(ValueError, match="captured already"):
        edgeless.capture(model)
    model = Layer()
    model.forward = lambda x, ends: x
    with pytest.raises(ValueError, match="must have the forward of its class"):
        edgeless.capture(model)


def test_the_model_comes_back_with_its_report():
    model = Layer()
    assert edgeless.capture(model) is model and isinstance(model.captured, edgeless.Capture)
    assert torch.equal(model(X, ENDS), eager(model, X, ENDS))
    said = "0 captured, 0 replayed\n  1 not captured: a tensor is not on the current GPU"
    assert model.captured.report() == repr(model.captured) == said
    lines = repr(model).splitlines()
    assert lines[:3] == ["Layer(", "  captured: 0 captured, 0 replayed", f"      {said.splitlines()[1].strip()}"]
    assert lines[3:] == repr(Layer()).splitlines()[1:]
    own = edgeless.capture(nn.Linear(2, 3))
    assert repr(own).splitlines()[1] == "  in_features=2, out_features=3, bias=True"
    own.captured.release()
    assert own.captured.num_captured == 0 and "captured: 0" in repr(own)
    assert edgeless.capture(own) is own  # again


def test_a_report_outlives_the_captures():
    model, handle = captured()
    assert model.captured is handle
    handle.release()
    assert model.captured.report() == "0 captured, 1 replayed"
    taken = Layer()
    taken.captured = 3
    with pytest.raises(ValueError, match="no attribute of its own called 'captured'"):
        edgeless.capture(taken)
    assert "forward" not in taken.__dict__


def test_accelerate_captures():
    model = Layer()
    report = edgeless.accelerate(model, capture=True)
    assert report.captured is model.captured
    assert report.captured.report() == "0 captured, 0 replayed" and "forward" in model.__dict__
    report.captured.release()
    assert edgeless.accelerate(model).captured is None


@pytest.mark.parametrize("name", ["GATv2Conv", "GATConv", "TransformerConv", "GCNConv"])
def test_layers_replay_from_a_tape(name):
    pytest.importorskip("torch_geometric")
    layers = importlib.import_module("edgeless.pyg.nn")
    torch.manual_seed(0)
    model = getattr(layers, name)(4, 4)
    ends = torch.randint(6, (2, 20))
    twin, handle, found = copy.deepcopy(model), taped(model), []
    for m in (model, twin):
        optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            out = m(X + step, ends)
            out.square().sum().backward()
            optimizer.step()
        found.append([out, *m.parameters()])
    assert handle.num_replays == 5 and all(map(torch.equal, *found)), handle.report()


def test_dgl_layers_replay_from_a_tape():
    dgl = pytest.importorskip("dgl")
    pytest.importorskip("dgl")
    layers = importlib.import_module("edgeless.dgl.nn")
    torch.manual_seed(0)
    graph = dgl.graph(tuple(torch.randint(6, (2, 20))), num_nodes=6)
    for name in ("GATv2Conv", "GATConv"):
        model = getattr(layers, name)(4, 4, 2, allow_zero_in_degree=True)
        twin, handle = copy.deepcopy(model), taped(model)
        for step in range(4):
            assert torch.equal(model(graph, X + step), twin(graph, X + step))
        assert handle.num_replays == 3, handle.report()
        graph.add_edges(0, 5)
        for step in range(3):
            assert torch.equal(model(graph, X + step), twin(graph, X + step))
        assert handle.num_replays == 5


def test_classes_swapped_after_the_capture_are_noticed():
    layers, ours = pytest.importorskip("torch_geometric.nn"), importlib.import_module("edgeless.pyg.nn")
    model = layers.GATv2Conv(4, 4)
    handle, ends = taped(model), torch.randint(6, (2, 20))
    for _ in range(3):
        model(X, ends)
    assert handle.num_replays == 2, handle.report()
    edgeless.accelerate(model)
    assert type(model) is ours.GATv2Conv
    for _ in range(3):
        assert torch.equal(model(X, ends), eager(model, X, ends))
    assert handle.num_captured == 2 and handle.num_replays == 4
