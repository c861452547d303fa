"""Layers that call edge_updater() before propagate(): both are one program, without a tensor between them."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
import torch_geometric.nn as stock
from generated_cases import E, Inputs, N, compare, error
from on_host import running
from test_generated_layers import recorded
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn.models.attentive_fp import GATEConv
from torch_geometric.utils import scatter, softmax

import edgeless
from edgeless.programs import worth
from edgeless.pyg.generated import edge_values, recalled
from edgeless.pyg.generated.calls import PROGRAMS

GIVEN = Inputs()
HEADS, WIDTH = 2, 4
SEEN: list = []


@pytest.fixture(autouse=True)
def generating(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", "off")


class Attention(stock.MessagePassing):
    """Attention as GATConv writes it, with a score of its own; subclasses change what happens between the steps."""

    dropout = 0.0

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.lin = nn.Linear(6, HEADS * WIDTH, bias=False)
        self.lin_edge = nn.Linear(3, HEADS)
        self.att = nn.Parameter(torch.rand(2, HEADS, WIDTH))
        self.norm = nn.BatchNorm1d(HEADS)
        self.factor = 1.0

    def rows(self, x):
        x = self.lin(x).view(-1, HEADS, WIDTH)
        return x, ((x * self.att[0]).sum(-1), (x * self.att[1]).sum(-1))

    def forward(self, x, edge_index, edge_attr):
        x, scores = self.rows(x)
        alpha = self.edge_updater(edge_index, scores=scores, edge_attr=edge_attr)
        return self.end(x, edge_index, alpha)

    def end(self, x, edge_index, alpha):
        return self.propagate(edge_index, x=x, alpha=alpha).flatten(1)

    def edge_update(self, scores_j, scores_i, edge_attr, index, ptr, size_i):
        alpha = torch.tanh(scores_j + scores_i + self.lin_edge(edge_attr)) * self.factor
        return F.dropout(softmax(alpha, index, ptr, size_i), self.dropout, self.training)

    def message(self, x_j, alpha):
        return alpha.unsqueeze(-1) * x_j


class Returned(Attention):
    def end(self, x, edge_index, alpha):
        return super().end(x, edge_index, alpha), (edge_index, alpha)


class Kept(Attention):
    def end(self, x, edge_index, alpha):
        self.last = alpha
        return super().end(x, edge_index, alpha)


class KeptAfter(Attention):
    def end(self, x, edge_index, alpha):
        out = super().end(x, edge_index, alpha)
        self.last = alpha
        return out


class Watches(Attention):
    """The values are read without gradients first, and lead gradients all the same."""

    def end(self, x, edge_index, alpha):
        with torch.no_grad():
            assert alpha.mean().isfinite()
        return super().end(x, edge_index, alpha)


class Twice(Attention):
    def end(self, x, edge_index, alpha):
        return super().end(x, edge_index, alpha) + super().end(x * 2, edge_index, alpha)


class Reads(Attention):
    """What is between the steps is computed on edges."""

    def end(self, x, edge_index, alpha):
        assert isinstance(alpha, torch.Tensor) and alpha.shape == (E, HEADS) and alpha.dtype == x.dtype
        assert alpha.size(0) == len(alpha) == E and alpha.dim() == 2 and alpha.numel() == E * HEADS
        return super().end(x, edge_index, F.dropout(alpha * 2, 0.0) + alpha.mean(0))


class Masks(Attention):
    def end(self, x, edge_index, alpha):
        alpha[alpha > 0.7] = 0.5
        return super().end(x, edge_index, alpha)


class WritesRows(Attention):
    """A tensor that the edge update reads is written before its values are used."""

    def forward(self, x, edge_index, edge_attr):
        x, scores = self.rows(x)
        edge_attr = edge_attr * 1
        alpha = self.edge_updater(edge_index, scores=scores, edge_attr=edge_attr)
        edge_attr.zero_()
        F.relu(edge_attr, inplace=True)
        return self.end(x, edge_index, alpha)

    def edge_update(self, scores_j, scores_i, edge_attr, index, ptr, size_i):
        return softmax(scores_j + scores_i + edge_attr.sum(-1, keepdim=True), index, ptr, size_i)


class WritesOut(WritesRows):
    def forward(self, x, edge_index, edge_attr):
        x, scores = self.rows(x)
        edge_attr = edge_attr.detach() * 1
        alpha = self.edge_updater(edge_index, scores=scores, edge_attr=edge_attr)
        torch.zeros(E, 3, dtype=edge_attr.dtype, out=edge_attr)
        return self.end(x, edge_index, alpha)


class ChangesState(Attention):
    """An attribute that the edge update reads is another one before its values are used."""

    def end(self, x, edge_index, alpha):
        self.factor = 5.0
        try:
            return super().end(x, edge_index, alpha)
        finally:
            self.factor = 1.0


class ChangesWeight(Attention):
    """Another parameter of the same form takes the place of one that the edge update reads."""

    def end(self, x, edge_index, alpha):
        before, self.lin_edge.bias = self.lin_edge.bias, nn.Parameter(self.lin_edge.bias.detach() + 3)
        try:
            return super().end(x, edge_index, alpha)
        finally:
            self.lin_edge.bias = before


class WithoutGradient(Attention):
    def forward(self, x, edge_index, edge_attr):
        x, scores = self.rows(x)
        with torch.no_grad():
            alpha = self.edge_updater(edge_index, scores=scores, edge_attr=edge_attr)
        return self.end(x, edge_index, alpha)


class WritesValues(Attention):
    """message() writes into the values, and the layer returns them."""

    def end(self, x, edge_index, alpha):
        return super().end(x, edge_index, alpha), alpha

    def message(self, x_j, alpha):
        with torch.no_grad():
            alpha.mul_(2)
        return alpha.detach().unsqueeze(-1) * x_j


class WritesAttribute(Attention):
    def end(self, x, edge_index, alpha):
        seen, self.seen = self.seen, None
        return super().end(x, edge_index, alpha) + seen.sum()

    def edge_update(self, scores_j, scores_i, edge_attr, index, ptr, size_i):
        self.seen = scores_j * 2
        return softmax(scores_j + scores_i, index, ptr, size_i)


class Normalises(Attention):
    """The edge update has buffers that it writes; a call with them between writes those of the layer."""

    def end(self, x, edge_index, alpha):
        return super().end(self.norm(x.mean(-1)).unsqueeze(-1) * x, edge_index, alpha)

    def edge_update(self, scores_j, scores_i, edge_attr, index, ptr, size_i):
        return softmax(self.norm(scores_j + scores_i), index, ptr, size_i)


class NormalisesBetween(Attention):
    def end(self, x, edge_index, alpha):
        return super().end(self.norm(x.mean(-1)).unsqueeze(-1) * x, edge_index, alpha)


class OtherEdges(Attention):
    """The values belong to the edges of one tensor, and go to an equal one, and to the reversed graph."""

    def end(self, x, edge_index, alpha):
        one = super().end(x, edge_index.clone(), alpha)
        return one + super().end(x, edge_index.flip(0), alpha)


class Pairs(Attention):
    """Two results, of which the sum over a destination's edges is another."""

    def end(self, x, edge_index, alpha):
        weight, shift = alpha
        return self.propagate(edge_index, x=x, alpha=weight, shift=shift).flatten(1)

    def edge_update(self, scores_j, scores_i, edge_attr, index, ptr, size_i):
        return softmax(scores_j, index, ptr, size_i), {"shift": scores_i - scores_j}["shift"]

    def message(self, x_j, alpha, shift):
        return alpha.unsqueeze(-1) * x_j + shift.unsqueeze(-1)


