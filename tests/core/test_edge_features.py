"""Attention with edge features of every width: results, gradients, in whatever order the edges stand."""

import pytest
import torch
from attention_cases import TOLERANCE, assert_close, exact, function_of, graph_of, inputs_of, run
from devices import EVERY_DEVICE, assert_same_bits, leaves_on

from edgeless import Graph, functional
from edgeless.graph.formats import PLACES
from edgeless.plan.recording import record

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def case(score, graph, heads, channels, width, dtype, **options):
    """Inputs on a grid of 1/16: sums of products are exact, so no rounding decides the sign of a hidden number."""

    def on_grid(t):
        return (t.detach() * 16).round().clamp(-48, 48).div(16).to(dtype).requires_grad_()

    args, tensors, rest = inputs_of(score, graph, heads, channels, ("edges",), torch.float64)
    generator = torch.Generator().manual_seed(width)
    for name, tensor in tensors.items():
        drawn = torch.randn(*tensor.shape[:-1], width, generator=generator, dtype=torch.float64)
        tensors[name] = drawn * (0.5 if name == "edge_proj" else 1)
    args, tensors = [on_grid(t) for t in args], {name: on_grid(t) for name, t in tensors.items()}
    return args, tensors, {**rest, **options}


def begun_anywhere(t):
    """A leaf whose memory begins one number behind a whole number of vectors."""
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape)
    return memory.copy_(t.detach()).detach().requires_grad_()


def together(score, tensors):
    """Gradients of gat's two logits as one vector: what a destination's gets cancels, all but where slopes differ."""
    return [tensors[0], tensors[1], torch.cat(tensors[2:4]), *tensors[4:]] if score == "gat" else tensors


