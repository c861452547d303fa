"""The attention ops as ops: opcheck, torch.compile, what they refuse; on CUDA also host syncs, streams, graph capture,
devices, and tensors of more than 2**31 elements.
"""

import itertools

import pytest
import torch
from attention_cases import OPTIONS, SCORES, assert_close, error, function_of, graph_of, inputs_of, leaves_of
from devices import EVERY_DEVICE, MEMORY_FOR_2_TO_THE_31, arrays_of, assert_same_bits, leaves_on, star

import edgeless
from edgeless import Graph, functional, reference


def op_samples(device, grad: bool):
    graph = graph_of("bipartite").to(device)
    for score, options in itertools.product(SCORES, ("plain", "all")):
        args, tensors, rest = leaves_of(device, score, graph, 2, 8, OPTIONS[options], torch.float64)
        if not grad:
            args = [t.detach() for t in args]
            tensors = {k: t.detach() for k, t in tensors.items()}
        attr, proj, scale = (tensors.get(k) for k in ("edge_attr", "edge_proj", "edge_scale"))
        dropout = rest.get("dropout", 0.0)
        seed = torch.tensor([7], device=device) if dropout else None
        csr, csc = arrays_of(graph)
        if score == "gatv2":
            dst, src, value, att = args[1], args[0], None, args[2]
        elif score == "gat":
            dst, src, value, att = args[2].unsqueeze(-1), args[1].unsqueeze(-1), args[0], None
            proj = None if proj is None else proj.unsqueeze(1)
        elif score == "cosine":
            dst, src, value, att = args[1], args[0], None, args[2].unsqueeze(1)
        else:
            dst, src, value, att = *args, None
        yield (dst, src, value, att, attr, proj, scale, csr, csc, seed, score, 0.3, dropout, None)


@EVERY_DEVICE
@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad, device):
    for sample in op_samples(device, grad):
        torch.library.opcheck(torch.ops.edgeless.attention, sample)
        dst, src, value, att, attr, proj, scale, csr, csc, seed, *options = sample
        with torch.no_grad():
            out, stats = torch.ops.edgeless.attention(*sample)
        weights = (stats, dst, src, att, attr, proj, csr, csc, seed, *options[:3])
        torch.library.opcheck(torch.ops.edgeless.attention_weights, weights)
        if options[0] == "gat":  # the numbers of nodes without a dimension of their own
            flat = dst.squeeze(2), src.squeeze(2)
            torch.library.opcheck(torch.ops.edgeless.attention, (*flat, *sample[2:]))
            torch.library.opcheck(torch.ops.edgeless.attention_weights, (stats, *flat, *weights[3:]))
        detached = [None if t is None else t.detach() for t in sample[:7]]
        needs = [True] * 7
        backward = (torch.ones_like(out), None, out, stats, *detached, csr, csc, seed, *options[:3], False, needs)
        torch.library.opcheck(torch.ops.edgeless.attention_backward, backward)


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
def test_compiles_whole_and_equals_eager(score, device):
    """Results and gradients, as one program."""
    graph = graph_of("square")
    args, tensors, rest = leaves_of(device, score, graph, 2, 8, OPTIONS["all"], torch.float64)
    graph, leaves = graph.to(device), [*args, *tensors.values()]

    def call(graph, args, tensors):
        return function_of(score)(graph, *args, **tensors, **rest)

    def results(fn):
        out, weights = fn(graph, args, tensors)
        return [out, weights, *torch.autograd.grad((out.square().sum(), weights.square().sum()), leaves)]

    torch._dynamo.reset()
    assert_close(results(torch.compile(call, fullgraph=True, backend="aot_eager")), results(call), 1e-12)