class Chained(Attention):
    """An edge update of an edge update, and two of them in one propagate()."""

    def forward(self, x, edge_index, edge_attr):
        x, scores = self.rows(x)
        first = self.edge_updater(edge_index, scores=scores, edge_attr=edge_attr)
        second = self.edge_updater(edge_index, scores=scores[::-1], edge_attr=edge_attr)
        third = self.edge_updater(edge_index, scores=scores, edge_attr=F.pad(first + second, (0, 1)))
        return self.propagate(edge_index, x=x, alpha=first, shift=second).flatten(1) + self.end(x, edge_index, third)

    def end(self, x, edge_index, alpha):
        return self.propagate(edge_index, x=x, alpha=alpha, shift=None).flatten(1)

    def message(self, x_j, alpha, shift):
        out = alpha.unsqueeze(-1) * x_j
        return out if shift is None else out + shift.unsqueeze(-1)


class Shared(Attention):
    """Both steps get the same rows, by other ends."""

    def forward(self, x, edge_index, edge_attr):
        x, _ = self.rows(x)
        alpha = self.edge_updater(edge_index, x=x, edge_attr=edge_attr)
        return self.propagate(edge_index, x=x, alpha=alpha, edge_attr=edge_attr).flatten(1)

    def edge_update(self, x_i, x_j, edge_attr, index, ptr, size_i):
        return softmax((x_i * x_j).sum(-1) + self.lin_edge(edge_attr), index, ptr, size_i)

    def message(self, x_j, alpha, edge_attr):
        return alpha.unsqueeze(-1) * x_j * edge_attr.sum(-1).view(-1, 1, 1)