@EVERY_DEVICE
@pytest.mark.parametrize(
    "score,heads,channels",
    [("gatv2", 4, 16), ("gatv2", 3, 5), ("gatv2", 2, 160), ("gat", 3, 8), ("gat", 1, 8), ("gat", 9, 4), ("dot", 4, 16),
     ("dot", 3, 5)],
)  # fmt: skip
@pytest.mark.parametrize("width", [1, 3, 4, 8, 12, 16, 20, 32, 40, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width(score, heads, channels, width, dtype, device):
    """With the gradient of the features and without: on CUDA these are different kernels, with the same sums."""
    graph = graph_of("hub" if device == "cuda" else "square")  # there, more than a block has at once
    args, tensors, rest = case(score, graph, heads, channels, width, dtype)
    found = run(functional, score, graph, args, tensors, rest, device=device)
    expected = exact(score, graph, args, tensors, rest)
    assert_close(together(score, found), together(score, expected), TOLERANCE[dtype])

    leaves = leaves_on(device, [*args, tensors["edge_proj"]])
    attr = tensors["edge_attr"].detach().to(device)
    out = function_of(score)(graph.to(device), *leaves[:-1], edge_attr=attr, edge_proj=leaves[-1])
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(11)).to(out)
    others = [out.detach().cpu(), *(t.cpu() for t in torch.autograd.grad(out, leaves, grad))]
    assert_close(together(score, others), together(score, [*found[:-2], found[-1]]), TOLERANCE[dtype])
    if device == "cuda":
        assert all(torch.equal(a, b) for a, b in zip(others, [*found[:-2], found[-1]], strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("heads,channels", [(4, 4), (8, 4), (32, 4), (4, 8), (16, 8), (2, 16), (4, 12), (16, 16)])
@pytest.mark.parametrize("width", [4, 5, 12, 16, 33, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_terms_in_tiles(heads, channels, width, dtype):
    """Narrow heads of 16-bit numbers: a warp makes the terms of all its edges together."""
    graph = graph_of("hub")
    args, tensors, rest = case("gatv2", graph, heads, channels, width, dtype)
    found = run(functional, "gatv2", graph, args, tensors, rest, device="cuda")
    assert_close(found, exact("gatv2", graph, args, tensors, rest), TOLERANCE[dtype])
    moved, on_device = leaves_on("cuda", [*args, *tensors.values()]), graph.to("cuda")
    steps = record(
        lambda: functional.gatv2_attention(on_device, *moved[:-2], edge_attr=moved[-2], edge_proj=moved[-1]), moved
    )
    assert len(steps) == 3 and all("edge term in tiles" in step.kernel for step in steps)
    for other in (run(functional, "gatv2", graph, args, tensors, rest, device="cuda") for _ in range(2)):
        assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))


@EVERY_DEVICE
@pytest.mark.parametrize("score", ["gatv2", "gat", "dot"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4, 8])
def test_inputs_that_begin_anywhere(score, dtype, width, device):
    graph = graph_of("square")
    args, tensors, rest = case(score, graph, 2, 8, width, dtype)
    expected = exact(score, graph, args, tensors, rest)
    leaves = [begun_anywhere(t.to(device)) for t in (*args, *tensors.values())]
    out = function_of(score)(graph.to(device), *leaves[:-2], edge_attr=leaves[-2], edge_proj=leaves[-1], **rest)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(11)).to(out)
    found = [t.detach().cpu() for t in (out, *torch.autograd.grad(out, leaves, grad))]
    assert_close(together(score, found), together(score, expected), TOLERANCE[dtype])


@EVERY_DEVICE
@pytest.mark.parametrize("score", ["gatv2", "gat", "dot"])
@pytest.mark.parametrize("kind", ["hub", "no edges", "many empty rows", "bipartite"])
@pytest.mark.parametrize("order", ["any", "by destination", "by source"])
def test_edges_in_any_order(score, kind, order, device):
    """Sorted edges have no ids in one direction. The second gradient finds the places that the graph keeps."""
    given = graph_of(kind)
    ends = given.edge_index()
    if order != "any":
        ends = ends[:, torch.argsort(ends[1 if order == "by destination" else 0], stable=True)]
    for index_dtype in (torch.int32, torch.int64):
        graph = Graph.from_edge_index(ends.to(index_dtype), given.num_src, given.num_dst)
        for options in ({}, {"dropout": 0.4, "seed": 9}):
            args, tensors, rest = case(score, graph, 4, 8, 8, torch.float64, **options)
            expected = exact(score, graph, args, tensors, rest)
            on_device = graph.to(device)
            for _ in range(3):
                assert_close(run(functional, score, on_device, args, tensors, rest, device=device), expected, 1e-10)


@EVERY_DEVICE
@pytest.mark.parametrize("score", ["gatv2", "gat", "dot"])
def test_tensors_of_other_strides(score, device):
    graph = graph_of("square")
    args, tensors, rest = case(score, graph, 2, 4, 3, torch.float64)

    def turned(t):
        return t.detach().mT.contiguous().mT.requires_grad_(t.requires_grad)

    expected = run(functional, score, graph, args, tensors, rest)
    args, tensors = [turned(t) for t in args], {name: turned(t) for name, t in tensors.items()}
    assert_close(run(functional, score, graph.to(device), args, tensors, rest, device=device), expected, 1e-10)


@pytest.mark.cuda
@pytest.mark.parametrize("score", ["gat", "dot"])
def test_places_are_kept_by_a_graph_in_use(score):
    graph = graph_of("hub").to("cuda")
    args, tensors, rest = case(score, graph, 4, 8, 8, torch.float32)
    runs = []
    for _ in range(8):  # the largest degrees, by which a graph is known to be in use, are asked for after some
        runs.append(run(functional, score, graph, args, tensors, rest, device="cuda"))
        torch.cuda.synchronize()
    assert PLACES in graph._formats
    assert torch.equal(graph.csr.edge_ids[graph.format(PLACES, None)], graph.csc.edge_ids)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("score", ["gatv2", "gat", "dot"])
def test_captured_before_places_are_kept(score):
    graph = graph_of("hub").to("cuda")
    args, tensors, rest = case(score, graph, 4, 8, 8, torch.float32)
    leaves = leaves_on("cuda", [*args, *tensors.values()])

    def step():
        out = function_of(score)(graph, *leaves[:-2], edge_attr=leaves[-2], edge_proj=leaves[-1], **rest)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    assert_same_bits("replayed", step, [])
    assert PLACES not in graph._formats


@EVERY_DEVICE
@pytest.mark.parametrize(
    "places,message",
    [(torch.zeros(3, dtype=torch.int32), "places of csc must have shape"),
     (torch.zeros(300, dtype=torch.int64), "places of csc must be Int"),
     (torch.zeros(600, dtype=torch.int32)[::2], "places of csc must be contiguous")],
)  # fmt: skip
def test_places_that_do_not_fit_are_named(places, message, device):
    graph = graph_of("square", torch.int32).to(device)
    args, tensors, _ = case("gat", graph, 2, 4, 3, torch.float32)
    x, source, dst = leaves_on(device, args)
    attr, proj = leaves_on(device, tensors.values())
    places = places.to(device) if places.is_contiguous() else places[: len(places)].to(device).repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match=message):
        torch.ops.edgeless.attention(
            dst, source, x, None, attr, proj.unsqueeze(1), None, graph.csr_arrays(True),
            [*graph.csc_arrays(True), places], None, "gat", 0.2, 0.0, None, [], False,
        )  # fmt: skip
