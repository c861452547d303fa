"""The attention ops on CUDA as ops: opcheck, torch.compile, host syncs, streams, graph capture, devices, and tensors of
more than 2**31 elements.
"""

import pytest
import torch
from test_attention import OPTIONS, SCORES, assert_compiles_whole, error, graph_of, inputs_of, op_samples
from test_attention_cuda import DEVICE, cuda_inputs, star

from edgeless import Graph, functional, reference

pytestmark = pytest.mark.cuda


def test_opcheck():
    def moved(sample):
        return [
            [t.to(DEVICE) for t in x] if isinstance(x, list) else x.detach().to(DEVICE) if torch.is_tensor(x) else x
            for x in sample
        ]

    for sample in map(moved, op_samples(False)):
        torch.library.opcheck(torch.ops.edgeless.attention, sample)
        dst, src, value, att, attr, proj, scale, csr, csc, seed, *options = sample
        out, stats = torch.ops.edgeless.attention(*sample)
        weights = (stats, dst, src, att, attr, proj, csr, csc, seed, *options[:3])
        torch.library.opcheck(torch.ops.edgeless.attention_weights, weights)
        backward = (
            torch.ones_like(out),
            None,
            out,
            stats,
            *sample[:7],
            csr,
            csc,
            seed,
            *options[:3],
            False,
            [True] * 7,
        )
        torch.library.opcheck(torch.ops.edgeless.attention_backward, backward)


@pytest.mark.parametrize("score", SCORES)
def test_compiles_whole_and_equals_eager(score):
    graph = graph_of("square")
    args, tensors, rest = cuda_inputs(score, graph, 2, 8, OPTIONS["all"], torch.float64)
    assert_compiles_whole(score, graph.to(DEVICE), args, tensors, rest)


def forward_backward(score, graph, args, tensors, rest):
    out = getattr(functional, f"{score}_attention")(graph, *args, **tensors, **rest)
    outs = out if isinstance(out, tuple) else (out,)
    return [*outs, *torch.autograd.grad([o.float().square().sum() for o in outs], [*args, *tensors.values()])]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_no_host_sync(score, options):
    graph = star(20_000)
    args, tensors, rest = cuda_inputs(score, graph, 2, 16, OPTIONS[options], torch.float32)
    graph = graph.to(DEVICE)
    graph.csc  # noqa: B018  built on first use
    if "seed" in rest:
        rest["seed"] = torch.tensor([3], device=DEVICE)
    expected = forward_backward(score, graph, args, tensors, rest)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = forward_backward(score, graph, args, tensors, rest)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("score", SCORES)
def test_runs_on_the_current_stream(score):
    graph = star(20_000)
    args, _, _ = cuda_inputs(score, graph, 2, 16, (), torch.float32)
    graph = graph.to(DEVICE)
    expected = forward_backward(score, graph, args, {}, {})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [t.detach().clone() for t in args]
        for t in late:
            t.fill_(float("nan"))
        torch.cuda._sleep(20_000_000)  # whoever does not wait for this stream reads NaN
        for t, value in zip(late, args, strict=True):
            t.copy_(value.detach())
        found = forward_backward(score, graph, [t.requires_grad_() for t in late], {}, {})
    torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", ["plain", "dropout"])
def test_captured_in_a_cuda_graph(score, options):
    graph = star(20_000)
    args, _, rest = cuda_inputs(score, graph, 2, 16, OPTIONS[options], torch.float32)
    graph = graph.to(DEVICE)
    if rest:
        rest["seed"] = torch.tensor([3], device=DEVICE)
    # Detached: nodes of autograd that outlive their call tie the capture to that call's stream (torch warns of it).
    expected = [t.detach() for t in forward_backward(score, graph, args, {}, rest)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_backward(score, graph, args, {}, rest)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = forward_backward(score, graph, args, {}, rest)
    for t in found:
        t.detach().fill_(float("nan"))
    captured.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_device_than_the_current():
    graph = star(20_000)
    args, _, _ = inputs_of("gatv2", graph, 2, 16, (), torch.float32)
    first = forward_backward(
        "gatv2", graph.to("cuda:0"), [t.detach().to("cuda:0").requires_grad_() for t in args], {}, {}
    )
    second = forward_backward(
        "gatv2", graph.to("cuda:1"), [t.detach().to("cuda:1").requires_grad_() for t in args], {}, {}
    )
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, second, strict=True))


