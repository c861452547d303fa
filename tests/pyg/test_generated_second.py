"""Second derivatives of generated layers: programs of their own, equal to the stock layer's, without an edge tensor."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as stock
from generated_cases import CASES, Inputs, error, pair_of_layers, tensors
from on_host import MODES, running
from torch_geometric.nn.conv import MessagePassing as StockMessagePassing
from torch_geometric.utils import softmax

from edgeless.programs import derivatives
from edgeless.pyg.generated.calls import PROGRAMS

SECOND = [name for name in CASES if name not in ("GPSConv",)]  # whose inputs are made for another test
WHOLE = {  # without a program of their own, as landed or stock
    *("SimpleConv", "SimpleConv mul", "ChebConv", "GatedGraphConv", "TAGConv", "SGConv", "SSGConv", "APPNP", "MFConv"),
    *("SignedConv", "HypergraphConv", "HypergraphConv attention", "LEConv", "ClusterGCNConv", "GCN2Conv"),
    *("WLConvContinuous", "PDNConv", "LGConv", "MixHopConv", "DirGNNConv"),
    "LEConv reverse",
}
FEW = ["ResGatedGraphConv attr", "GINEConv", "CGConv", "GENConv softmax", "EdgeConv", "FiLMConv"]


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    PROGRAMS.clear()


@pytest.fixture
def made(monkeypatch):
    """The derivatives that were made: programs, or why there is none."""
    found, make = [], derivatives._make

    def spy(*args):
        found.append(make(*args))
        return found[-1]

    monkeypatch.setattr(derivatives, "_make", spy)
    return found


def both(layer, args, kwargs=None, of=None):
    """First and second derivatives of a layer, for its inputs and parameters."""
    kwargs = kwargs or {}
    torch.manual_seed(0)
    out = layer(*args, **kwargs)
    wanted = [*(t for t in tensors([args, kwargs]) if t.requires_grad), *layer.parameters()]
    first_of = wanted if of is None else of
    total = sum(o.square().sum() for o in tensors(out) if o.requires_grad)
    first = torch.autograd.grad(total, first_of, create_graph=True, allow_unused=True)
    total = sum(f.square().sum() for f in first if f is not None and f.requires_grad)
    return [*first, *torch.autograd.grad(total, wanted, allow_unused=True)]


def agree(ours, theirs, tolerance=1e-9):
    """Compares gradients relative by norm; those that cancel, relative to the largest."""
    pairs = [(a, b) for a, b in zip(_detached(ours), _detached(theirs), strict=True) if a is not None or b is not None]
    pairs = [tuple(torch.zeros_like(b if a is None else a) if t is None else t for t in (a, b)) for a, b in pairs]
    largest = max(float(b.norm()) for _, b in pairs)
    for a, b in pairs:
        assert float((a - b).norm()) <= tolerance * max(float(b.norm()), 1e-2 * largest)


def _detached(grads) -> list:
    return [None if grad is None else grad.detach() for grad in grads]


def inputs_of(name):
    make, inputs, *rest = CASES[name]
    args = inputs(Inputs())
    names = rest[0] if rest else ()
    count = len(args) - len(names)
    return make, args[:count], dict(zip(names, args[count:], strict=True))


@pytest.mark.parametrize("name", SECOND)
def test_parity_with_the_stock_layer(name, made):
    make, args, kwargs = inputs_of(name)
    layer, ours = pair_of_layers(make)
    ours(*args, **kwargs)  # of a layer that makes tensors by edge, this one only notices that
    agree(both(ours, args, kwargs), both(layer, args, kwargs))
    assert all(isinstance(each, derivatives.Derivative) for each in made), made
    assert bool(made) is (name not in WHOLE)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("name", [*FEW, "PNAConv", "ResGatedGraphConv pair", "PointTransformerConv"])
def test_compiled_walks(name, mode, made):
    make, args, kwargs = inputs_of(name)
    layer, ours = pair_of_layers(make)
    with running(mode):
        agree(both(ours, args, kwargs), both(layer, args, kwargs))
        (found,) = made
        for walk in found.walks():
            assert not isinstance(walk.code.on_cuda, str) if mode == "host" else walk.code.text() == "compiled"


@pytest.mark.parametrize("name", [*FEW, "PNAConv", "GINEConv pair"])
def test_gradgradcheck(name, made):
    make, args, kwargs = inputs_of(name)
    _, ours = pair_of_layers(make)
    given = [t for t in tensors([args, kwargs]) if t.requires_grad]
    assert torch.autograd.gradgradcheck(lambda *_: ours(*args, **kwargs), given, fast_mode=True)
    assert made and not any(isinstance(each, str) for each in made)


class Attention(StockMessagePassing):
    """Attention by a score of its own, with dropout and a value that a detach() keeps from gradients."""

    def __init__(self, p=0.0, stopped=False):
        super().__init__(node_dim=0)
        self.map, self.score, self.p, self.stopped = torch.nn.Linear(6, 8), torch.nn.Linear(8, 2), p, stopped

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.map(x))

    def message(self, x_i, x_j, index, size_i):
        alpha = softmax(self.score((x_i * x_j).tanh()), index, num_nodes=size_i)
        alpha = F.dropout(alpha, self.p, self.training)
        value = torch.sigmoid(x_j) * (x_i.detach() if self.stopped else x_i).exp()
        return (alpha.unsqueeze(2) * value.view(-1, 2, 4)).flatten(1)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_users_attention(stopped, made):
    given = Inputs()
    layer, ours = pair_of_layers(lambda: Attention(stopped=stopped))
    agree(both(ours, (given.x, given.edge_index)), both(layer, (given.x, given.edge_index)))
    assert len(made) == 1 and not isinstance(made[0], str)


def test_a_detach_is_known_to_both_derivatives(made):
    class Stopped(StockMessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            return torch.sin(x_i.detach()) * x_j.pow(3) * x_i

    given = Inputs()
    layer, ours = pair_of_layers(Stopped)
    agree(both(ours, (given.x, given.edge_index)), both(layer, (given.x, given.edge_index)), 1e-12)
    assert len(made) == 1 and not isinstance(made[0], str)


@pytest.mark.parametrize("mode", MODES[:2])
def test_dropout_has_one_mask(mode, made, monkeypatch):
    given = Inputs()
    _, ours = pair_of_layers(lambda: Attention(p=0.5))
    args = (given.x, given.edge_index)
    with running(mode):
        program = both(ours.train(), args)
        monkeypatch.setattr(derivatives, "_MOST", 0)
        PROGRAMS.clear()
        over_all_edges = both(ours, args)
    assert len(made) == 1 and not isinstance(made[0], str)
    agree(program, over_all_edges, 1e-11)
    assert error(program[0], both(ours.eval(), args)[0]) > 1e-3


def test_a_force_computes_no_gradients_of_parameters(made):
    given = Inputs()
    layer, ours = pair_of_layers(lambda: stock.ResGatedGraphConv(6, 8, edge_dim=3))
    args = (given.x, given.edge_index, given.attr.detach())
    agree(both(ours, args, of=[given.x]), both(layer, args, of=[given.x]))
    (found,) = made
    assert len(found.chosen) < len(generated_program().wanted) and len(found.plan.outputs) >= len(found.chosen)


def generated_program():
    (program,) = PROGRAMS._entries.values()
    return program


@pytest.mark.parametrize("name", ["GINEConv", "EdgeConv"])
def test_third_derivatives_run_over_all_edges(name, made):
    make, args, _ = inputs_of(name)
    layer, ours = pair_of_layers(make)
    found = []
    for module in (layer, ours):
        given = x = args[0].detach().requires_grad_()
        for _ in range(2):
            total = module(x, *args[1:]).tanh().sum() * given.sin().sum()
            (given,) = torch.autograd.grad(total, x, create_graph=True)
        found.append(torch.autograd.grad(given.sin().sum(), [x, *module.parameters()], allow_unused=True))
    agree(*found[::-1])
    assert "third derivatives are computed over all edges at once" in made


def test_a_wrong_derivative_is_never_used(monkeypatch, made):
    make, args, kwargs = inputs_of("ResGatedGraphConv attr")
    layer, ours = pair_of_layers(make)
    traced = derivatives.trace_gradients

    def wrong(module, *rest, **options):
        joint, *known = traced(module, *rest, **options)
        for node in joint.graph.nodes:  # of which the forward has one too
            if node.target is torch.ops.aten.sigmoid_backward.default:
                node.args = node.args[::-1]
        return joint, *known

    monkeypatch.setattr(derivatives, "trace_gradients", wrong)
    agree(both(ours, args, kwargs), both(layer, args, kwargs))
    assert made and all("differs" in each for each in made)


def test_float32_and_two_runs_give_the_same_bits(made):
    make, args, kwargs = inputs_of("GENConv softmax")
    layer, ours = pair_of_layers(make, torch.float32)
    args = [a.detach().float().requires_grad_() if a.is_floating_point() else a for a in args]
    first, again = (both(ours, args, kwargs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True) if a is not None)
    exact = both(
        copy.deepcopy(layer).double(),
        [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in args],
    )
    agree(first, exact, 2e-5)
    assert len(made) == 1 and not isinstance(made[0], str)


def largest_allocation(call) -> int:
    """The bytes of the largest tensor that is allocated on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    return max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")


@pytest.mark.parametrize("name", ["ResGatedGraphConv", "GENConv softmax", "EdgeConv"])
def test_no_edge_tensor(name, made):
    """Nothing as large as a tensor of the edges is allocated, in any of the three passes."""
    nodes, edges, width = 500, 40_000, 6
    torch.manual_seed(0)
    layer, ours = pair_of_layers(CASES[name][0])
    x = torch.randn(nodes, width, dtype=torch.float64, requires_grad=True)
    edge_index = torch.randint(nodes, (2, edges))
    args = (x, edge_index, torch.randn(edges, 3, dtype=torch.float64)) if "GEN" in name else (x, edge_index)
    with running("now"):
        both(ours, args)  # what a graph is prepared for once
        largest = largest_allocation(lambda: both(ours, args))
    assert made and not isinstance(made[0], str)
    assert largest < edges * width * 8 < largest_allocation(lambda: both(layer, args))
