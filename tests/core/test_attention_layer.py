"""The op of a whole layer against the ops that it is made of: one node of autograd in place of several."""

from types import SimpleNamespace

import pytest
import torch

import edgeless.functional
import edgeless.functional.layer
from edgeless import Graph
from edgeless.functional.layer import attention_layer

NODES, FEATURES, HEADS, CHANNELS = 9, 5, 3, 4
# maps, vectors
KINDS = {
    "gat": (1, 2),
    "gatv2": (2, 1),
    "gatv2-shared": (1, 1),
    "dot": (3, 0),
    "dot-added": (4, 0),
    "dot-shared": (1, 0),
}
ops = torch.ops.edgeless


def graph_of(nodes=NODES, edges=40):
    gen = torch.Generator().manual_seed(3)
    return Graph.from_edge_index(torch.randint(0, nodes, (2, edges), generator=gen), nodes, nodes)


def inputs(kind, row=True, biases=True, nodes=NODES, dtype=torch.float64):
    """x, weights, biases, vectors, row, all with gradients."""
    gen = torch.Generator().manual_seed(1)
    maps, vectors = KINDS[kind]
    width = HEADS * CHANNELS

    def make(*shape):
        return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()

    return (
        make(nodes, FEATURES),
        [make(width, FEATURES) for _ in range(maps)],
        [make(width) if biases and k != 1 else None for k in range(maps)],
        [make(1, HEADS, CHANNELS) for _ in range(vectors)],
        make(width) if row and kind != "dot-added" else None,
    )


def flat(x, weights, biases, vectors, row):
    return [t for t in (x, *weights, *biases, *vectors, row) if t is not None]


def arrays(graph):
    return [list(graph.csr), list(graph.csc)]


def layer(kind, given, graph, dropout=0.0, dtype=None, out_dtype=None, by_head=False):
    x, weights, biases, vectors, row = given
    seed = torch.tensor([7], device=x.device) if dropout else None
    score = kind.partition("-")[0]
    coefficient = 0.5 if score == "dot" else 0.2
    csr, csc = arrays(graph)
    return ops.attention_layer(
        x, weights, biases, vectors, row, csr, csc, seed, score, HEADS, coefficient, dropout, dtype, out_dtype,
        by_head=by_head,
    )  # fmt: skip


