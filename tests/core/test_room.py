"""Arrays of a graph with room for more edges than its rows hold, as programs of torch.compile have them: what is beyond
the last row changes nothing.
"""

import pytest
import torch
from attention_cases import SCORES, graph_of
from devices import EVERY_DEVICE

from edgeless import Graph, functional
from edgeless.graph.handle import Compressed


def with_room(arrays: Compressed, num_columns: int, more: int) -> Compressed:
    """Beyond the last row stand ids like any others: of nodes, and of edges."""
    room = arrays.indices.numel() + more

    def longer(t, ids):
        return torch.cat([t, torch.randint(0, ids, (more,), device=t.device, dtype=t.dtype)])

    return Compressed(arrays.indptr, longer(arrays.indices, num_columns), longer(arrays.edge_ids, room))


def call(name, graph, x):
    heads = x.unflatten(1, (3, -1))
    if name == "gatv2":
        return functional.gatv2_attention(graph, heads, heads, x.new_ones(heads.shape[1:]))
    if name == "dot":
        return functional.dot_attention(graph, heads, heads, heads)
    if name == "gat":
        logits = heads.sum(-1)
        return functional.gat_attention(graph, heads, logits, logits)
    if name == "cosine":
        return functional.cosine_attention(graph, heads)
    if name == "dropout":
        torch.manual_seed(1)
        return functional.dot_attention(graph, heads, heads, heads, dropout=0.5)
    if name in ("none", "both"):
        return functional.spmm(graph, x, norm=name)
    return functional.neighbor_reduce(graph, x, name)


@EVERY_DEVICE
def test_the_attention_vector_alone(device):
    exact = graph_of("square").to(device)
    roomy = Graph(with_room(exact.csr, 40, 500), with_room(exact.csc, 40, 500), 40, 40)
    x, att = torch.randn(40, 3, 8, device=device), torch.randn(3, 8, device=device, requires_grad=True)
    grads = []
    for graph in (exact, roomy):
        out = functional.gatv2_attention(graph, x, x, att)
        grads += torch.autograd.grad(out, [att], torch.cos(out.detach()))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@EVERY_DEVICE
@pytest.mark.parametrize("more", [1, 50, 20_000])
@pytest.mark.parametrize("kind", ["square", "hub", "many empty rows", "no edges"])
@pytest.mark.parametrize("name", [*SCORES, "dropout", "none", "both", "min", "max"])
def test_what_is_beyond_the_last_row_is_not_read(device, more, kind, name):
    exact = graph_of(kind).to(device)
    nodes = max(exact.num_src, exact.num_dst)  # the same rows on both sides
    exact = Graph.from_edge_index(exact.edge_index(), nodes, nodes)
    roomy = Graph(with_room(exact.csr, nodes, more), with_room(exact.csc, nodes, more), nodes, nodes)
    x = torch.randn(nodes, 24, device=device, requires_grad=True)
    results = []
    for graph in (exact, roomy):
        out = call(name, graph, x)
        results.append([out.detach(), *torch.autograd.grad(out, [x], torch.cos(out.detach()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # another number of edges, other shares of them


@EVERY_DEVICE
@pytest.mark.parametrize("more", [1, 20_000])
@pytest.mark.parametrize("kind", ["square", "hub", "many empty rows"])
@pytest.mark.parametrize("name", ["gatv2", "gat", "dot", "sddmm"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_is_known_of_edges(device, more, kind, name, dropout):
    """Of those beyond the last row too, which takes no part in sums over edges and in what others are given."""
    exact = graph_of(kind).to(device)
    nodes = max(exact.num_src, exact.num_dst)
    exact = Graph.from_edge_index(exact.edge_index(), nodes, nodes)
    roomy = Graph(with_room(exact.csr, nodes, more), with_room(exact.csc, nodes, more), nodes, nodes)
    x = torch.randn(nodes, 2, 4, device=device, requires_grad=True)
    attr = torch.randn(exact.num_edges + more, 6, device=device, requires_grad=True)
    proj = torch.randn(*((2, 6) if name == "gat" else (2, 4, 6)), device=device, requires_grad=True)
    results = []
    for graph in (exact, roomy):
        if name == "sddmm":
            results.append([functional.sddmm_dot(graph, x[:, 0], x[:, 1])[: exact.num_edges]])
            continue
        rows = {"gatv2": (x, x, x[0]), "gat": (x, x[..., 0], x[..., 1]), "dot": (x, x, x)}[name]
        given = {"edge_attr": attr[: graph.num_edges], "edge_proj": proj, "dropout": dropout, "seed": 5}
        for _ in range(6):  # the last time a graph keeps what it needs for it
            out = functional.__dict__[f"{name}_attention"](graph, *rows, **given)
            grads = torch.autograd.grad(out, [x, proj, attr], torch.cos(out.detach()))
            if device == "cuda":
                torch.cuda.synchronize()
        results.append([out, *grads[:2], grads[2][: exact.num_edges]])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
