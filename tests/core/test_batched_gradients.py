"""Batches of gradients, is_grads_batched and vectorised jacobians: what one backward after the other gives."""

import pytest
import torch
from devices import EVERY_DEVICE
from test_attention_layer import KINDS, flat, graph_of, inputs, layer
from test_written_over import CALLS, rows
from test_written_over import graph_of as device_graph

from edgeless import functional


def assert_batches(out, given, count=3):
    grads = torch.randn(count, *out.shape, dtype=out.dtype, device=out.device)
    options = {"retain_graph": True, "allow_unused": True}
    each = [torch.autograd.grad(out, given, grad, **options) for grad in grads]
    for found, *want in zip(
        torch.autograd.grad(out, given, grads, is_grads_batched=True, **options), *each, strict=True
    ):
        assert (found is None) == (want[0] is None)
        if found is not None:
            torch.testing.assert_close(found, torch.stack(want), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CALLS)
@EVERY_DEVICE
def test_functions(device, name):
    given = rows(12, 2, 4, device=device), rows(12, 2, 4, device=device, seed=1)
    out = CALLS[name](device_graph(device), *given)
    assert_batches(out, given)
    assert_batches(out.add_(1), given)


@pytest.mark.parametrize("kind", KINDS)
@EVERY_DEVICE
def test_a_whole_layer(device, kind):
    def moved(t):
        return t if t is None else t.detach().to(device).requires_grad_()

    given = tuple([moved(t) for t in part] if isinstance(part, list) else moved(part) for part in inputs(kind))
    assert_batches(layer(kind, given, graph_of().to(device)), flat(*given))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "op",
    ["project", "project-heads", "project_sum", "sum_layer", "add_row", "add_row-heads", "column_sums", "node_logits"],
)
def test_ops(op, dtype):
    ops, graph = torch.ops.edgeless, graph_of()
    x, w, v, row = rows(9, 4), rows(3, 4, seed=1), rows(3, 4, seed=2), rows(3, seed=3)
    csr, csc = list(graph.csr), list(graph.csc)
    out, given = {
        "project": lambda: (ops.project(x, [w, v], [row, None], 0, dtype)[0], (x, w, row)),
        "project-heads": lambda: (ops.project(x, [w, v], [row, None], 0, dtype, [3, 0])[0], (x, w, row)),
        "project_sum": lambda: (ops.project_sum([x, x], [w, v], row, dtype), (x, w, v, row)),
        "sum_layer": lambda: (ops.sum_layer(x, [w, v], row, None, None, None, csr, csc, dtype), (x, w, v, row)),
        "add_row": lambda: (ops.add_row(x, v[0]), (x, v)),
        "add_row-heads": lambda: (ops.add_row(x.view(9, 2, 2), v[0]), (x, v)),
        "column_sums": lambda: (ops.column_sums(x), (x,)),
        "node_logits": lambda: (ops.node_logits(x.view(9, 2, 2), [v[:2, :2].contiguous()])[0], (x, v)),
    }[op]()
    assert_batches(out, given)


def test_jacobians():
    graph, x, y = graph_of(), rows(9, 2, 3), rows(9, 2, 3, seed=1)
    call = lambda x, y: functional.dot_attention(graph, y, x, x)  # noqa: E731
    want = torch.autograd.functional.jacobian(call, (x, y))
    torch.testing.assert_close(torch.autograd.functional.jacobian(call, (x, y), vectorize=True), want)


def test_batches_of_batches():
    """A vectorised jacobian of a gradient's backward: of a sum, which can be differentiated twice."""
    graph, x, weight = graph_of(), rows(9, 2), rows(40, seed=1)

    def gradient(x):
        out = functional.spmm(graph, x, weight).square().sum()
        return torch.autograd.grad(out, x, create_graph=True)[0]

    want = torch.autograd.functional.jacobian(gradient, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(gradient, x, vectorize=True), want)


def test_second_derivatives_through_a_batch():
    """Of what can be differentiated twice; the history of a batch must not be lost."""
    ops, graph = torch.ops.edgeless, graph_of()
    x, weight = rows(9, 2), rows(40, seed=1)
    row, w, vector = rows(2, seed=2), rows(2, 2, seed=3), rows(1, 2, seed=4)
    csr, csc = list(graph.csr), list(graph.csc)
    calls = [
        lambda: functional.spmm(graph, x, weight),
        lambda: functional.sddmm_dot(graph, x, x * 2),
        lambda: ops.project(x, [w], [row], 0, None)[0] ** 2,
        lambda: ops.project_sum([x, x], [w, w], row, None) ** 2,
        lambda: ops.add_row(x, row) ** 2,
        lambda: ops.column_sums(x) ** 2,
        lambda: ops.node_logits(x.view(9, 1, 2), [vector])[0],
        lambda: ops.sum_layer(x, [w, w], row, None, None, None, csr, csc, None),
    ]
    given = [x, weight, row, w, vector]
    options = {"create_graph": True, "allow_unused": True}
    for call in calls:
        out = call()
        grads = torch.randn(2, *out.shape, dtype=out.dtype)
        batch = torch.autograd.grad(out, given, grads, is_grads_batched=True, **options)
        each = [torch.autograd.grad(out, given, grad, **options) for grad in grads]
        found, want = (
            torch.autograd.grad(sum(t.square().sum() for t in first if t is not None), given, **options)
            for first in (
                batch,
                [torch.stack(of_one) if of_one[0] is not None else None for of_one in zip(*each, strict=True)],
            )
        )
        for a, b in zip(found, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_batches_that_are_to_be_differentiated_are_refused():
    """Once a batch is put together, nothing would tell that its history is missing."""
    graph, x = graph_of(), rows(9, 2, 3)
    for out in (functional.dot_attention(graph, x, x, x), functional.neighbor_reduce(graph, x.flatten(1), "max")):
        grads = torch.ones(2, *out.shape, dtype=out.dtype)
        with pytest.raises(RuntimeError, match=r'is_grads_batched.*one by one.*backend\("reference"\)'):
            torch.autograd.grad(out, x, grads, is_grads_batched=True, create_graph=True)


def test_every_backward_takes_batches():
    """Those over memory that they write over run for one gradient at a time only."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("edgeless::")]
    backwards = [name for name in names if name.endswith("_backward")]
    without = [name for name in backwards if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Batched")]
    assert len(backwards) > 8 and not without


def test_a_blend_by_types_takes_batches():
    y, x, alpha = rows(9, 4), rows(9, 4, seed=1), rows(3, seed=2)
    offsets = torch.tensor([0, 4, 4, 9])
    assert_batches(torch.ops.edgeless.typed_blend(y, x, alpha, offsets, None), (y, x, alpha))
