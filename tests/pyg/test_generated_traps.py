"""Messages that a trace could get wrong: each is refused, or right on this graph and on another."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from generated_cases import compare, error
from on_host import MODES, running
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.utils import scatter, softmax

import edgeless
from edgeless.layers.calls import recording
from edgeless.programs import layers
from edgeless.pyg.generated.calls import PROGRAMS
from edgeless.pyg.nn import MessagePassing

FACTOR = 2.0
OPTIONS = {"scale": 1.5}
TABLE = torch.rand(6, dtype=torch.float64)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    PROGRAMS.clear()


def outcomes(layer, *inputs):
    """(what every propagate() of a second call did, whether by a program)."""
    layer(*inputs)
    return recorded_once(layer, *inputs)


def recorded_once(layer, *inputs):
    """The same of one call."""
    with recording() as calls:
        layer(*inputs)
    return [(found.how or found.reasons[0], found.fused) for _, found in calls]


def graph(nodes=20, edges=70, seed=0):
    g = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(nodes, (2, edges), generator=g)
    edge_index[:, 0] = nodes - 1
    x = torch.randn(nodes, 6, generator=g, dtype=torch.float64).requires_grad_()
    return x, edge_index, torch.randn(edges, 6, generator=g, dtype=torch.float64).requires_grad_()


class Layer(MessagePassing):
    """Messages by a function of (self, x_i, x_j, e, index, size_i)."""

    def __init__(self, function, aggr="sum"):
        super().__init__(aggr=aggr)
        self.function = function
        self.lin, self.norm = nn.Linear(6, 6).double(), nn.BatchNorm1d(6).double()
        self.vector = nn.Parameter(torch.rand(6, dtype=torch.float64))
        self.plain, self.calls, self.log, self.kept = torch.rand(6, dtype=torch.float64), 0, [], None

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i, x_j, e, index, size_i):
        return self.function(self, x_i, x_j, e, index, size_i)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


def write_first(x):
    x = x.clone()
    x[0] = 0
    return x


def count(self, x_j):
    self.calls += 1
    return x_j * self.calls


def log(self, x_j):
    self.log.append(1)
    return x_j * len(self.log)


def no_gradient(x_j):
    with torch.no_grad():
        weight = x_j.sigmoid()
    return x_j * weight


def caught(x_j):
    try:
        return x_j * (2.0 if x_j.sum() > 0 else 3.0)
    except Exception:
        return x_j


def hooked(x_j):
    with contextlib.suppress(RuntimeError):  # without gradients
        x_j.register_hook(lambda grad: 2 * grad)
    return x_j


REFUSED = {
    "a size to a power": lambda s, xi, xj, e, i, n: xj / n**0.5,
    "a size less one": lambda s, xi, xj, e, i, n: xj / (n - 1),
    "a branch on the number of edges": lambda s, xi, xj, e, i, n: xj if xj.size(0) > 100 else -xj,
    "a branch on the number of nodes": lambda s, xi, xj, e, i, n: xj if n > 1000 else -xj,
    "a branch on values": lambda s, xi, xj, e, i, n: xj if xj.sum() > 0 else -xj,
    "a branch on values within try": lambda s, xi, xj, e, i, n: caught(xj),
    "a number of values": lambda s, xi, xj, e, i, n: xj * xj.abs().max().item(),
    "a cumulated sum": lambda s, xi, xj, e, i, n: xj.cumsum(0),
    "flipped edges": lambda s, xi, xj, e, i, n: xj.flip(0),
    "rolled edges": lambda s, xi, xj, e, i, n: xj.roll(1, 0),
    "the first edge": lambda s, xi, xj, e, i, n: xj - xj[0],
    "softmax over all edges": lambda s, xi, xj, e, i, n: xj.softmax(0),
    "mean over all edges": lambda s, xi, xj, e, i, n: xj - xj.mean(0),
    "largest of all edges": lambda s, xi, xj, e, i, n: xj - xj.amax(0),
    "a mask": lambda s, xi, xj, e, i, n: xj * 0 + xj[xj[:, 0] > 0].sum(),
    "numbered edges": lambda s, xi, xj, e, i, n: xj * torch.arange(xj.size(0)).view(-1, 1),
    "sorted edges": lambda s, xi, xj, e, i, n: xj.sort(0)[0],
    "nonzero": lambda s, xi, xj, e, i, n: xj + xj.nonzero().size(0),
    "random numbers": lambda s, xi, xj, e, i, n: xj * torch.rand_like(xj),
    "a custom gradient": lambda s, xi, xj, e, i, n: StraightThrough.apply(xj),
    "edge rows written in place": lambda s, xi, xj, e, i, n: e.mul_(2) if not e.requires_grad else e.data.mul_(1),
    "one row written": lambda s, xi, xj, e, i, n: write_first(xj),
    "a counter": lambda s, xi, xj, e, i, n: count(s, xj),
    "a list": lambda s, xi, xj, e, i, n: log(s, xj),
    "a tensor of the module's": lambda s, xi, xj, e, i, n: xj * TABLE,
    "numpy": lambda s, xi, xj, e, i, n: xj * float(xj.detach().numpy().mean()),
    "a product of all edges": lambda s, xi, xj, e, i, n: (xj @ xj.t()) @ xj,
    "another edge's row": lambda s, xi, xj, e, i, n: xj[torch.randperm(xj.size(0))],
    "edges joined": lambda s, xi, xj, e, i, n: torch.cat([xj, xj])[: xj.size(0)],
    "a view over rows": lambda s, xi, xj, e, i, n: xj.t().reshape(xj.shape),
    "requires_grad": lambda s, xi, xj, e, i, n: xj if xj.requires_grad else -xj,
    "a hook on a tensor": lambda s, xi, xj, e, i, n: hooked(xj),
    "the number of edges as rows": lambda s, xi, xj, e, i, n: scatter(xj, i, 0, xj.size(0), "sum").index_select(0, i),
}
RIGHT = {
    "divided by the number of edges": lambda s, xi, xj, e, i, n: xj / xj.size(0),
    "divided by the number of nodes": lambda s, xi, xj, e, i, n: xj / n,
    "centred by a sum over edges": lambda s, xi, xj, e, i, n: xj - xj.sum(0) / xj.size(0),
    "softmax without a size": lambda s, xi, xj, e, i, n: softmax(xj, i) * e,
    "softmax": lambda s, xi, xj, e, i, n: softmax((xi * xj).sum(-1), i, num_nodes=n).view(-1, 1) * xj,
    "detached": lambda s, xi, xj, e, i, n: xj * xj.detach().sigmoid(),
    "no_grad": lambda s, xi, xj, e, i, n: no_gradient(xj),
    "a global number": lambda s, xi, xj, e, i, n: xj * FACTOR,
    "a global dictionary": lambda s, xi, xj, e, i, n: xj * OPTIONS["scale"],
    "a plain tensor in an attribute": lambda s, xi, xj, e, i, n: xj * s.plain,
    "a norm": lambda s, xi, xj, e, i, n: s.norm(xj + xi),
    "a constant": lambda s, xi, xj, e, i, n: xj * torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64),
    "a difference of ends": lambda s, xi, xj, e, i, n: F.relu(s.lin(xi - xj)),
    "a length": lambda s, xi, xj, e, i, n: xj * (xi - xj).norm(dim=-1, keepdim=True),
    "in place on an own tensor": lambda s, xi, xj, e, i, n: (xj * 2).mul_(3).add_(e),
    "node ids as numbers": lambda s, xi, xj, e, i, n: xj * i.view(-1, 1).cos(),
    "taken from one": lambda s, xi, xj, e, i, n: 1 - xj,
    "a written column": lambda s, xi, xj, e, i, n: torch.cat([xj[:, :3], e[:, 3:]], -1),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_program_can_do_is_refused_in_words(name):
    torch.manual_seed(0)
    layer = Layer(REFUSED[name])
    x, edge_index, e = graph()
    if name == "edge rows written in place":
        e = e.detach()
    with torch.no_grad():
        calls = outcomes(layer, x.detach() if name == "numpy" else x, edge_index, e.clone())
    assert [by_program for _, by_program in calls] == [False], calls
    assert calls[0][0] and "Error" not in calls[0][0].split("(")[0] or "cannot be traced" in calls[0][0]


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_what_looks_alike_is_right(name, aggr, monkeypatch):
    torch.manual_seed(0)
    layer, stock = Layer(RIGHT[name], aggr), None
    stock = copy.deepcopy(layer)
    for seed, sizes in enumerate([(20, 70), (31, 40), (9, 200)]):
        inputs = graph(*sizes, seed=seed)
        monkeypatch.setenv("EDGELESS_GENERATE", "on")
        assert [ok for _, ok in outcomes(copy.deepcopy(layer), *inputs)] == [True], outcomes(layer, *inputs)
        compare(Off(stock, monkeypatch), On(layer, monkeypatch), inputs)
    assert len(PROGRAMS) <= 3  # with gradients, and without buffers' versions


class Switched(nn.Module):
    """A layer under a setting of EDGELESS_GENERATE."""

    choice = "on"

    def __init__(self, layer, monkeypatch):
        super().__init__()
        self.layer, self.patch = layer, monkeypatch

    def forward(self, *inputs):
        self.patch.setenv("EDGELESS_GENERATE", self.choice)
        return self.layer(*inputs)


class On(Switched):
    pass


class Off(Switched):
    choice = "off"


def test_changed_globals_and_attributes_are_seen(monkeypatch):
    layer = Layer(RIGHT["a global number"])
    inputs = graph()
    first = layer(*inputs)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert error(layer(*inputs), first * 1.5) < 1e-12
    options = Layer(RIGHT["a global dictionary"])
    first = options(*inputs)
    monkeypatch.setitem(OPTIONS, "scale", 3.0)
    assert error(options(*inputs), first * 2) < 1e-12
    plain = Layer(RIGHT["a plain tensor in an attribute"])
    first = plain(*inputs)
    plain.plain = plain.plain * 2
    assert error(plain(*inputs), first * 2) < 1e-12
    plain.plain.mul_(2)
    assert error(plain(*inputs), first * 4) < 1e-12


class Scaled(Layer):
    """A layer that reads a number of its class."""

    scale = 2.0

    def message(self, x_j):
        return x_j * self.scale


def test_a_changed_number_of_a_class_is_seen(monkeypatch):
    layer, inputs = Scaled(None), graph()
    first = layer(*inputs)
    monkeypatch.setattr(Scaled, "scale", 4.0)
    assert error(layer(*inputs), first * 2) < 1e-12


def test_a_layer_that_does_not_settle_becomes_the_stock_one(monkeypatch):
    monkeypatch.setattr(layers, "MOST_PROGRAMS", 3)
    layer, inputs = Layer(lambda s, xi, xj, e, i, n: xj * s.calls), graph()
    outcome = []
    for layer.calls in range(5):
        outcome += [ran for _, ran in recorded_once(layer, *inputs)]
    assert outcome == [True] * 3 + [False] * 2


def test_a_closure_that_changes_is_seen():
    factor = 2.0
    layer = Layer(lambda s, xi, xj, e, i, n: xj * factor)
    inputs = graph()
    first = layer(*inputs)
    factor = 4.0
    assert error(layer(*inputs), first * 2) < 1e-12


def test_a_replaced_method_is_seen(monkeypatch):
    layer = Layer(RIGHT["a global number"])
    inputs = graph()
    layer(*inputs)
    monkeypatch.setattr(Layer, "message", lambda self, x_i, x_j, e, index, size_i: x_i)
    x, edge_index, _ = inputs
    expected = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[1]])
    assert error(layer(*inputs), expected) < 1e-12


def test_a_tensor_written_to_an_attribute_is_there():
    def keep(self, x_i, x_j, e, index, size_i):
        self.kept = (x_i * x_j).sum(-1)
        return x_j * self.kept.view(-1, 1)

    layer = Layer(keep)
    x, edge_index, e = graph()
    assert [ok for _, ok in outcomes(layer, x, edge_index, e)] == [True]
    assert error(layer.kept, (x[edge_index[0]] * x[edge_index[1]]).sum(-1)) < 1e-12
    torch.autograd.grad(layer.kept.sum(), x)


def test_hooks_and_modes_run_the_stock_layer():
    layer = Layer(RIGHT["a length"])
    inputs = graph()
    assert outcomes(layer, *inputs)[0][1]
    seen = []
    handle = layer.register_message_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert outcomes(layer, *inputs) == [("a message passing hook is registered", False)]
    assert len(seen) == 2
    handle.remove()
    inner = layer.lin.register_forward_hook(lambda module, args, out: out * 2)
    assert "has a hook" in outcomes(layer, *inputs)[0][0]
    inner.remove()
    with edgeless.backend("reference"):
        assert not outcomes(layer, *inputs)[0][1]
    assert outcomes(layer, *inputs)[0][1]


def test_dropout_is_right_in_its_rate_and_its_gradient():
    def drop(self, x_i, x_j, e, index, size_i):
        return F.dropout(x_j, 0.4, self.training)

    layer = Layer(drop)
    x, edge_index, e = graph(50, 4000)
    ones = torch.ones_like(x).requires_grad_()
    torch.manual_seed(5)
    out = layer(ones, edge_index, e)
    torch.manual_seed(5)
    assert torch.equal(out, layer(ones, edge_index, e))
    assert not torch.equal(out, layer(ones, edge_index, e))
    assert abs(float(out.sum()) / (4000 * 6) - 1) < 0.05
    grad = torch.autograd.grad(out, ones, torch.ones_like(out))[0]
    assert error(grad.sum(), out.sum()) < 1e-12  # the mask of the backward is that of the forward
    layer.eval()
    assert error(layer(x, edge_index, e), torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])) < 1e-12


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p):
    layer = Layer(lambda s, xi, xj, e, i, n: F.dropout(xj, p) * e + xi)
    x, edge_index, e = graph()
    assert [ok for _, ok in outcomes(layer, x, edge_index, e)] == [True]
    expected = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[1]] + (1 - p) * x[edge_index[0]] * e)
    out, weight = layer(x, edge_index, e), torch.rand(6, dtype=torch.float64)
    assert error(out, expected) < 1e-12
    for ours, theirs in zip(*(torch.autograd.grad((o * weight).sum(), (x, e)) for o in (out, expected)), strict=True):
        assert float((ours - theirs).abs().max()) < 1e-12


def test_two_dropouts_of_a_message_draw_apart():
    layer = Layer(lambda s, xi, xj, e, i, n: F.dropout(e, 0.5) - F.dropout(e, 0.5))
    x, edge_index, e = graph(50, 4000)
    ones = torch.ones_like(e)
    assert [ok for _, ok in outcomes(layer, x, edge_index, ones)] == [True]
    assert float(layer(x, edge_index, ones).abs().max()) > 0


def test_dropout_of_what_is_no_row_of_an_edge_is_refused():
    layer = Layer(lambda s, xi, xj, e, i, n: xj * F.dropout(s.vector, 0.5))
    said = outcomes(layer, *graph())
    assert not said[0][1] and "dropout is applied to something else than rows of edges" in said[0][0]


def test_a_hook_of_the_layer_itself_is_called_beside_the_program():
    layer, seen = Layer(RIGHT["a length"]), []
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert [ok for _, ok in outcomes(layer, *graph())] == [True] and len(seen) == 2
    handle.remove()


class Private(Layer):
    """A layer that reads a number of its class in an inner function."""

    _scale = 2.0

    def message(self, x_j):
        def scaled(rows):
            return rows * self._scale * FACTOR

        return scaled(x_j)


def test_what_inner_functions_and_private_names_say_is_seen(monkeypatch):
    layer, inputs = Private(None), graph()
    first = layer(*inputs)
    monkeypatch.setattr(Private, "_scale", 4.0)
    assert error(layer(*inputs), first * 2) < 1e-12
    monkeypatch.setitem(globals(), "FACTOR", FACTOR * 3)
    assert error(layer(*inputs), first * 6) < 1e-12


def forgetful(self, x_j):
    del self.__dict__["kept"]
    return x_j


def test_a_message_that_deletes_an_attribute_runs_as_it_is():
    layer = Layer(lambda s, xi, xj, e, i, n: forgetful(s, xj))
    calls = recorded_once(layer, *graph())
    assert not calls[0][1] and "deletes an attribute" in calls[0][0] and not hasattr(layer, "kept")


def test_modes_that_see_every_op_see_those_of_the_stock_layer():
    layer, inputs = Layer(RIGHT["a length"]), graph()
    assert outcomes(layer, *inputs)[0][1]

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Listening(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    for mode in (Seeing(), Listening()):
        with mode:
            assert recorded_once(layer, *inputs) == [("a mode of torch that sees every op is active", False)]


def test_a_number_of_rows_that_is_the_nodes_and_the_edges_is_refused():
    layer = Layer(lambda s, xi, xj, e, i, n: xj * e)
    said = outcomes(layer, *graph(nodes=20, edges=20))
    assert not said[0][1] and "are both the nodes' and the edges' number" in said[0][0]


# Functions -> a number at which they or their derivatives are infinite.
INFINITE = {
    "exp": 1e3, "expm1": 1e3, "sinh": 1e3, "cosh": 1e3, "log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0,
    "sqrt": 0.0, "rsqrt": 0.0, "reciprocal": 0.0, "acos": 1.0, "asin": 1.0, "acosh": 1.0, "erfinv": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("end", ["source", "destination"])
@pytest.mark.parametrize("name", INFINITE)
def test_a_node_without_edges_makes_no_gradient_infinite(name, end):
    function = getattr(torch, name)
    layer = Layer(lambda s, xi, xj, e, i, n: function(xj if end == "source" else xi) * e)
    x, edge_index, e = graph()
    edge_index = edge_index.clamp(max=18)  # node 19 has no edge
    least = 1.1 if name == "acosh" else 0.1
    x = (x.detach().abs() / 10 + least).clamp(max=0.9 + least // 1).requires_grad_()
    assert [ok for _, ok in outcomes(layer, x, edge_index, e)] == [True]  # whose program is checked with such numbers
    x = x.detach().clone()
    x[19] = INFINITE[name]
    x.requires_grad_()
    out = layer(x, edge_index, e)
    rows = function(x.detach()[:19])
    ends = edge_index[int(end == "destination")]
    assert error(out, torch.zeros_like(x).index_add(0, edge_index[1], rows[ends] * e)) < 1e-12
    grad = torch.autograd.grad(out.sum(), x)[0]
    assert bool(grad.isfinite().all()) and not grad[19].any()


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_node_without_edges_may_have_features_that_are_not_finite(value, flow, monkeypatch):
    layer = Layer(lambda s, xi, xj, e, i, n: F.relu(s.lin(xi) + s.lin(xj)) * e)
    layer.flow = flow
    x, edge_index, e = graph()
    edge_index, rows = edge_index.clamp(max=18), x.detach().clone()
    assert [ok for _, ok in outcomes(layer, rows, edge_index, e)] == [True]  # whose check takes rows of the call
    rows[19] = value
    found = []
    for choice in ("on", "off"):
        monkeypatch.setenv("EDGELESS_GENERATE", choice)
        found.append(torch.autograd.grad(layer(rows, edge_index, e).sum(), [e, *layer.lin.parameters()]))
    assert all(b.isfinite().all() and error(a, b) < 1e-12 for a, b in zip(*found, strict=True))
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    assert [ok for _, ok in outcomes(layer, rows, edge_index, e)] == [True]
    rows[19], rows[2] = 1.0, value  # which messages read, as PyG's do
    assert [ok for _, ok in outcomes(layer, rows, edge_index, e)] == [True]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min"])
def test_results_may_be_written_over(aggr, mode):
    for name in ("detached", "softmax", "a difference of ends"):
        layer, inputs = Layer(RIGHT[name], aggr), graph()
        wanted, grads = [inputs[0], inputs[2], *layer.parameters()], []
        for in_place in (False, True):
            with running(mode):
                out = layer(*inputs)
            out = out.mul_(3) if in_place else out * 3
            grads.append(torch.autograd.grad(out.square().sum(), wanted, allow_unused=True))
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None) and (a is None or error(a, b) < 1e-12), name


class Shifted(Layer):
    """A layer whose first derivatives read none of its inputs."""

    def message(self, x_j, e):
        return torch.cat([2 * x_j - e, e], -1)


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_inputs_that_no_gradient_reads_may_be_written_over(aggr):
    layer, (x, edge_index, e) = Shifted(None, aggr), graph()
    grads = []
    for written in (False, True):
        rows, attr = x * 1, e * 1
        out = layer(rows, edge_index, attr)
        if written:
            rows.mul_(3)
            attr.add_(1)
        grads.append(torch.autograd.grad(out.square().sum(), (x, e)))
    assert [ok for _, ok in outcomes(layer, x, edge_index, e)] == [True]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_second_derivatives_notice_inputs_that_were_written_over():
    layer, (x, edge_index, e) = Layer(lambda s, xi, xj, e, i, n: F.relu(xi) + 2 * xj - e, "max"), graph()
    attr = e * 1
    out = layer(x, edge_index, attr)
    torch.autograd.grad(out.sum(), x, create_graph=True)
    attr.add_(1)
    with pytest.raises(RuntimeError, match="in.?place"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_a_result_of_what_needs_no_gradient_requires_none():
    layer = Layer(lambda s, xi, xj, e, i, n: e * 2)
    x, edge_index, e = graph()
    assert [ok for _, ok in outcomes(layer, x, edge_index, e.detach())] == [True]
    assert not layer(x, edge_index, e.detach()).requires_grad and layer(x, edge_index, e).requires_grad


def test_a_norm_over_one_edge_is_the_error_of_the_layer():
    layer = Layer(RIGHT["a norm"])
    x, edge_index, e = graph()
    assert [ok for _, ok in outcomes(layer, x, edge_index, e)] == [True]
    before = layer.norm.running_var.clone()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(x, edge_index[:, :1], e[:1])
    assert torch.equal(layer.norm.running_var, before)
    layer.eval()
    assert [ok for _, ok in outcomes(layer, x, edge_index[:, :1], e[:1])] == [True]


def test_a_refusal_names_the_line():
    layer = Layer(REFUSED["a cumulated sum"])
    said = str(edgeless.explain(layer, *graph()))
    assert "cumsum" in said and "test_generated_traps.py:" in said
    said = str(edgeless.explain(Layer(REFUSED["numbered edges"]), *graph()))
    assert "arange depends on the order of the edges (" in said