def parts(kind, given, graph, dropout=0.0):
    x, weights, biases, vectors, row = given
    score, _, variant = kind.partition("-")
    mapped = [torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    heads = [m.view(len(x), HEADS, CHANNELS) for m in mapped]
    options = {"dropout": dropout, "seed": 7 if dropout else None}
    if score == "gat":
        logits = [(heads[0] * a).sum(-1) for a in vectors]
        out = edgeless.functional.gat_attention(graph, heads[0], *logits, **options)
    elif score == "gatv2":
        out = edgeless.functional.gatv2_attention(graph, heads[0], heads[-1], vectors[0][0], **options)
    else:
        rows = heads * 3 if variant == "shared" else heads[:3]
        out = edgeless.functional.dot_attention(graph, *rows, scale=0.5, **options)
    out = out.flatten(1)
    if variant == "added":
        out = out + mapped[3]
    return out if row is None else out + row


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("row,biases", [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, row, biases, dropout):
    graph, given = graph_of(), inputs(kind, row, biases)
    found, want = layer(kind, given, graph, dropout), parts(kind, given, graph, dropout)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(t, flat(*given), grad) for t in (found, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert "AttentionLayer" in found.grad_fn.name()
    with torch.no_grad():
        assert torch.equal(layer(kind, given, graph, dropout), found)


@pytest.mark.parametrize("row", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_by_head(kind, row):
    """The same numbers, and gradients that come by head."""
    graph, given = graph_of(), inputs(kind, row)
    found, want = layer(kind, given, graph, by_head=True), layer(kind, given, graph)
    assert found.shape == (NODES, HEADS, CHANNELS) and "AttentionLayer" in found.grad_fn.name()
    assert torch.equal(found.flatten(1), want)
    grad = torch.randn_like(found).transpose(0, 1).contiguous().transpose(0, 1)
    for a, b in zip(*(torch.autograd.grad(t, flat(*given), grad.reshape(t.shape)) for t in (found, want)), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert torch.equal(layer(kind, given, graph, by_head=True), found)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_needs_a_gradient_gets_one(kind):
    graph = graph_of()
    given = inputs(kind)
    want = torch.autograd.grad(parts(kind, given, graph).square().sum(), flat(*given))
    for which in range(len(want)):
        for i, t in enumerate(flat(*given)):
            t.requires_grad_(i == which)
        (found,) = torch.autograd.grad(layer(kind, given, graph).square().sum(), [flat(*given)[which]])
        torch.testing.assert_close(found, want[which], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("nodes,edges", [(0, 0), (1, 0), (4, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_empty_graphs(kind, nodes, edges):
    graph = Graph.from_edge_index(torch.zeros(2, edges, dtype=torch.int64), nodes, nodes)
    given = inputs(kind, nodes=nodes)
    found, want = layer(kind, given, graph), parts(kind, given, graph)
    torch.testing.assert_close(found, want)
    for a, b in zip(*(torch.autograd.grad(t.sum(), flat(*given)) for t in (found, want)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    graph, given = graph_of(edges=25), inputs(kind)

    def call(*_):
        return layer(kind, given, graph)

    assert torch.autograd.gradcheck(call, flat(*given))


@pytest.mark.parametrize("kind", ["gat", "gatv2", "dot-added"])
def test_rounds_as_the_parts_do(kind):
    graph, given = graph_of(), inputs(kind, dtype=torch.float32)
    x, weights, biases, vectors, row = given
    found = layer(kind, given, graph, dtype=torch.bfloat16, out_dtype=torch.float32)
    heads = [HEADS] * min(3, len(weights)) + [0] * (len(weights) > 3)
    mapped = ops.project(x, weights, biases, 0, torch.bfloat16, heads)
    if kind == "gat":
        logits = ops.node_logits(mapped[0], vectors)
        want = edgeless.functional.gat_attention(graph, mapped[0], *logits, out_dtype=torch.float32)
    elif kind == "gatv2":
        want = edgeless.functional.gatv2_attention(graph, *mapped, vectors[0][0], out_dtype=torch.float32)
    else:
        want = edgeless.functional.dot_attention(graph, *mapped[:3], scale=0.5, out_dtype=torch.float32)
    want = want.flatten(1) + (mapped[3] if row is None else row)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, want)
    for a, b in zip(*(torch.autograd.grad(t.sum(), flat(*given)) for t in (found, want)), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 2**-7 * b.norm() + 1e-6  # sums are rounded in another order: a unit of bfloat16


@pytest.mark.parametrize("kind", ["gat", "gatv2", "dot-added"])
def test_is_traced_through(kind):
    graph, given = graph_of(), inputs(kind)
    compiled = torch.compile(lambda *_: layer(kind, given, graph), fullgraph=True, backend="aot_eager")
    found = compiled(*flat(*given))
    want = parts(kind, given, graph)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), flat(*given)) for t in (found, want)))


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind):
    x, weights, biases, vectors, row = inputs(kind)
    csr, csc = arrays(graph_of())
    score = kind.partition("-")[0]
    args = (x, weights, biases, vectors, row, csr, csc, None, score, HEADS, 0.2, 0.0, None, None)
    torch.library.opcheck(ops.attention_layer.default, args)


@pytest.mark.parametrize(
    "kind,changes,message",
    [
        ("gat", {"score": "gatv3"}, "score must be"),
        ("gat", {"score": "cosine"}, "score must be 'gat', 'gatv2' or 'dot'"),
        ("gat", {"weights": 2}, "weights must be 1 for this score, got 2"),
        ("gat", {"vectors": 1}, "vectors must be 2 for this score, got 1"),
        ("gatv2", {"weights": 3}, "weights must be 1 or 2 for this score, got 3"),
        ("dot", {"weights": 2}, "weights must be 1, 3 or 4 for this score, got 2"),
        ("dot", {"weights": 4}, "row must be none, with a map that is added"),
    ],
)
def test_bad_input(kind, changes, message):
    x, weights, _, vectors, row = inputs(kind, biases=False)
    weights = (weights * 4)[: changes.get("weights", len(weights))]
    vectors = vectors[: changes.get("vectors", len(vectors))]
    csr, csc = arrays(graph_of())
    score = changes.get("score", kind)
    with pytest.raises(ValueError, match=message):
        ops.attention_layer(
            x, weights, [None] * len(weights), vectors, row, csr, csc, None, score, HEADS, 0.2, 0.0, None, None
        )


def test_which_layers_are_one_op():
    """Small ones, and large ones whose backward writes over what was saved: not what a hook has seen."""

    def is_one_op(nodes, writes_over):
        x = SimpleNamespace(is_cuda=True, size=lambda _: nodes)
        return edgeless.functional.layer._is_one_op(SimpleNamespace(num_src=nodes, num_dst=nodes), x, writes_over)

    assert is_one_op(1000, False) and is_one_op(1000, True)
    assert not is_one_op(1 << 15, False) and is_one_op(1 << 15, True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert is_one_op(1000, True) and not is_one_op(1 << 15, True)


def test_is_for_cuda_alone():
    linear = torch.nn.Linear(FEATURES, HEADS * CHANNELS)
    x, _, _, vectors, row = inputs("gat", dtype=torch.float32)
    options = {"vectors": vectors, "row": row, "heads": HEADS, "coefficient": 0.2}
    assert attention_layer(graph_of(), "gat", x, [linear], **options) is None
