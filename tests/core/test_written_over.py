"""In-place ops on what an op returns: they train, though some ops need their own result in the backward."""

import gc

import pytest
import torch
from devices import EVERY_DEVICE
from test_attention_layer import KINDS, flat, inputs, layer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from edgeless import Graph, functional

EDGES = 96


def graph_of(device, nodes=12):
    """With a row so long that the kernels take its sums from the output, not from what they hold of its edges."""
    gen = torch.Generator().manual_seed(3)
    ends = torch.randint(0, nodes, (2, EDGES), generator=gen)
    ends[1, :80] = 5
    return Graph.from_edge_index(ends.to(device), nodes, nodes)


def rows(*shape, device="cpu", seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=gen).to(device).requires_grad_()


def extremum(ties):
    def call(graph, x, y):
        rows = x.flatten(1)
        rows = rows + (rows.round() - rows).detach()  # whole numbers, so that there are ties
        return functional.neighbor_reduce(graph, rows, "max", ties=ties)

    return call


CALLS = {
    "gatv2": lambda graph, x, y: functional.gatv2_attention(graph, x, y, y[0]),
    "gatv2-dropout": lambda graph, x, y: functional.gatv2_attention(graph, x, y, y[0], dropout=0.5, seed=3),
    "gat": lambda graph, x, y: functional.gat_attention(graph, x, x.sum(2), y.sum(2)),
    "dot": lambda graph, x, y: functional.dot_attention(graph, y, x, x),
    "cosine": lambda graph, x, y: functional.cosine_attention(graph, x, y, y[0, 0, :1]),
    "edge_attr": lambda graph, x, y: functional.gatv2_attention(
        graph, x, x, y[0], edge_attr=y.view(EDGES, 1), edge_proj=y[1].unsqueeze(2)
    ),
    "edge_scale": lambda graph, x, y: functional.dot_attention(graph, x, x, x, edge_scale=y.flatten()),
    "max-shared": extremum("shared"),
    "max-scatter": extremum("scatter"),
    "max-first": extremum("first"),
    "spmm": lambda graph, x, y: functional.spmm(graph, x, y.flatten()),
    "sddmm": lambda graph, x, y: functional.sddmm_dot(graph, x, y),
}


def relu(out):
    return torch.relu_(out)


def add(out):
    out += 1.5
    return out


def set_a_row(out):
    out[0] = 0
    return out


def scale_a_view(out):
    out.flatten()[3:].mul_(2)
    return out


def unrecorded(out):
    with torch.no_grad():
        out.zero_()
    return out


def of_a_detached(out):
    out.detach().mul_(3)
    return out


WRITES = [relu, add, set_a_row, scale_a_view, unrecorded, of_a_detached]
writes = pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
calls = pytest.mark.parametrize("name", CALLS)


def weighed(out):
    gen = torch.Generator().manual_seed(9)
    return (out * torch.randn(out.shape, generator=gen, dtype=out.dtype).to(out.device)).sum()


def gradients(call, given, write, copies, **options):
    out = call(*given)
    return torch.autograd.grad(weighed(write(out.clone() if copies else out)), given, allow_unused=True, **options)


def both(name, device="cpu", write=add, around=lambda call: call):
    """The gradients where the write goes to a copy of the result, and where it goes to the result itself.

    Not a ReLU: where it writes, the gradient is 0, and what it wrote over is not read.
    """
    graph, given = graph_of(device), (rows(12, 2, 4, device=device), rows(12, 2, 4, device=device, seed=1))
    graph.csc  # noqa: B018
    plain = lambda x, y: CALLS[name](graph, x, y)  # noqa: E731
    want = gradients(plain, given, write, True)
    written = around(lambda x, y: write(plain(x, y)))
    return gradients(written, given, lambda out: out, False), want


def assert_equal(found, want):
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@writes
@calls
@EVERY_DEVICE
def test_gradients_are_those_of_a_write_to_a_copy(device, name, write):
    assert_equal(*both(name, device, write))


@calls
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint(name, reentrant):
    def around(call):
        return lambda x, y: checkpoint(call, x, y, use_reentrant=reentrant)

    if not reentrant:
        return assert_equal(*both(name, around=around))
    graph, given = graph_of("cpu"), (rows(12, 2, 4), rows(12, 2, 4, seed=1))
    want = gradients(lambda x, y: CALLS[name](graph, x, y), given, add, True)
    weighed(checkpoint(lambda x, y: add(CALLS[name](graph, x, y)), *given, use_reentrant=True)).backward()
    assert_equal([t.grad for t in given], want)