class Scatters(Attention):
    """No node's rows are in propagate(), which knows their number by the size alone."""

    def end(self, x, edge_index, alpha):
        return self.propagate(edge_index, alpha=alpha, size=(len(x), len(x)))

    def message(self, alpha):
        return alpha


@torch.jit.script
def scripted(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(index.numel(), values.size(1), dtype=values.dtype).index_add(0, index, values)
    return values * total.index_select(0, index)


class Scripts(Attention):
    """A compiled function reads the values, which no function of Python sees."""

    def end(self, x, edge_index, alpha):
        self.norm(x.mean(-1))
        return super().end(x, edge_index, scripted(alpha, edge_index[1]))


class Hooks(Attention):
    """A hook is set on the values after they were used."""

    def end(self, x, edge_index, alpha):
        out = super().end(x, edge_index, alpha)
        if alpha.requires_grad:
            alpha.register_hook(lambda grad: grad * 3)
        return out


class Modes(Attention):
    """The values are made and used within a mode of torch that the forward has itself."""

    def forward(self, x, edge_index, edge_attr):
        x, scores = self.rows(x)
        with torch.device("cpu"):
            alpha = self.edge_updater(edge_index, scores=scores, edge_attr=edge_attr)
        beta = self.edge_updater(edge_index, scores=scores, edge_attr=edge_attr * 2)
        with torch.device("cpu"):
            out = self.end(x, edge_index, beta)
        return out + self.end(x, edge_index, alpha)


class Fails(Attention):
    """The forward catches what fails between the steps."""

    def end(self, x, edge_index, alpha):
        try:
            super().end(x, edge_index, x)
        except Exception:
            SEEN.append(1)
        return super().end(x, edge_index, alpha)


JOINED = [Attention, Returned, Twice, NormalisesBetween, Pairs, Chained, Shared, Scatters, GATEConv]
APART = [Kept, Reads, Masks, ChangesState, ChangesWeight, WithoutGradient, WritesValues, WritesAttribute, Normalises]
APART += [KeptAfter, Watches, OtherEdges, Scripts, Hooks, Modes, Fails]


def pair_of(cls):
    torch.manual_seed(0)
    theirs = (cls(8, 8, 3) if cls is GATEConv else cls()).double()
    ours = copy.deepcopy(theirs)
    edgeless.accelerate(ours)
    return theirs, ours, (GIVEN.wide if cls is GATEConv else GIVEN.x, GIVEN.edge_index, GIVEN.attr)


@pytest.mark.parametrize(
    "walks, cls",
    [*product(("off", "now"), [*JOINED, *APART]), *product(("host",), [Attention, Returned, Pairs, Chained, GATEConv])],
)
def test_parity_at_every_call(walks, cls):
    theirs, ours, args = pair_of(cls)
    with running(walks):
        for _ in range(3):
            compare(theirs, ours, args)
        with torch.no_grad():
            compare(theirs.eval(), ours.eval(), [a.detach() for a in args])


@pytest.mark.parametrize("cls", [WritesRows, WritesOut])
def test_what_is_written_between_the_steps_is_read_before(cls):
    theirs, ours, args = pair_of(cls)
    with torch.no_grad():
        for _ in range(3):
            compare(theirs, ours, [a.detach() for a in args])
    assert ours not in edge_values._computing and ours in edge_values._known


class Between(Attention):
    """What a call does between the steps is given to it, and unknown to the calls before."""

    def forward(self, x, edge_index, edge_attr, between):
        x, scores = self.rows(x)
        alpha = self.edge_updater(edge_index, scores=scores, edge_attr=edge_attr)
        return self.end(x, between(self, edge_index), alpha)


def test_a_known_call_that_goes_on_with_another_graph():
    theirs, ours, args = pair_of(Between)
    for between in (*[lambda layer, edges: edges] * 3, lambda layer, edges: edges.flip(0), lambda layer, edges: edges):
        for _ in range(2):
            compare(theirs, ours, (*args, between))


def test_a_known_call_that_goes_on_with_another_parameter():
    layers = pair_of(Between)
    *pair, args = layers
    for _ in range(2):
        compare(*pair, (*args, lambda layer, edges: edges))
    first = {layer: layer.lin_edge.bias for layer in pair}
    other = {layer: nn.Parameter(bias.detach() + 2) for layer, bias in first.items()}

    def back(layer, edges):
        layer.lin_edge.bias = first[layer]
        return edges

    for _ in range(3):
        found = []
        for layer in pair:
            layer.lin_edge.bias = other[layer]
            out = layer(*args, back)
            found += [out, *torch.autograd.grad(out.square().sum(), [GIVEN.x, GIVEN.attr, layer.lin.weight])]
        assert all(error(a, b) < 1e-10 for a, b in zip(found[:4], found[4:], strict=True))


def test_a_known_call_whose_values_were_made_without_gradients():
    class Stops(Attention):
        def forward(self, x, edge_index, edge_attr, gradients):
            x, scores = self.rows(x)
            with torch.set_grad_enabled(gradients):
                alpha = self.edge_updater(edge_index, scores=scores, edge_attr=edge_attr)
            return self.end(x, edge_index, alpha)

    theirs, ours, args = pair_of(Stops)
    for gradients in (True, True, False, False, True):
        compare(theirs, ours, (*args, gradients))


def test_sums_of_the_same_values_draw_dropouts_of_their_own():
    class Drops(Attention):
        def end(self, x, edge_index, alpha):
            return torch.cat([super(Drops, self).end(x, edge_index, alpha) for _ in range(2)], 1)

        def message(self, x_j, alpha):
            return F.dropout(alpha.unsqueeze(-1) * x_j, 0.5)

    _, ours, args = pair_of(Drops)
    with torch.no_grad():
        ours(*args)
        ours.dropout = 0.5  # of the values
        first, second = ours(*args).chunk(2, 1)
    assert error(first, second) > 0.1


@pytest.mark.parametrize("cls", JOINED)
def test_what_is_between_the_steps_is_part_of_the_program(cls):
    theirs, ours, args = pair_of(cls)
    for _ in range(2):
        _, calls = recorded(ours, *args)
        assert calls and all(ran for _, ran in calls)
    held = recalled._calls[ours]
    assert "joined" in held and all(entry.parts for entry in held["joined"])


@pytest.mark.parametrize("cls", [Attention, Returned])
def test_no_tensor_of_the_edges_is_saved_or_made(cls):
    """What autograd keeps of the joined program has rows of nodes, but for the features of the edges."""
    theirs, ours, args = pair_of(cls)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = ours(*args)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    by_edge = {t.data_ptr() for t in saved if t.dim() and t.size(0) == E}
    assert by_edge <= {GIVEN.attr.data_ptr()}
    program = recalled._calls[ours]["joined"][0].program
    assert program.results == 1 and not [node for node in program.outputs if node.meta["space"].kind == "edge"]


def test_by_default_narrow_values_are_part_of_a_wide_sum(monkeypatch):
    """An edge_updater() alone would compute too few numbers for a program."""
    for name, value in (("TINY", 1), ("LEAST", {"cpu": 8 * E}), ("TRACED", {"cpu": 8 * E}), ("AT_ONCE", 1 << 30)):
        monkeypatch.setattr(worth, name, value)
    monkeypatch.setenv("EDGELESS_GENERATE", "auto")
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", "now")
    theirs, ours, args = pair_of(Attention)
    assert edgeless.explain(ours, *args).fused
    _, calls = recorded(ours, *args)
    assert [ran for _, ran in calls] == [False, True]
    for _ in range(2):
        compare(theirs, ours, args)
    _, calls = recorded(ours, *args)
    assert [ran for _, ran in calls] == [True] and "joined" in recalled._calls[ours]


def test_a_checkpoint_repeats_a_call_as_it_was(monkeypatch):
    for name, value in (("TINY", 1), ("LEAST", {"cpu": 8 * E}), ("INTERPRETED", 8 * E)):
        monkeypatch.setattr(worth, name, value)
    for choice in ("auto", "on"):
        monkeypatch.setenv("EDGELESS_GENERATE", choice)
        theirs, ours, args = pair_of(Attention)
        PROGRAMS.clear()
        right = torch.autograd.grad(theirs(*args).square().sum(), theirs.lin.weight)[0]
        for _ in range(3):
            out = checkpoint(ours, *args, use_reentrant=False)
            assert error(torch.autograd.grad(out.square().sum(), ours.lin.weight)[0], right) < 1e-10


def test_explain_says_that_one_program_runs():
    _, ours, args = pair_of(Attention)
    said = edgeless.explain(ours, *args, plan=True)
    assert said.fused and said.levels.count("forward:") == 1
    _, ours, args = pair_of(Reads)
    assert edgeless.explain(ours, *args, plan=True).levels.count("forward:") == 2


def test_a_plain_attention_lands():
    """Where score and value are those of GATConv, the kernels of attention run them."""

    class Plain(Attention):
        def edge_update(self, scores_j, scores_i, edge_attr, index, ptr, size_i):
            return softmax(F.leaky_relu(scores_j + scores_i, 0.2), index, ptr, size_i)

    theirs, ours, args = pair_of(Plain)
    compare(theirs, ours, args)
    assert "gat" in edgeless.explain(ours, *args).how


@pytest.mark.parametrize("cls", [Returned, Kept, KeptAfter, Twice])
def test_dropout_is_the_same_wherever_the_values_are_read(cls):
    """The returned weights are those that the sums have used, whatever has computed them."""
    _, ours, args = pair_of(cls)
    ours.dropout = 0.5
    with torch.no_grad():
        rows = ours.rows(args[0])[0]

        def weighted(alpha):
            return scatter(alpha.unsqueeze(-1) * rows[GIVEN.edge_index[0]], GIVEN.edge_index[1], 0, N).flatten(1)

        drawn = []
        for _ in range(4):
            out = ours(*args)
            if cls is Twice:  # out is three times the sums of one draw: its zeros are those of a draw
                one = out / 3
                lone = torch.bincount(GIVEN.edge_index[1], minlength=N) == 1
                assert torch.allclose((one[lone] == 0).double().mean(), torch.tensor(0.5).double(), atol=0.5)
                drawn.append(one)
                continue
            out, alpha = (out[0], out[1][1]) if cls is Returned else (out, ours.last)
            assert type(alpha) is torch.Tensor and error(out, weighted(alpha)) < 1e-12
            assert 0.2 < float((alpha == 0).double().mean()) < 0.8
            drawn.append(alpha)
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:])