@EVERY_DEVICE
@pytest.mark.parametrize("score,channels", [("gatv2", 3), ("gatv2", 4), ("gatv2", 20), ("gatv2", 64), ("cosine", 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_attention_vector_may_have_the_dtype_of_the_rows(dtype, score, channels, device):
    """Every op takes it as it is: results are those of the same numbers in float32, its gradient is rounded once."""
    graph = graph_of("hub").to(device)
    (src, dst, att), _, _ = leaves_of(device, score, graph, 2, channels, (), dtype)
    src, dst, att = src.detach(), dst.detach(), att.detach() if score == "gatv2" else att.detach().unsqueeze(1)
    grad_out = torch.randn(dst.shape, device=device).to(dtype)
    arrays, options = arrays_of(graph), (None, score, 0.3, 0.0)
    needs = [name in ("dst", "src", "att") for name in ("dst", "src", "value", "att", "attr", "proj", "scale")]

    def results(att):
        inputs = dst, src, None, att, None, None, None, *arrays
        out, stats = torch.ops.edgeless.attention(*inputs, *options, None)
        weights = torch.ops.edgeless.attention_weights(stats, dst, src, att, None, None, *arrays, *options)
        given = grad_out, None, out, stats
        grads = torch.ops.edgeless.attention_backward(*given, *inputs, *options, False, needs)
        assert grads[3].dtype == att.dtype
        return [out, weights, grads[0], grads[1], grads[3].to(dtype)]

    for mine, floats in zip(results(att), results(att.float()), strict=True):
        assert torch.equal(mine, floats)


@pytest.mark.cuda
@pytest.mark.parametrize("channels", [4, 16, 64])
def test_nothing_but_kernels_of_attention_runs_in_16_bits(channels):
    graph = graph_of("square")
    args, _, _ = leaves_of("cuda", "gatv2", graph, 2, channels, (), torch.bfloat16)
    args[2] = args[2].detach().to(torch.bfloat16).requires_grad_()
    graph = graph.to("cuda")

    def step():
        out = functional.gatv2_attention(graph, *args)
        return torch.autograd.grad(out, args, out.detach())

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    kernels = [e.key for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) >= 4 and all("edgeless" in kernel for kernel in kernels), kernels


def test_a_new_number_of_edges_does_not_compile_again_and_again():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def call(graph, q, k, v):
        return functional.dot_attention(graph, q, k, v)

    for edges in (50, 60, 71, 83, 97):
        edge_index = torch.randint(0, 20, (2, edges))
        graph = Graph.from_edge_index(edge_index, 20, 20)
        q, k, v = torch.randn(3, 20, 2, 8, requires_grad=True).unbind(0)
        torch.testing.assert_close(call(graph, q, k, v), reference.dot_attention(graph, q, k, v))
    assert counter.frame_count <= 2


# Bad input -------------------------------------------------------------------------------------------------------


def bad_calls():
    graph = graph_of("bipartite")  # 50 sources, 40 destinations, 400 edges

    def t(*shape, dtype=torch.float32):
        return torch.randn(*shape).to(dtype)

    x_l, x_r, att = t(50, 2, 8), t(40, 2, 8), t(2, 8)
    v2, gat, dot = functional.gatv2_attention, functional.gat_attention, functional.dot_attention
    yield v2, (graph, t(49, 2, 8), x_r, att), {}, r"x_l must have shape \[Ns, H, C\] = \[50, \*, \*\], got \[49, 2, 8\]"
    yield v2, (graph, x_l, t(50, 2, 8), att), {}, r"x_r must have shape \[Nd, H, C\] = \[40, 2, 8\], got \[50, 2, 8\]"
    yield v2, (graph, x_l, x_r, t(2, 4)), {}, r"att must have shape \[H, C\] = \[2, 8\], got \[2, 4\]"
    yield v2, (graph, x_l.long(), x_r, att), {}, "x_l must be float32, float64, bfloat16 or float16, got torch.int64"
    yield v2, (graph, [1.0], x_r, att), {}, "x_l must be a Tensor of shape"
    yield v2, (graph, x_l, x_r, att), {"edge_attr": t(400, 3)}, "edge_attr needs edge_proj as well"
    yield v2, (graph, x_l, x_r, att), {"edge_proj": t(2, 8, 3)}, "edge_proj needs edge_attr as well"
    yield (
        v2,
        (graph, x_l, x_r, att),
        {"edge_attr": t(399, 3), "edge_proj": t(2, 8, 3)},
        r"edge_attr must have shape \[E, De\] = \[400, \*\], got \[399, 3\]",
    )
    yield v2, (graph, x_l, x_r, att), {"edge_scale": t(399)}, r"edge_scale must have shape .* = \[400\], got \[399\]"
    yield v2, (graph, x_l, x_r, att), {"dropout": 1.5}, r"dropout must lie in \[0, 1\], got 1.5"
    yield v2, (graph, x_l, x_r, att), {"return_weights": "yes"}, "return_weights must be None, 'softmax' or 'dropped'"
    yield v2, (graph, x_l.to("meta"), x_r, att), {}, "x_l must be on the graph's device cpu, got meta"
    yield gat, (graph, x_l, t(50, 3), t(40, 2)), {}, r"a_l must have shape \[Ns, H\] = \[50, 2\], got \[50, 3\]"
    yield gat, (graph, x_l, t(50, 2), t(50, 2)), {}, r"a_r must have shape \[Nd, H\] = \[40, 2\], got \[50, 2\]"
    yield dot, (graph, x_r, x_r, x_l), {}, r"k must have shape \[Ns, H, D\] = \[50, 2, 8\], got \[40, 2, 8\]"
    yield (
        dot,
        (graph, x_r, x_l, t(50, 2, 4)),
        {"edge_attr": t(400, 3), "edge_proj": t(2, 8, 3)},
        r"v must have shape \[Ns, H, C\] = \[50, 2, 8\], got \[50, 2, 4\]",
    )


@pytest.mark.parametrize("call,args,kwargs,message", list(bad_calls()))
def test_bad_input_is_named(call, args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        call(*args, **kwargs)


@pytest.mark.parametrize("change,message", [
    ({"dst": torch.zeros(4, 2, 3)}, "src must have shape"),
    ({"score": "sum"}, "score must be 'dot', 'gatv2', 'gat' or 'cosine', got 'sum'"),
    ({"csr": [torch.zeros(3, dtype=torch.int64)]}, "csr must hold"),
    ({"csr": [torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)]}, "indptr of csr must have 5"),
    ({"att": torch.zeros(2, 8)}, "att belongs to the scores 'gatv2' and 'cosine'"),
    ({"dropout": 0.5}, "dropout needs a seed"),
])  # fmt: skip
def test_the_op_itself_guards_its_memory(change, message):
    given = {
        "dst": torch.zeros(4, 2, 8), "src": torch.zeros(5, 2, 8), "value": None, "att": None, "edge_attr": None,
        "edge_proj": None, "edge_scale": None,
        "csr": [torch.zeros(5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)], "csc": [], "seed": None,
        "score": "dot", "coefficient": 1.0, "dropout": 0.0, "out_dtype": None,
    }  # fmt: skip
    torch.ops.edgeless.attention(*given.values())
    given.update(change)
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.edgeless.attention(*given.values())


@pytest.mark.parametrize("name,runs", [("reference", False), ("fused", True)])
def test_backend_reference_runs_without_the_kernels(name, runs):
    graph = graph_of("square")
    args, _, _ = inputs_of("dot", graph, 2, 4, (), torch.float64)
    with torch.profiler.profile() as profile, edgeless.backend(name):
        out = functional.dot_attention(graph, *args)
        torch.autograd.grad(out.sum(), args)
    ops = {event.key for event in profile.key_averages()}
    assert {"edgeless::attention", "edgeless::attention_backward"}.isdisjoint(ops) != runs


# On CUDA ---------------------------------------------------------------------------------------------------------


def step_of(score, options):
    """A step over a hub as a function of the positional inputs, and these."""
    graph = star(20_000)
    args, tensors, rest = leaves_of("cuda", score, graph, 2, 16, OPTIONS[options], torch.float32)
    graph = graph.to("cuda")
    if "seed" in rest:
        rest["seed"] = torch.tensor([3], device="cuda")

    def step(*args):
        out = function_of(score)(graph, *args, **tensors, **rest)
        outs = out if isinstance(out, tuple) else (out,)
        grads = torch.autograd.grad([o.float().square().sum() for o in outs], [*args, *tensors.values()])
        return [*(o.detach() for o in outs), *grads]

    return step, args


@pytest.mark.cuda
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("way,options", [
    ("without waiting for the GPU", "plain"), ("without waiting for the GPU", "all"), ("on a late stream", "plain"),
    ("replayed", "plain"), ("replayed", "dropout"),
])  # fmt: skip
def test_streams_and_captures(score, way, options):
    assert_same_bits(way, *step_of(score, options))


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_device_than_the_current():
    graph = star(20_000)
    args, _, _ = inputs_of("gatv2", graph, 2, 16, (), torch.float32)
    results = []
    for device in ("cuda:0", "cuda:1"):
        leaves = leaves_on(device, args)
        out = functional.gatv2_attention(graph.to(device), *leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*results, strict=True))


@pytest.mark.cuda
def test_arrays_on_two_devices_are_refused():
    csr, _ = arrays_of(graph_of("square"))
    x = torch.randn(40, 2, 8, device="cuda")
    with pytest.raises((ValueError, RuntimeError), match="csr must be on cuda:0, got cpu"):
        torch.ops.edgeless.attention(x, x, x, None, None, None, None, csr, [], None, "dot", 1.0, 0.0, None)


@pytest.mark.cuda
@pytest.mark.parametrize("needs", [(1,), (3,)])  # of src, and of att, whose gradient gatv2 makes over both directions
def test_a_gradient_that_needs_the_transpose_says_so(needs):
    graph = graph_of("square").to("cuda")
    dst, src = (torch.randn(40, 2, 8, device="cuda") for _ in range(2))
    csr, _ = arrays_of(graph)
    rest = (csr, [], None, "gatv2", 0.2, 0.0)
    inputs = (dst, src, None, torch.randn(2, 8, device="cuda"), None, None, None)
    out, stats = torch.ops.edgeless.attention(*inputs, *rest, None)
    wanted = [i in needs for i in range(7)]
    with pytest.raises(ValueError, match="csc is needed for the gradients of source tensors and of att"):
        torch.ops.edgeless.attention_backward(out, None, out, stats, *inputs, *rest, False, wanted)


@pytest.mark.cuda
@MEMORY_FOR_2_TO_THE_31
def test_more_than_two_to_the_31_elements():
    """3.1e9 edge-feature elements, and node rows that lie beyond 2**31 elements of their tensor."""
    heads, channels, nodes, edges = 4, 128, 4_400_000, 6_000_000  # 2.25e9 elements a node tensor
    gen = torch.Generator(device="cuda").manual_seed(0)
    ends = torch.randint(nodes, (2, edges), device="cuda", generator=gen)
    ends[:, : edges // 2] = nodes - 1 - ends[:, : edges // 2] % 1000  # many among the last rows
    graph = Graph.from_edge_index(ends, nodes, nodes)
    shape = (nodes, heads, channels)
    q, k, v = (
        torch.randn(shape, device="cuda", generator=gen, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    out = functional.dot_attention(graph, q, k, v)
    # Rows at the end of the tensors and some others; their in-edges make a small graph with the same results.
    rows = torch.cat([torch.arange(nodes - 200, nodes, device="cuda"), ends[1, -200:]]).unique()
    grad = torch.zeros_like(out)
    grad[rows] = torch.randn(rows.numel(), heads, channels, device="cuda", generator=gen, dtype=torch.bfloat16)
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