@calls
@pytest.mark.parametrize(
    "hooks",
    [
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
    ],
    ids=["save_on_cpu", "same", "alias"],
)
def test_under_hooks(name, hooks):
    def around(call):
        def hooked(x, y):
            with hooks():
                out = call(x, y)
            return out

        return hooked

    assert_equal(*both(name, around=around))


@calls
def test_a_graph_that_is_kept(name):
    graph, given = graph_of("cpu"), (rows(12, 2, 4), rows(12, 2, 4, seed=1))
    call = lambda x, y: CALLS[name](graph, x, y)  # noqa: E731
    want = gradients(call, given, add, True)
    out = call(*given)
    loss = weighed(add(out))
    for _ in range(2):
        assert_equal(torch.autograd.grad(loss, given, retain_graph=True, allow_unused=True), want)
    unrecorded(out)  # after a backward
    assert_equal(torch.autograd.grad(loss, given, create_graph=True, allow_unused=True), want)


@calls
def test_in_a_compiled_program(name):
    torch._dynamo.reset()

    def around(call):
        return torch.compile(call, backend="aot_eager", fullgraph=True)

    assert_equal(*both(name, around=around))


@calls
@pytest.mark.skipif(not hasattr(torch._dynamo.config, "compiled_autograd"), reason="needs compiled autograd")
def test_where_the_backward_alone_is_compiled(name):
    torch._dynamo.reset()
    graph, given = graph_of("cpu"), (rows(12, 2, 4), rows(12, 2, 4, seed=1))
    call = lambda x, y: CALLS[name](graph, x, y)  # noqa: E731
    want = gradients(call, given, add, True)
    loss = weighed(add(call(*given)))
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend="aot_eager")()
    assert_equal([t.grad for t in given], want)


@writes
@pytest.mark.parametrize("row", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@EVERY_DEVICE
def test_a_whole_layer(device, kind, row, write):
    """Its backward may write over what is the layer's own; the result never is."""

    def moved(t):
        return t if t is None else t.detach().to(device).requires_grad_()

    given = tuple([moved(t) for t in part] if isinstance(part, list) else moved(part) for part in inputs(kind, row))
    graph = graph_of(device, 9)
    for dropout in (0.0, 0.4):
        want = torch.autograd.grad(weighed(write(layer(kind, given, graph, dropout).clone())), flat(*given))
        out = layer(kind, given, graph, dropout)
        loss = weighed(write(out))
        values = out.clone()
        for retain in (True, False):
            assert_equal(torch.autograd.grad(loss, flat(*given), retain_graph=retain), want)
        assert torch.equal(out, values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_layer_under_a_checkpoint(kind):
    graph, given = graph_of("cpu", 9), inputs(kind, row=False)
    want = torch.autograd.grad(weighed(add(layer(kind, given, graph).clone())), flat(*given))
    out = checkpoint(lambda x: add(layer(kind, (x, *given[1:]), graph)), given[0], use_reentrant=False)
    assert_equal(torch.autograd.grad(weighed(out), flat(*given)), want)


@calls
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_what_is_kept_goes_with_its_use(name, written, backward):
    """After the backward, though the loss is there still; without one, with the loss, and not by the collector."""
    graph, given = graph_of("cpu"), (rows(12, 2, 4), rows(12, 2, 4, seed=1))
    out = CALLS[name](graph, *given)
    storage = StorageWeakRef(out.untyped_storage())
    gc.disable()
    try:
        loss = weighed(add(out) if written else out)
        del out
        if backward:
            torch.autograd.backward(loss, inputs=[given[0]])
            assert storage.expired()
        del loss
        assert storage.expired()
    finally:
        gc.enable()


def test_a_written_input_is_still_an_error():
    graph, x = graph_of("cpu"), rows(12, 2, 4)
    keys = x * 1
    out = functional.dot_attention(graph, keys, keys, keys)
    keys.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@EVERY_DEVICE
def test_features_may_be_written_over_where_the_first_takes_all(device):
    graph, x = graph_of(device), rows(12, 6, device=device)
    (want,) = torch.autograd.grad(weighed(functional.neighbor_reduce(graph, x, "max", ties="first")), x)
    features = x * 1
    out = functional.neighbor_reduce(graph, features, "max", ties="first")
    features.zero_()
    assert_equal(torch.autograd.grad(weighed(out), x), [want])


@calls
def test_gradients_enabled_in_inference_mode(name):
    graph = graph_of("cpu")
    given = rows(12, 2, 4).detach(), rows(12, 2, 4, seed=1).detach()
    want = CALLS[name](graph, *given)
    with torch.inference_mode(), torch.enable_grad():
        assert torch.equal(CALLS[name](graph, *given), want)