def test_gradients_of_dropped_values_and_of_returned_ones():
    theirs, ours, args = pair_of(Returned)
    ours.dropout = theirs.dropout = 0.5
    out, (_, alpha) = ours(*args)
    mask = (alpha != 0).double() * 2

    class Masked(Attention):
        def edge_update(self, scores_j, scores_i, edge_attr, index, ptr, size_i):
            return super().edge_update(scores_j, scores_i, edge_attr, index, ptr, size_i) * mask

    plain = Masked().double()
    plain.load_state_dict(theirs.state_dict())
    expected = plain(*args)
    assert error(out, expected) < 1e-12
    weight, own = torch.randn_like(out), torch.randn_like(alpha)
    inputs = [GIVEN.x, GIVEN.attr, *ours.parameters()][:5]
    found = torch.autograd.grad([out, alpha], inputs, [weight, own], allow_unused=True)
    again = [GIVEN.x, GIVEN.attr, *plain.parameters()][:5]
    plain_alpha = plain.edge_updater(GIVEN.edge_index, scores=plain.rows(GIVEN.x)[1], edge_attr=GIVEN.attr)
    right = torch.autograd.grad([expected, plain_alpha], again, [weight, own], allow_unused=True)
    for a, b in zip(found, right, strict=True):
        assert (a is None) == (b is None) and (a is None or error(a, b) < 1e-12)