def test_arrays_on_two_devices_are_refused():
    graph = graph_of("square")
    csr = [t for t in graph.csr if t is not None]
    x = torch.randn(40, 2, 8, device=DEVICE)
    with pytest.raises((ValueError, RuntimeError), match="csr must be on cuda:0, got cpu"):
        torch.ops.edgeless.attention(x, x, x, None, None, None, None, csr, [], None, "dot", 1.0, 0.0, None)


@pytest.mark.parametrize("needs", [(1,), (3,)])  # of src, and of att, whose gradient gatv2 makes over both directions
def test_a_gradient_that_needs_the_transpose_says_so(needs):
    graph = graph_of("square").to(DEVICE)
    dst, src = (torch.randn(40, 2, 8, device=DEVICE) for _ in range(2))
    csr = [graph.csr.indptr, graph.csr.indices, graph.csr.edge_ids]
    rest = (csr, [], None, "gatv2", 0.2, 0.0)
    inputs = (dst, src, None, torch.randn(2, 8, device=DEVICE), None, None, None)
    out, stats = torch.ops.edgeless.attention(*inputs, *rest, None)
    wanted = [i in needs for i in range(7)]
    with pytest.raises(ValueError, match="csc is needed for the gradients of source tensors and of att"):
        torch.ops.edgeless.attention_backward(out, None, out, stats, *inputs, *rest, False, wanted)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 60 << 30, reason="needs 60 GB"
)
def test_more_than_two_to_the_31_elements():
    """3.1e9 edge-feature elements, and node rows that lie beyond 2**31 elements of their tensor."""
    heads, channels, nodes, edges = 4, 128, 4_400_000, 6_000_000  # 2.25e9 elements a node tensor
    gen = torch.Generator(device=DEVICE).manual_seed(0)
    ends = torch.randint(nodes, (2, edges), device=DEVICE, generator=gen)
    ends[:, : edges // 2] = nodes - 1 - ends[:, : edges // 2] % 1000  # many among the last rows
    graph = Graph.from_edge_index(ends, nodes, nodes)
    shape = (nodes, heads, channels)
    q, k, v = (
        torch.randn(shape, device=DEVICE, generator=gen, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    out = functional.dot_attention(graph, q, k, v)
    # Rows at the end of the tensors and some others; their in-edges make a small graph with the same results.
    rows = torch.cat([torch.arange(nodes - 200, nodes, device=DEVICE), ends[1, -200:]]).unique()
    grad = torch.zeros_like(out)
    grad[rows] = torch.randn(rows.numel(), heads, channels, device=DEVICE, generator=gen, dtype=torch.bfloat16)
    grads = torch.autograd.grad(out, [q, k, v], grad)
    near = torch.isin(ends[1], rows)
    nodes_near, local = torch.unique(torch.cat([ends[0, near], ends[1, near], rows]), return_inverse=True)
    count = int(near.sum())
    small = Graph.from_edge_index(local[: 2 * count].view(2, count), nodes_near.numel(), nodes_near.numel())
    leaves = [t.detach()[nodes_near].double().requires_grad_() for t in (q, k, v)]
    expected = reference.dot_attention(small, *leaves)
    place = local[2 * count :]
    assert error(out[rows], expected[place]) < 0.01
    for found, wanted in zip(grads, torch.autograd.grad(expected[place], leaves, grad[rows].double()), strict=True):
        assert error(found[nodes_near], wanted) < 0.02
        assert torch.isfinite(found.sum(dtype=torch.float32))