def test_the_first_call_that_reads_otherwise_starts_over_once():
    _, ours, args = pair_of(Scripts)
    before = ours.norm.num_batches_tracked.item()
    ours(*args)
    assert ours.norm.num_batches_tracked.item() == before + 1 and ours in edge_values._computing
    ours(*args)
    assert ours.norm.num_batches_tracked.item() == before + 2


def test_a_later_call_that_reads_otherwise_is_an_error_once():
    class Later(Scripts):
        scripts = False

        def end(self, x, edge_index, alpha):
            return super().end(x, edge_index, alpha) if self.scripts else Attention.end(self, x, edge_index, alpha)

    theirs, ours, args = pair_of(Later)
    compare(theirs, ours, args)
    theirs.scripts = ours.scripts = True
    with pytest.raises(RuntimeError, match="reads values of edges that edge_updater"):
        ours(*args)
    ours.norm.load_state_dict(theirs.norm.state_dict())
    compare(theirs, ours, args)


def test_forward_itself_hooks_and_calls_from_outside():
    theirs, ours, args = pair_of(Returned)
    out, (_, alpha) = ours.forward(*args)
    expected, (_, right) = theirs(*args)
    assert type(alpha) is torch.Tensor and error(out, expected) < 1e-12 and error(alpha, right) < 1e-12
    rows, scores = ours.rows(GIVEN.x)
    outside = ours.edge_updater(GIVEN.edge_index, scores=scores, edge_attr=GIVEN.attr)
    assert type(outside) is torch.Tensor and error(outside, right) < 1e-12
    seen = []
    handle = ours.register_forward_hook(lambda module, given, result: seen.append(type(result[1][1])))
    ours(*args)
    handle.remove()
    assert seen == [torch.Tensor]
    assert torch._C._len_torch_function_stack() == 0


def test_an_error_of_the_forward_leaves_no_mode():
    class Raises(Attention):
        def end(self, x, edge_index, alpha):
            raise ValueError("of the forward")

    _, ours, args = pair_of(Raises)
    for _ in range(2):
        with pytest.raises(ValueError, match="of the forward"):
            ours(*args)
    assert torch._C._len_torch_function_stack() == 0 and edge_values._state.scope is None


def test_in_a_layer_of_a_layer():
    """An inner layer's calls are its own, and values of the outer one stay the outer one's."""

    rows, features = GIVEN.x, GIVEN.attr

    class Outer(Attention):
        def __init__(self):
            super().__init__()
            self.inner, self.plain = Returned(), stock.ResGatedGraphConv(6, 8)

        def end(self, x, edge_index, alpha):
            inner, (_, weights) = self.inner(rows, edge_index, features)
            return super().end(x, edge_index, alpha) + inner + weights.sum() + self.plain(rows, edge_index)

    theirs, ours, args = pair_of(Outer)
    for _ in range(3):
        compare(theirs, ours, args)
    _, calls = recorded(ours, *args)
    assert all(ran for _, ran in calls)


def test_across_two_sets_of_nodes():
    class Across(Attention):
        def forward(self, x, edge_index, edge_attr):
            (x, a), (y, b) = map(self.rows, x)
            alpha = self.edge_updater(edge_index, scores=(a[0], b[1]), edge_attr=edge_attr)
            return self.propagate(edge_index, x=(x, y), alpha=alpha).flatten(1)

    theirs, ours, _ = pair_of(Across)
    for _ in range(2):
        compare(theirs, ours, (GIVEN.pair, GIVEN.across, GIVEN.attr))
    assert "joined" in recalled._calls[ours]


def test_torch_compile_and_copies():
    """torch.compile runs the stock layer; copies and pickles of a layer that keeps its values are right."""
    theirs, ours, args = pair_of(Kept)
    with torch.no_grad():
        ours(*args)
    again = pickle.loads(pickle.dumps(ours))
    for layer in (copy.deepcopy(ours.eval()), again):
        compare(theirs, layer, args)
    theirs, ours, args = pair_of(Attention)
    compiled = torch.compile(ours, backend="eager")
    assert error(compiled(*args), theirs(*args)) < 1e-12


def test_new_graphs_and_sizes_share_the_program():
    theirs, ours, args = pair_of(Attention)
    compare(theirs, ours, args)
    traces = PROGRAMS.traces
    for seed in range(3):
        other = Inputs(seed + 5)
        count = 40 + seed
        compare(theirs, ours, (other.x, other.edge_index[:, :count].contiguous(), other.attr[:count]))
    assert PROGRAMS.traces == traces
